"""An MLP mixer of 8 blocks on random images: Conv2d, LayerNorm, GELU, transposes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH_SIZE, PIXELS, CLASSES = 32, 64, 10


class Block(nn.Module):
    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(patches, 128), nn.GELU(), nn.Linear(128, patches))
        self.channels = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.first(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.second(x))


class Mixer(nn.Module):
    def __init__(self, depth: int = 8, width: int = 192, patch: int = 8) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.blocks = nn.Sequential(*[Block((PIXELS // patch) ** 2, width) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.patches(images).flatten(2).transpose(1, 2))).mean(1))


def model() -> nn.Module:
    return Mixer()


def batch(batch_size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch_size, 3, PIXELS, PIXELS), torch.randint(CLASSES, (batch_size,))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)
