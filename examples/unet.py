"""A U-Net that removes noise from crops of scikit-learn's two sample photographs.

    mesa-tune profile examples/unet.py

Every resolution of the way down is saved until the way up takes it in, and for backward besides.
"""

from __future__ import annotations

import deit_tiny
import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH_SIZE = 16
WIDTHS = (16, 32, 64)
NOISE = 0.5  # standard deviation, beside 1 of the image

Batch = tuple[Tensor, Tensor]


class Convolutions(nn.Sequential):
    """Two convolutions of 3 × 3, each with group norm and SiLU: (n, inner, h, w) to (n, outer, h, w)."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__(
            nn.Conv2d(inner, outer, 3, padding=1),
            nn.GroupNorm(4, outer),
            nn.SiLU(),
            nn.Conv2d(outer, outer, 3, padding=1),
            nn.GroupNorm(4, outer),
            nn.SiLU(),
        )


class UNet(nn.Module):
    """Images (n, 3, h, w) to the noise in them, in the same shape; h and w are multiples of 4."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(map(Convolutions, (3, *WIDTHS), WIDTHS))
        self.widen = nn.ModuleList(
            nn.ConvTranspose2d(deep, wide, 2, stride=2)
            for deep, wide in zip(WIDTHS[:0:-1], WIDTHS[-2::-1], strict=True)
        )
        self.up = nn.ModuleList(Convolutions(2 * wide, wide) for wide in WIDTHS[-2::-1])
        self.last = nn.Conv2d(WIDTHS[0], 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        passed = []
        for convolutions in self.down[:-1]:
            x = convolutions(x)
            passed.append(x)
            x = F.max_pool2d(x, 2)
        x = self.down[-1](x)
        for widen, convolutions in zip(self.widen, self.up, strict=True):
            x = convolutions(torch.cat([passed.pop(), widen(x)], dim=1))
        return self.last(x)


def model() -> nn.Module:
    return UNet()


def batch(batch_size: int) -> Batch:
    """Return crops of 56 × 56 pixels with noise, and the noise."""
    images = F.avg_pool2d(deit_tiny.batch(batch_size)[0], 4)
    noise = NOISE * torch.randn_like(images)
    return images + noise, noise


def loss(model: nn.Module, batch: Batch) -> Tensor:
    images, noise = batch
    return F.mse_loss(model(images), noise)


def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)
