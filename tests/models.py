"""Small models for tests, written as people write them: functions called directly, layers used twice,
branches.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """A transformer block whose q, k and v have one input."""

    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)
        self.proj = nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def _split(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return heads

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = self._split(self.q(h)), self._split(self.k(h)), self._split(self.v(h))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.proj(y)
        out: Tensor = x + self.fc2(F.gelu(self.fc1(self.norm2(x))))
        return out


class ViT(nn.Module):
    """Tokens `(batch, tokens, 16)` to logits; the head can be left away by `get_features`."""

    def __init__(self, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(16, width)
        self.register_buffer("position", torch.randn(1, 1, width))
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def get_features(self, x: Tensor) -> Tensor:
        h = self.embed(x) + self.position
        for block in self.blocks:
            h = block(h)
        normed: Tensor = self.norm(h)
        return normed

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.get_features(x).mean(1))
        return logits


class Functions(nn.Module):
    """No layer at all: parameters, and functions called directly; `product` takes the hooks."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(width, width) / 8)
        self.w2 = nn.Parameter(torch.randn(width, width) / 8)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(F.linear(x, self.w1))
        scores = h @ F.linear(h, self.w2).transpose(-2, -1)
        return F.gelu(F.softmax(scores, dim=-1) @ h)


class Product(nn.Module):
    """One activation moved towards another, and an inverse hyperbolic sine: only hooks reach these."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        y: Tensor = torch.lerp(a, self.b(x).asinh(), a)
        return y


class Reused(nn.Module):
    """One linear layer used three times, and a second name for it."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.again = self.first
        self.tied = nn.Linear(width, width)
        self.tied.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.tied(self.again(F.gelu(self.first(F.gelu(self.first(x))))))
        return out


class Branching(nn.Module):
    """Takes one of two ways."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.left, self.right = Functions(width), Product(width)

    def forward(self, x: Tensor, go_left: bool = True) -> Tensor:
        taken: Any = self.left if go_left else self.right
        y: Tensor = taken(x)
        return y


def renamed(model: nn.Module) -> nn.Module:
    """The model with another class name on every module."""
    for number, module in enumerate(model.modules()):
        if type(module) is not nn.ModuleList:
            module.__class__ = type(f"Renamed{number}", (type(module),), {})
    return model
