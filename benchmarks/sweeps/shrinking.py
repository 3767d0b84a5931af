"""Shrink the published configurations of transformers' model types by the names of their fields.

800 model types have names of their own for the same few sizes, and configurations inside configurations. So
a field is shrunk by what its name says: a width, a number of layers or heads, a vocabulary, a token's id.
`OVERRIDES` holds, by model type, the fields that this would leave inconsistent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

WIDTH = 64
INNER = 128
HEADS = 4
HEAD = WIDTH // HEADS
LAYERS = 2
VOCABULARY = 256
IMAGE = 64
PATCH = 8
TOKENS = 64

_Shrink = Callable[[int], int]


def _at_most(limit: int) -> _Shrink:
    return lambda value: min(value, limit) if value > 0 else value


def _constant(value: int) -> _Shrink:
    return lambda old: value if old > 0 else old


def _heads(value: int) -> int:
    """The largest power of two up to `value` and `HEADS`."""
    return next((size for size in (4, 2, 1) if size <= min(value, HEADS)), value)


# The first pattern that matches a field's whole name decides.
_PATTERNS: tuple[tuple[str, _Shrink], ...] = (
    (r"num_kv_shared_layers|num_nextn_predict_layers|first_k_dense_replace|num_hash_layers", _constant(0)),
    (
        r"num_(stages|feature_levels|upsampling_stages|query_pool_stages|residual_layers|feat_extract_layers)",
        lambda value: value,
    ),
    (r".*layers|n_layers?|depth|.*_depth|num_blocks|num_hidden_groups|num_res_blocks", _at_most(LAYERS)),
    (r"mamba_(n|num)_heads", _constant(2 * WIDTH // HEAD)),
    (r"mamba_n_groups|n_groups", _at_most(2)),
    (r"qk_rope_head_dim|rotary_dim|.*rope_head_dim", _constant(HEAD // 2)),
    (r"qk_head_dim", _constant(HEAD + HEAD // 2)),
    (r".*head_dim|d_kv|attention_head_size|d_head|dim_head|mamba_d_head|.*_head_size", _constant(HEAD)),
    (r"(q|kv|o)_lora_rank", _constant(32)),
    (r".*attention_heads|.*num_heads|n_heads?|.*_heads|num_head", _heads),
    (r".*intermediate_(size|dim)|.*ffn_(dim|size)|d_ff|n_inner|ffn_hidden_size|mlp_dim", _at_most(INNER)),
    (r"dim_feedforward|.*feedforward_dim", _at_most(INNER)),
    (r"moe_topk|moe_k|top_k|num_selected_experts|.*experts_per_tok(en)?", _at_most(2)),
    (r"index_topk|topk_group|n_group", _at_most(2)),
    (r"num_experts|.*_experts|num_local_experts|n_routed_experts", _at_most(4)),
    (r"upsample_groups", _at_most(WIDTH)),
    (r".*hidden_(size|channels)|d_model|n_embd|.*_dims?|dim|width|dim_in|dim_out", _at_most(WIDTH)),
    (r".*(projection|embedding|_proj)_size|query_pre_attn_scalar|pooler_output_size", _at_most(WIDTH)),
    (r"decoder_channels|base_channels", _at_most(WIDTH)),
    (r".*vocab_size.*|num_embeddings|.*codebook_size|num_codevectors_per_group", _at_most(VOCABULARY)),
    (r"image_size|img_size|pretrain_image_size|crop_size|input_size|max_img_size", _at_most(IMAGE)),
    (r"patch_size", _at_most(PATCH)),
    (r".*max_position_embeddings|n_positions|max_(source|target)_positions", _at_most(512)),
    (r"n_ctx|block_size|.*context_length", _at_most(512)),
    (r".*sliding_window(_size)?|window_size|attention_window|local_attention|(.*_)?chunk_size", _at_most(16)),
    (r"num_(queries|query_tokens|latents|image_tokens|denoising)|mm_tokens_per_image", _at_most(16)),
    (r"train_num_points", _at_most(64)),
    (r"image_embedding_size", _constant(IMAGE // PATCH)),
)
_COMPILED = [(re.compile(pattern), shrink) for pattern, shrink in _PATTERNS]
_SAME_AS_HEADS = re.compile(r".*num_key_value_heads|n_head_kv|num_kv_heads|n_kv_heads|.*_kv_heads")
_WIDTHS = re.compile(r".*(hidden_sizes|embed_dims?|channels|widths?|dims?|filters)")
_UNSCALED = re.compile(r"(in|out)_channels|st(em|age)_.*channels")
_DEPTHS = re.compile(r".*(depths|layers|num_blocks|blocks.*|.*repeats)")
_TOKEN = re.compile(r".*token_(id|index)")
_HEADS = ("num_attention_heads", "num_heads", "n_head", "n_heads")
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers")


def shrunken(config: Any) -> dict[str, Any]:
    """The fields of a configuration that a tiny one has otherwise, by name; nested ones as dicts."""
    changes: dict[str, Any] = {}
    for name, value in vars(config).items():
        if name.startswith("_") or isinstance(value, bool):
            continue
        small = _small(config, name, value)
        if small is not None and small != value:
            changes[name] = small
    return changes


def _small(config: Any, name: str, value: Any) -> Any:
    if hasattr(value, "model_type") and hasattr(value, "to_dict"):
        return {"model_type": value.model_type, **shrunken(value)}
    if isinstance(value, int):
        return _small_number(config, name, value)
    if isinstance(value, (list, tuple)) and value:
        return _small_list(config, name, list(value))
    if isinstance(value, dict):
        return _small_dict(config, value)
    return None


def _small_number(config: Any, name: str, value: int) -> int:
    if _TOKEN.fullmatch(name):
        return value if value < VOCABULARY else token_id(name)
    if _SAME_AS_HEADS.fullmatch(name):
        heads = _first(config, _HEADS)
        return HEADS if heads is None or value == heads else _heads(min(value, HEADS // 2))
    if name == "head_dim" and value == getattr(config, "qk_rope_head_dim", None):
        return HEAD // 2
    for pattern, shrink in _COMPILED:
        if pattern.fullmatch(name):
            return shrink(value)
    return value


def _first(config: Any, names: Sequence[str]) -> int | None:
    found = [getattr(config, name, None) for name in names]
    return next((value for value in found if isinstance(value, int)), None)


def token_id(name: str) -> int:
    """A small id for a special token, the same for the same name."""
    base = re.sub(r"_(id|index)$", "", name)
    return 3 + sum(ord(letter) * (place + 1) for place, letter in enumerate(base)) % 90


def _small_list(config: Any, name: str, values: list[Any]) -> list[Any]:
    are_numbers = all(isinstance(value, int) and not isinstance(value, bool) for value in values)
    layers = _first(config, _LAYERS)
    if (
        layers is not None
        and len(values) == layers > LAYERS
        and (name.endswith("_per_layer") or not are_numbers)
    ):
        return _two_kinds(values)
    if not are_numbers:
        return values
    if _DEPTHS.fullmatch(name):
        return [min(value, 1) for value in values]
    if "heads" in name:
        return [_heads(value) for value in values]
    if _WIDTHS.fullmatch(name) and not _UNSCALED.fullmatch(name) and max(values) > WIDTH:
        return [max(16, value * WIDTH // max(values) // 16 * 16) for value in values]
    if name in {"image_size", "img_size"}:
        return [min(value, IMAGE) for value in values]
    return values


def _two_kinds(values: list[Any]) -> list[Any]:
    """An entry for each of `LAYERS` layers, of different kinds where there are some."""
    first = values[0]
    other = next((value for value in values if value != first), first)
    return [first] * (LAYERS - 1) + [other]


def _small_dict(config: Any, value: dict[str, Any]) -> dict[str, Any]:
    """Parameters of rotary embeddings: the sections sum to half of what is rotated."""
    sections = value.get("mrope_section")
    if not isinstance(sections, (list, tuple)):
        return value
    share = value.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
    half = int(HEAD * share) // 2
    third = half // 3
    return {**value, "mrope_section": [half - 2 * third, third, third]}


_RESNET = {
    "model_type": "resnet", "embedding_size": 16, "hidden_sizes": [16, 32, 32, 64], "depths": [1, 1, 1, 1],
    "out_features": ["stage2", "stage3", "stage4"],
}  # fmt: skip
_DETR = {"use_timm_backbone": False, "backbone": None, "backbone_config": _RESNET}
_HEAD = {"head_dim": HEAD}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_MROPE = {"rope_parameters": {**_ROPE, "mrope_section": [2, 3, 3]}}
_HALF_MROPE = {"rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}}
_LEVIT = {"hidden_sizes": [128, 256, 384], "num_attention_heads": [4, 8, 12], "key_dim": [16, 16, 16]}
_SERIES = {"prediction_length": 8, "context_length": 32}
_STAGES = {"num_hidden_layers": 4, "out_features": ["stage1", "stage2", "stage3", "stage4"]}
_FOUR_STAGES = {"backbone_config": _STAGES}
_WITH_MROPE = ("qwen2_vl", "qwen2_5_vl", "glm4v", "glm_ocr")  # as configurations of their own, and of text
OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(("autoformer", "informer", "time_series_transformer"), _SERIES),
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan_vl_text", "ministral"), _HEAD),
    "hunyuan_vl": {"text_config": _HEAD},
    "mamba2": {"num_heads": 2 * WIDTH // HEAD},
    "longt5": {"decoder_start_token_id": 0},
    "moonshine": {"pad_token_id": 0},
    **dict.fromkeys(("detr", "conditional_detr", "deformable_detr", "dab-detr", "table-transformer"), _DETR),
    "bit": {"num_groups": 8},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "mobilebert": {"hidden_size": 128, "embedding_size": 64, "intra_bottleneck_size": 64},
    "levit": {**_LEVIT, "depths": [1, 1, 1], "patch_size": 16},
    "audio-spectrogram-transformer": {"max_length": 128},
    "lilt": {"hidden_size": 96},
    "layoutlmv3": {"coordinate_size": 11, "shape_size": 10, "hidden_size": 64},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "efficientnet": {"hidden_dim": 2560},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2},
    "nemotron": {"head_dim": HEAD, "num_key_value_heads": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "reformer": {"axial_pos_embds_dim": [16, 48], "axial_pos_shape": [8, 8]},
    **{f"{name}_text": _MROPE for name in (*_WITH_MROPE, "glm_image")},
    **{name: {"text_config": _MROPE} for name in (*_WITH_MROPE, "glm46v", "glmga")},
    "colqwen2": {"vlm_config": {"text_config": _MROPE}},
    "glm4v_moe_text": _HALF_MROPE,
    "glm4v_moe": {"text_config": _HALF_MROPE},
    **dict.fromkeys(("depth_anything", "prompt_depth_anything"), _FOUR_STAGES),
}
"""Fields of a model type that the patterns get wrong."""

TOO_LARGE = frozenset(
    {"blt", "perceiver", "vibevoice", "vibevoice_acoustic_tokenizer", "vibevoice_acoustic_tokenizer_decoder"}
    | {"vibevoice_acoustic_tokenizer_encoder", "pe_audio", "pe_audio_encoder", "neucodec", "xcodec2", "dac"}
    | {"univnet", "vits", "bark", "encodec", "xcodec", "fastspeech2_conformer_with_hifigan"}
)
"""Model types whose tiny configuration still has more than 10 million parameters."""
