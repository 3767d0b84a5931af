"""What steps are made of: a net of blocks, a batch, a loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, TOKENS, SAMPLES, CLASSES = 32, 24, 8, 10
Inside = Callable[[Any, Tensor], Any]
Batch = Any
Take = Callable[[Any, Batch], Any]


class Block(nn.Module):
    """A norm and two linear layers around a residual connection, and what `inside` does between them."""

    def __init__(self, inside: Inside | None = None, **parts: Any) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.inside = inside
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Any:
        h = F.gelu(self.up(self.norm(x)))
        return x + self.down(h if self.inside is None else self.inside(self, h))


class Net(nn.Module):
    """Tokens `(samples, tokens, 16)` to logits; `through(self, x)` runs the blocks."""

    def __init__(self, blocks: Iterable[nn.Module] = (), through: Inside | None = None, **parts: Any) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(16, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.ModuleList(blocks or [Block(), Block()])
        self.through = through
        for name, part in parts.items():
            setattr(self, name, part)

    def features(self, x: Tensor) -> Any:
        h = self.embed(x)
        if self.through is not None:
            return self.through(self, h)
        for block in self.blocks:
            h = block(h)
        return h

    def forward(self, x: Tensor) -> Any:
        return self.head(self.features(x).mean(1))


def tokens(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, TOKENS, 16), torch.randint(CLASSES, (n,))


def supervised(model: Any, batch: tuple[Tensor, Tensor]) -> Any:
    return F.cross_entropy(model(batch[0]), batch[1])


def inside(function: Inside, **parts: Any) -> Callable[[], nn.Module]:
    """Two blocks that do something between their layers."""
    return lambda: Net(Block(function, **{k: part() for k, part in parts.items()}) for _ in range(2))


def through(function: Inside, count: int = 2, **parts: Any) -> Callable[[], nn.Module]:
    """A net that runs its blocks by a function."""
    return lambda: Net([Block() for _ in range(count)], function, **{k: p() for k, p in parts.items()})


class Step(NamedTuple):
    """`model()`, `batch(n)`, and `take(model, batch)`, which returns the loss or has called backward.

    `changes`: weights or inputs change by a gradient, so the loss that is returned differs by rounding.
    `draws`: slices draw their dropout, so it differs. `refused`: what the error says. `profiled`: `take` is a
    loss; else it has backwards of its own.
    """

    model: Callable[[], nn.Module] = Net
    take: Take = supervised
    batch: Callable[[int], Batch] = tokens
    changes: bool = False
    draws: bool = False
    refused: str = ""
    profiled: bool = True
