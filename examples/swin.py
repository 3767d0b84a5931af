"""A small Swin transformer of transformers, on crops of scikit-learn's two sample photographs.

    mesa-tune profile examples/swin.py

Attention runs inside windows of 7 × 7 patches, which every other block shifts.
"""

from __future__ import annotations

import deit_tiny
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import SwinConfig, SwinForImageClassification

BATCH_SIZE = 16

Batch = tuple[Tensor, Tensor]


def model() -> nn.Module:
    config = SwinConfig(image_size=112, embed_dim=48, depths=[2, 2, 2], num_heads=[3, 6, 12], window_size=7)
    config.num_labels = 12
    return SwinForImageClassification(config)


def batch(batch_size: int) -> Batch:
    """Return random crops of 112 × 112 pixels; the label is the photograph and the crop's cell."""
    images, labels = deit_tiny.batch(batch_size)
    return F.avg_pool2d(images, 2), labels


def loss(model: nn.Module, batch: Batch) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images).logits, labels)


def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=5e-4, weight_decay=0.05, fused=True)
