"""Models of transformers that skip layers, route tokens or record outputs, as they train by default."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import mesa_tune as mt
from tests.builders import known

CONVOLUTIONS: dict[str, Any] = {"conv_dim": [32, 32], "conv_kernel": [8, 4], "conv_stride": [4, 2]}
SPEECH: dict[str, Any] = {
    **CONVOLUTIONS,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "vocab_size": 32,
    "layerdrop": 0.3,
    "mask_time_prob": 0.0,
    "ctc_loss_reduction": "mean",
}


def wav2vec2() -> nn.Module:
    model: nn.Module = transformers.Wav2Vec2ForCTC(transformers.Wav2Vec2Config(**SPEECH))
    return model.train()


def hubert() -> nn.Module:
    model: nn.Module = transformers.HubertForCTC(transformers.HubertConfig(**SPEECH))
    return model.train()


def m2m100() -> nn.Module:
    layers: dict[str, Any] = {f"{side}_layers": 3 for side in ("encoder", "decoder")}
    layers |= {f"{side}_attention_heads": 2 for side in ("encoder", "decoder")}
    layers |= {f"{side}_ffn_dim": 128 for side in ("encoder", "decoder")}
    layers |= {f"{side}_layerdrop": 0.3 for side in ("encoder", "decoder")}
    config = transformers.M2M100Config(vocab_size=128, d_model=64, use_cache=False, **layers)
    model: nn.Module = transformers.M2M100ForConditionalGeneration(config)
    return model.train()


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        output_router_logits=True,
        router_aux_loss_coef=0.02,
        use_cache=False,
    )
    model: nn.Module = transformers.MixtralForCausalLM(config)
    return model.train()


def segformer() -> nn.Module:
    """Its head takes the hidden states that hooks record, which the first forward registers."""
    sizes: dict[str, Any] = {"depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [32, 64]}
    sizes |= {"patch_sizes": [3, 3], "strides": [2, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2]}
    sizes |= {"num_encoder_blocks": 2, "decoder_hidden_size": 32, "num_labels": 4}
    config = transformers.SegformerConfig(**sizes)
    model: nn.Module = transformers.SegformerForSemanticSegmentation(config)
    return model.train()


def scenes(n: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(n, 3, 32, 32), "labels": torch.randint(0, 4, (n, 32, 32))}


def speech(n: int) -> dict[str, Tensor]:
    return {"input_values": torch.randn(n, 800), "labels": torch.randint(1, 32, (n, 6))}


def words(n: int) -> dict[str, Tensor]:
    ids = torch.randint(3, 128, (n, 32))
    return {"input_ids": ids, "labels": ids}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    return model(**batch).loss


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any], int]] = {
    "wav2vec2": (wav2vec2, speech, 8),
    "HuBERT": (hubert, speech, 8),
    "M2M100": (m2m100, words, 16),
    "Mixtral": (mixtral, words, 16),
    "SegFormer": (segformer, scenes, 8),
}


@pytest.mark.slow("sweep")
@pytest.mark.parametrize("name", CASES)
def test_a_plan_for_60_percent_keeps_its_promise(name: str) -> None:
    model, batch, samples = CASES[name]
    work = mt.Workload(model, batch, loss, batch_size=samples)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        profile = mt.profile(work, options=[mt.LayerSettings(level=2**bits) for bits in (2, 4, 8)], seeds=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "(?!mesa-tune)")
        plan = mt.search_policy(profile, "60%", trials=0, max_noise_ratio=1.0, workload=work)
        check = mt.verify(work, plan.policy, steps=1, seeds=3)
    assert known(check.policy.peak_bytes) <= 1.003 * known(plan.budget_bytes)
    assert known(check.policy.saved_bytes) <= 1.003 * plan.predicted.saved_bytes
    assert known(check.gradient_noise_ratio) <= known(plan.predicted.gradient_noise_ratio_interval)[1]
