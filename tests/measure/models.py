"""Models with everything that makes a profile hard, and one profile of each for all test files."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import mesa_tune as mt
from mesa_tune.profiles.entries import fast_grid
from tests import builders
from tests.engine.test_deriving import gated as gated_perceptron
from tests.step_memory import Composed, without_variants

BATCH, SEEDS, WIDTH, TOKENS = 8, 8, 64, 20
DIGITS = Path(__file__).parents[2] / "examples" / "digits_vit.py"


def linear(*names: str) -> dict[str, nn.Module]:
    """A square layer of each name."""
    return {name: nn.Linear(WIDTH, WIDTH) for name in names}


def matmul_block() -> nn.Module:
    """A transformer block whose attention is products and a softmax, each of which keeps its own tensors."""

    def forward(m: Any, x: Tensor) -> Any:
        h = m.norm(x)
        q, k, v = (layer(h).view(*h.shape[:2], 4, -1).transpose(1, 2) for layer in (m.q, m.k, m.v))
        attended = ((q @ k.transpose(-2, -1)) * 0.25).softmax(-1) @ v
        x = x + m.out(attended.transpose(1, 2).reshape(x.shape))
        return x + m.fc2(m.act(m.fc1(m.norm2(x))))

    layers = {"norm": nn.LayerNorm(WIDTH), **linear("q", "k", "v", "out"), "norm2": nn.LayerNorm(WIDTH)}
    mlp = {"fc1": nn.Linear(WIDTH, 4 * WIDTH), "act": nn.GELU(), "fc2": nn.Linear(4 * WIDTH, WIDTH)}
    return Composed(forward, **layers, **mlp)


def transformer() -> nn.Module:
    """Attention of matmul and softmax (which share a tensor), and q, k, v layers of one input."""
    parts = {"embed": nn.Linear(WIDTH, WIDTH), "blocks": nn.Sequential(matmul_block())}
    return Composed(lambda m, x: m.head(m.blocks(m.embed(x)).mean(1)), **parts, head=nn.Linear(WIDTH, 10))


def two_convolutions() -> dict[str, nn.Module]:
    """Convolution and batch norm, twice."""
    first = {"conv1": nn.Conv2d(3, 16, 3, padding=1), "bn1": nn.BatchNorm2d(16)}
    return {**first, "conv2": nn.Conv2d(16, 16, 3, padding=1), "bn2": nn.BatchNorm2d(16)}


def convolutions() -> nn.Module:
    """ReLU and convolution keep one tensor; batch statistics; a mean of two tensors that only hooks reach."""

    def forward(m: Any, x: Tensor) -> Any:
        x = m.relu(m.bn1(m.conv1(x)))
        gate = torch.sigmoid(x)
        x = torch.lerp(m.relu(m.bn2(m.conv2(x)) + x), gate, gate)
        return m.head(x.mean((2, 3)))

    return Composed(forward, **two_convolutions(), relu=nn.ReLU(), head=nn.Linear(16, 10))


def reused() -> nn.Module:
    """One layer run twice, one weight in two layers, and two branches of one input."""

    def forward(m: Any, x: Tensor) -> Any:
        x = m.act(m.first(x))
        x = m.twice(F.gelu(m.twice(x)))
        return m.head(m.norm(m.left(x) + m.act(m.right(x))).mean(1))

    layers = linear("first", "twice", "left", "right")
    layers["right"].weight = layers["first"].weight
    return Composed(forward, **layers, norm=nn.LayerNorm(WIDTH), act=nn.GELU(), head=nn.Linear(WIDTH, 10))


def class_token() -> nn.Module:
    """Its head keeps a small view of a large storage, as vision transformers do."""
    parts = {"body": nn.Linear(WIDTH, WIDTH), "norm": nn.LayerNorm(WIDTH), "head": nn.Linear(WIDTH, 10)}
    return Composed(lambda m, x: m.head(m.norm(m.body(F.gelu(m.body(x))))[:, 0]), **parts)


def gated() -> nn.Module:
    """Two gated perceptrons after RMS norms written by hand, as Llama has them."""
    body = nn.Sequential(nn.Linear(WIDTH, WIDTH), gated_perceptron(), gated_perceptron())
    return Composed(lambda m, x: m.head(m.body(x).mean(1)), body=body, head=nn.Linear(WIDTH, 10))


def dropped() -> nn.Module:
    """Dropout between what is derived from and who derives."""

    def forward(m: Any, x: Tensor) -> Any:
        x = m.drop(m.norm(m.embed(x)))
        x = m.second(m.drop(m.act(m.first(x))))
        return m.head(F.gelu(x).mean(1))

    first = {**linear("embed"), "norm": nn.LayerNorm(WIDTH), "first": nn.Linear(WIDTH, 2 * WIDTH)}
    then = {"act": nn.GELU(), "drop": nn.Dropout(0.2), "second": nn.Linear(2 * WIDTH, WIDTH)}
    return Composed(forward, **first, **then, head=nn.Linear(WIDTH, 10))


def silu() -> nn.Module:
    """Convolution, batch norm, SiLU, twice: the SiLU's own input can be derived as well."""

    def forward(m: Any, x: Tensor) -> Any:
        x = F.silu(m.bn1(m.conv1(x)))
        x = x + F.silu(m.bn2(m.conv2(x)))
        return m.head(m.conv3(x).mean((2, 3)))

    last = {"conv3": nn.Conv2d(16, 16, 3, padding=1), "head": nn.Linear(16, 10)}
    return Composed(forward, **two_convolutions(), **last)


def resnet(*depths: int) -> nn.Module:
    sizes: dict[str, Any] = {"embedding_size": 16, "hidden_sizes": [32, 64], "num_labels": 10}
    return transformers.ResNetForImageClassification(transformers.ResNetConfig(depths=list(depths), **sizes))


def pixels(count: int, size: int = 32) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(count, 3, size, size), "labels": torch.randint(10, (count,))}


def three_classes(size: int) -> tuple[Tensor, Tensor]:
    """Rows of 20 numbers that say a little of their class."""
    target = torch.randint(0, 3, (size,))
    return torch.randn(size, 20) + 0.3 * target.unsqueeze(1), target


def text_batch(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, TOKENS, WIDTH), torch.randint(0, 10, (n,))


def image_batch(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 3, 16, 16), torch.randint(0, 10, (n,))


Made = tuple[Callable[[], nn.Module], Callable[[int], Any]]
MODELS: dict[str, Made] = {
    "transformer": (transformer, text_batch),
    "convolutions": (convolutions, image_batch),
    "reused": (reused, text_batch),
    "class token": (class_token, text_batch),
}
CHAINS: dict[str, Made] = {
    **MODELS,
    "llama": (gated, text_batch),
    "dropped": (dropped, text_batch),
    "silu": (silu, image_batch),
}
"""Also models of which layers can derive what they keep in more ways."""


def workload_of(name: str) -> mt.Workload:
    return builders.workload(*CHAINS[name], batch_size=BATCH)


@cache
def language_profile() -> mt.Profile:
    """The profile of a model whose logits are large: the loss can have slices, and blocks can run again."""
    options = [mt.LayerSettings(level=level) for level in (4, 16)]
    return mt.profile(builders.language_workload(), options=options, seeds=2)


@cache
def profile_of(name: str) -> mt.Profile:
    """The profile that all tests of this model look at."""
    options = fast_grid() if name in MODELS else [mt.LayerSettings(level=n) for n in (4, 16, 256)]
    with without_variants():
        return mt.profile(workload_of(name), options=options, seeds=SEEDS if name in MODELS else 4)
