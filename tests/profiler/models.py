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
from mesa_tune.profiler.entries import fast_grid
from tests import builders
from tests.engine.test_deriving import Gated
from tests.step_memory import Composed, without_variants

BATCH, SEEDS, WIDTH, TOKENS = 8, 8, 64, 20
DIGITS = Path(__file__).parents[2] / "examples" / "digits_vit.py"


class MatmulBlock(nn.Module):
    """A transformer block whose attention is products and a softmax, each of which keeps its own tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.fc1, self.act, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        h = self.norm(x)
        q, k, v = (layer(h).view(*h.shape[:2], 4, -1).transpose(1, 2) for layer in (self.q, self.k, self.v))
        attended = ((q @ k.transpose(-2, -1)) * 0.25).softmax(-1) @ v
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.fc2(self.act(self.fc1(self.norm2(x))))


def transformer() -> nn.Module:
    """Attention of matmul and softmax (which share a tensor), and q, k, v layers of one input."""
    parts = {"embed": nn.Linear(WIDTH, WIDTH), "blocks": nn.Sequential(MatmulBlock())}
    return Composed(lambda m, x: m.head(m.blocks(m.embed(x)).mean(1)), **parts, head=nn.Linear(WIDTH, 10))


class Convolutions(nn.Module):
    """ReLU and convolution keep one tensor; batch statistics; a mean of two tensors that only hooks reach."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.conv2, self.bn2 = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.relu = nn.ReLU()
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Any:
        x = self.relu(self.bn1(self.conv1(x)))
        gate = torch.sigmoid(x)
        x = torch.lerp(self.relu(self.bn2(self.conv2(x)) + x), gate, gate)
        return self.head(x.mean((2, 3)))


class Reused(nn.Module):
    """One layer run twice, one weight in two layers, and two branches of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.right.weight = self.first.weight
        self.norm, self.act, self.head = nn.LayerNorm(WIDTH), nn.GELU(), nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Any:
        x = self.act(self.first(x))
        x = self.twice(F.gelu(self.twice(x)))
        return self.head(self.norm(self.left(x) + self.act(self.right(x))).mean(1))


def class_token() -> nn.Module:
    """Its head keeps a small view of a large storage, as vision transformers do."""
    parts = {"body": nn.Linear(WIDTH, WIDTH), "norm": nn.LayerNorm(WIDTH), "head": nn.Linear(WIDTH, 10)}
    return Composed(lambda m, x: m.head(m.norm(m.body(F.gelu(m.body(x))))[:, 0]), **parts)


def gated() -> nn.Module:
    """Two gated perceptrons after RMS norms written by hand, as Llama has them."""
    body = nn.Sequential(nn.Linear(WIDTH, WIDTH), Gated(), Gated())
    return Composed(lambda m, x: m.head(m.body(x).mean(1)), body=body, head=nn.Linear(WIDTH, 10))


class Dropped(nn.Module):
    """Dropout between what is derived from and who derives."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.act, self.drop = nn.GELU(), nn.Dropout(0.2)
        self.second, self.head = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Any:
        x = self.drop(self.norm(self.embed(x)))
        x = self.second(self.drop(self.act(self.first(x))))
        return self.head(F.gelu(x).mean(1))


class Silu(nn.Module):
    """Convolution, batch norm, SiLU, twice: the SiLU's own input can be derived as well."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.conv2, self.bn2 = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.conv3, self.head = nn.Conv2d(16, 16, 3, padding=1), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Any:
        x = F.silu(self.bn1(self.conv1(x)))
        x = x + F.silu(self.bn2(self.conv2(x)))
        return self.head(self.conv3(x).mean((2, 3)))


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
    "convolutions": (Convolutions, image_batch),
    "reused": (Reused, text_batch),
    "class token": (class_token, text_batch),
}
CHAINS: dict[str, Made] = {
    **MODELS,
    "llama": (gated, text_batch),
    "dropped": (Dropped, text_batch),
    "silu": (Silu, image_batch),
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
