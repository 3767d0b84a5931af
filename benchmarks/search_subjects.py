"""The models of `search.py`, with real data: digits, crops of photographs, words of the standard library."""

from __future__ import annotations

import re
import sysconfig
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from accuracy import load_example
from torch import Tensor, nn
from transformers import (
    DeiTConfig,
    DeiTForImageClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
)

DIGITS = load_example("digits_vit")
PHOTOGRAPHS = load_example("deit_tiny")
Batch = tuple[Tensor, Tensor]


class Subject(NamedTuple):
    """A model, its batches and loss, the batch size, and the class name of its blocks."""

    title: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss: Callable[[nn.Module, Any], Tensor]
    batch_size: int
    block: str
    learning_rate: float = 3e-4


@cache
def words() -> Tensor:
    """Return the words of Python's standard library, as ranks by frequency."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = re.findall(r"\w+|[^\w\s]|\s+", "".join(file.read_text("utf-8", "ignore") for file in files))
    ranks = {word: rank for rank, (word, _) in enumerate(Counter(text).most_common())}
    return torch.tensor([ranks[word] for word in text])


def text_batch(vocabulary: int, length: int, count: int) -> Tensor:
    """Return `count` windows of the text, (count, length + 1); rare words are one."""
    starts = torch.randint(len(words()) - length, (count,))
    return words()[starts[:, None] + torch.arange(length + 1)].clamp(max=vocabulary - 1)


def text_loss(model: nn.Module, batch: Tensor) -> Tensor:
    logits = model(batch[:, :-1]).logits
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def small_crops(pixels: int, count: int) -> Batch:
    """Return crops of photographs, reduced to `pixels`, and their labels."""
    images, labels = PHOTOGRAPHS.batch(count)
    return F.interpolate(images, size=pixels, mode="bilinear", antialias=True), labels


def image_loss(model: nn.Module, batch: Batch) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images).logits, labels)


def deit() -> nn.Module:
    config = DeiTConfig(hidden_size=192, num_hidden_layers=12, num_attention_heads=3, intermediate_size=768)
    config.num_labels = 12
    return DeiTForImageClassification(config)


def gpt2() -> nn.Module:
    config = GPT2Config(n_layer=4, n_embd=256, n_head=4, use_cache=False)
    config.update({"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0})
    return GPT2LMHeadModel(config)


def llama() -> nn.Module:
    config = LlamaConfig(
        vocab_size=8192, hidden_size=256, intermediate_size=688, num_hidden_layers=6, num_attention_heads=4
    )
    config.use_cache = False
    return LlamaForCausalLM(config)


def resnet() -> nn.Module:
    config = ResNetConfig()
    config.num_labels = 12
    return ResNetForImageClassification(config)


SUBJECTS = {
    "digits_vit": Subject("digits ViT", DIGITS.model, DIGITS.batch, DIGITS.loss, 64, "Block", 3e-3),
    "deit_ti": Subject("DeiT-Ti, 224 px", deit, PHOTOGRAPHS.batch, image_loss, 8, "DeiTLayer"),
    "gpt2": Subject(
        "GPT-2, 4 layers, 50,257 words", gpt2, partial(text_batch, 50257, 256), text_loss, 4, "GPT2Block"
    ),
    "resnet_50": Subject(
        "ResNet-50, 112 px", resnet, partial(small_crops, 112), image_loss, 8, "ResNetBottleNeckLayer"
    ),
    "llama": Subject(
        "Llama-style, 6 layers",
        llama,
        partial(text_batch, 8192, 256),
        text_loss,
        4,
        "LlamaDecoderLayer",
    ),
}

# Where the peak of the smallest plan is that of activations, not of the optimizer's step.
SUBJECTS |= {f"{name}_32": SUBJECTS[name]._replace(batch_size=32) for name in ("deit_ti", "resnet_50")}
