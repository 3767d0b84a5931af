"""A ResNet-18 of half the width, of transformers, on crops of scikit-learn's two sample photographs.

mesa-tune profile examples/resnet.py
"""

from __future__ import annotations

import deit_tiny
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import ResNetConfig, ResNetForImageClassification

BATCH_SIZE = 32

Batch = tuple[Tensor, Tensor]


def model() -> nn.Module:
    config = ResNetConfig(
        embedding_size=32, hidden_sizes=[32, 64, 128, 256], depths=[2, 2, 2, 2], layer_type="basic"
    )
    config.num_labels = 12
    return ResNetForImageClassification(config)


def batch(batch_size: int) -> Batch:
    """Return random crops of 112 × 112 pixels; the label is the photograph and the crop's cell."""
    images, labels = deit_tiny.batch(batch_size)
    return F.avg_pool2d(images, 2), labels


def loss(model: nn.Module, batch: Batch) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images).logits, labels)


def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-4, fused=True)
