"""Models for benchmarks, in published and tiny sizes: transformers' configurations, and two U-Nets.

Weights and batches are random: nothing is downloaded. The project states figures for the models of `TUNED`.
The models of `UNTUNED` were never used while tuning mesa-tune.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import mesa_tune as mt

Batch = dict[str, Tensor]
CLASSES = 1000
MIN_LENGTH = 0.5  # shortest text before padding, as a fraction of the longest


class ZooModel(NamedTuple):
    """How to build a model and its batch, by scale, and its loss.

    `asked`: the largest acceptable saved bytes at uniform 16, as a fraction of the plain model's; `derived`:
    the same with `store: derive` (None: no limit).
    """

    title: str
    build: Callable[[str, float | None], nn.Module]
    batch: Callable[[str, int], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    asked: float = 0.14
    derived: float | None = None


def workload(
    name: str,
    batch_size: int,
    *,
    scale: str = "published",
    autocast: str | None = None,
    dropout: float | None = None,
) -> mt.Workload:
    """Return the model `name` as a workload. `scale`: `published` or `tiny`; `dropout`: another rate."""
    chosen = ZOO[name]
    build, batch = partial(chosen.build, scale, dropout), partial(chosen.batch, scale)
    return mt.Workload(build, batch, chosen.loss, batch_size=batch_size, autocast=autocast)


class Double(nn.Module):
    """Convolution, group norm and SiLU, twice."""

    def __init__(self, before: int, after: int, dropout: float) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, padding=1)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1)
        self.norm1, self.norm2 = nn.GroupNorm(8, after), nn.GroupNorm(8, after)
        self.silu, self.dropout = nn.SiLU(), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        h = self.dropout(self.silu(self.norm1(self.conv1(x))))
        y: Tensor = self.silu(self.norm2(self.conv2(h)))
        return y


class Residual(nn.Module):
    """Group norm, SiLU and convolution, twice, beside a shortcut, as in diffusion models.

    A norm and the shortcut's convolution have the same input, of which PyTorch saves one copy.
    """

    def __init__(self, before: int, after: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, before), nn.GroupNorm(8, after)
        self.conv1 = nn.Conv2d(before, after, 3, padding=1)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1)
        self.silu, self.dropout = nn.SiLU(), nn.Dropout(dropout)
        self.shortcut = nn.Identity() if before == after else nn.Conv2d(before, after, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(self.silu(self.norm1(x)))
        h = self.conv2(self.dropout(self.silu(self.norm2(h))))
        y: Tensor = self.shortcut(x) + h
        return y


class UNet(nn.Module):
    """U-Net: blocks from fine to coarse resolution and back, with skip connections."""

    def __init__(self, block: Callable[..., nn.Module], width: int, levels: int, dropout: float) -> None:
        super().__init__()
        widths = [width << level for level in range(levels)]
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(
            block(before, after, dropout) for before, after in zip([width, *widths], widths, strict=False)
        )
        self.pool = nn.MaxPool2d(2)
        self.middle = block(widths[-1], widths[-1], dropout)
        self.upsample = nn.Upsample(scale_factor=2, mode="nearest")
        self.up = nn.ModuleList(
            block(above + skip, skip, dropout)
            for above, skip in zip([widths[-1], *reversed(widths)], reversed(widths), strict=False)
        )
        self.head = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        skips = []
        for block in self.down:
            h = block(h)
            skips.append(h)
            h = self.pool(h)
        h = self.middle(h)
        for block, skip in zip(self.up, reversed(skips), strict=True):
            h = block(torch.cat([self.upsample(h), skip], dim=1))
        y: Tensor = self.head(h)
        return y


def _unet(block: Callable[..., nn.Module], scale: str, dropout: float | None) -> nn.Module:
    width, levels = (64, 4) if scale == "published" else (16, 2)
    return UNet(block, width, levels, 0.1 if dropout is None else dropout)


def configured(
    config: str, model: str, published: Mapping[str, Any], tiny: Mapping[str, Any]
) -> Callable[[str, float | None], nn.Module]:
    """Return a function that builds transformers' `model`; it imports late, as each import takes a while."""

    def build(scale: str, dropout: float | None) -> nn.Module:
        chosen = getattr(transformers, config)(**(published if scale == "published" else tiny))
        if dropout is not None:
            _drop(chosen, dropout)
        made: nn.Module = getattr(transformers, model)(chosen)
        return made

    return build


def _drop(config: Any, rate: float) -> None:
    for key, value in config.to_dict().items():
        if ("dropout" in key or key.endswith("pdrop")) and isinstance(value, float):
            setattr(config, key, rate)


def _images(scale: str, batch_size: int, size: int = 224, tiny: int = 32) -> Batch:
    side = size if scale == "published" else tiny
    return {
        "pixel_values": torch.randn(batch_size, 3, side, side),
        "labels": torch.randint(CLASSES if scale == "published" else 10, (batch_size,)),
    }


def _pictures(scale: str, batch_size: int) -> Batch:
    """Images without labels."""
    return {"pixel_values": _images(scale, batch_size)["pixel_values"]}


def _maps(scale: str, batch_size: int) -> Batch:
    """Images with a class for each pixel."""
    images = _images(scale, batch_size, tiny=64)["pixel_values"]
    return {"pixel_values": images, "labels": torch.randint(10, (batch_size, *images.shape[2:]))}


def _text(scale: str, batch_size: int) -> Batch:
    shape = (batch_size, 256) if scale == "published" else (batch_size, 64)
    ids = torch.randint(100, 30_000 if scale == "published" else 256, shape)
    return {"input_ids": ids, "labels": ids.clone()}


def _padded(scale: str, batch_size: int) -> Batch:
    """Texts of unequal lengths, padded, with an attention mask."""
    batch = _text(scale, batch_size)
    length = batch["input_ids"].shape[1]
    ends = torch.randint(int(MIN_LENGTH * length), length + 1, (batch_size, 1))
    mask = (torch.arange(length) < ends).long()
    return {**batch, "attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}


def _masked(scale: str, batch_size: int) -> Batch:
    """Padded texts with labels for 15 % of the tokens."""
    batch = _padded(scale, batch_size)
    return {**batch, "labels": batch["labels"].masked_fill(torch.rand(batch["labels"].shape) > 0.15, -100)}


def _classify(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["pixel_values"]).logits, batch["labels"])


def _own_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss that the model computes itself."""
    value: Tensor = model(**batch).loss
    return value


def _denoise(model: nn.Module, batch: Batch) -> Tensor:
    images = batch["pixel_values"]
    noise = torch.randn_like(images)
    return F.mse_loss(model(images + noise), noise)


_TINY_VIT = {
    "image_size": 32,
    "patch_size": 4,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 128,
}
_TINY_STAGES = {"image_size": 32, "patch_size": 2, "embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4]}
_TINY_PVT = {
    "image_size": 64,
    "num_encoder_blocks": 2,
    "depths": [1, 1],
    "sequence_reduction_ratios": [2, 1],
    "hidden_sizes": [32, 64],
    "patch_sizes": [4, 2],
    "strides": [4, 2],
    "num_attention_heads": [1, 2],
    "mlp_ratios": [2, 2],
}
_TINY_SEGFORMER = {
    "num_encoder_blocks": 2,
    "depths": [1, 1],
    "sr_ratios": [2, 1],
    "hidden_sizes": [32, 64],
    "patch_sizes": [3, 3],
    "strides": [2, 2],
    "num_attention_heads": [1, 2],
    "mlp_ratios": [2, 2],
    "decoder_hidden_size": 32,
}
_TINY_TEXT = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 128,
}
_LLAMA = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "intermediate_size": 2048,
}
_NO_CACHE = {"use_cache": False}
_CLASSES = {"num_labels": CLASSES}
_TEN = {"num_labels": 10}
_DEIT_S = {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536}

TUNED: dict[str, ZooModel] = {
    "deit_s": ZooModel(
        "DeiT-S",
        configured("DeiTConfig", "DeiTForImageClassification", _DEIT_S | _CLASSES, _TINY_VIT | _TEN),
        _images,
        _classify,
        derived=0.09,
    ),
    "swin_t": ZooModel(
        "Swin-T",
        configured(
            "SwinConfig", "SwinForImageClassification", _CLASSES, _TINY_STAGES | {"window_size": 4} | _TEN
        ),
        _images,
        _classify,
    ),
    "pvt_t": ZooModel(
        "PVT-T",
        configured("PvtConfig", "PvtForImageClassification", _CLASSES, _TINY_PVT | _TEN),
        partial(_images, tiny=64),
        _classify,
    ),
    "resnet_50": ZooModel(
        "ResNet-50",
        configured(
            "ResNetConfig",
            "ResNetForImageClassification",
            _CLASSES,
            {"embedding_size": 16, "hidden_sizes": [32, 64], "depths": [1, 2]} | _TEN,
        ),
        partial(_images, tiny=64),
        _classify,
        asked=0.15,
        derived=0.13,
    ),
    "bert_base": ZooModel(
        "BERT-base",
        configured("BertConfig", "BertForMaskedLM", {}, _TINY_TEXT),
        _masked,
        _own_loss,
        derived=0.1,
    ),
    "gpt2": ZooModel(
        "GPT-2",
        configured(
            "GPT2Config",
            "GPT2LMHeadModel",
            _NO_CACHE,
            {"vocab_size": 256, "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 64}
            | {"bos_token_id": 0, "eos_token_id": 0}
            | _NO_CACHE,
        ),
        _text,
        _own_loss,
        derived=0.1,
    ),
    "llama": ZooModel(
        "Llama-style",
        configured(
            "LlamaConfig",
            "LlamaForCausalLM",
            _LLAMA | _NO_CACHE,
            _TINY_TEXT | {"num_key_value_heads": 1} | _NO_CACHE,
        ),
        _text,
        _own_loss,
        derived=0.1,
    ),
    "unet": ZooModel("U-Net", partial(_unet, Double), partial(_images, size=128), _denoise, asked=0.15),
}
UNTUNED: dict[str, ZooModel] = {
    "unet_residual": ZooModel(
        "U-Net, residual", partial(_unet, Residual), partial(_images, size=128), _denoise, asked=0.15
    ),
    "t5_small": ZooModel(
        "T5-small",
        configured(
            "T5Config",
            "T5ForConditionalGeneration",
            _NO_CACHE | {"decoder_start_token_id": 0},
            {"vocab_size": 256, "d_model": 64, "d_kv": 32, "d_ff": 128, "num_layers": 1, "num_heads": 2}
            | {"decoder_start_token_id": 0}
            | _NO_CACHE,
        ),
        _padded,
        _own_loss,
    ),
    "convnext_t": ZooModel(
        "ConvNeXt-T",
        configured(
            "ConvNextConfig",
            "ConvNextForImageClassification",
            _CLASSES,
            {"num_stages": 2, "hidden_sizes": [32, 64], "depths": [1, 2]} | _TEN,
        ),
        partial(_images, tiny=64),
        _classify,
        asked=0.15,
    ),
    "vit_mae": ZooModel(
        "ViT-MAE",
        configured(
            "ViTMAEConfig",
            "ViTMAEForPreTraining",
            {},
            _TINY_VIT
            | {"decoder_hidden_size": 32, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2}
            | {"decoder_intermediate_size": 64},
        ),
        _pictures,
        _own_loss,
    ),
    "segformer_b0": ZooModel(
        "SegFormer-B0",
        configured(
            "SegformerConfig", "SegformerForSemanticSegmentation", {"num_labels": 150}, _TINY_SEGFORMER | _TEN
        ),
        _maps,
        _own_loss,
    ),
    "mobilenet_v2": ZooModel(
        "MobileNetV2",
        configured(
            "MobileNetV2Config",
            "MobileNetV2ForImageClassification",
            _CLASSES,
            {"depth_multiplier": 0.25, "classifier_dropout_prob": 0.1} | _TEN,
        ),
        partial(_images, tiny=64),
        _classify,
        asked=0.15,
    ),
}
ZOO: dict[str, ZooModel] = TUNED | UNTUNED
