"""A task of `learning.py`: a small ResNet with batch norms on images of handwritten digits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from learning_tasks import DIGITS, Task
from torch import Tensor, nn
from transformers import ResNetConfig, ResNetForImageClassification

import mesa_tune as mt


def resnet() -> nn.Module:
    """Return a ResNet of six basic blocks for images of `(batch, 1, 32, 32)`."""
    config = ResNetConfig(
        num_channels=1, embedding_size=16, hidden_sizes=[16, 32, 64], depths=[2, 2, 2], layer_type="basic"
    )
    config.num_labels = DIGITS.CLASSES
    return ResNetForImageClassification(config)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images).logits, labels)


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    """Return the fraction of the test images that `model` classifies correctly."""
    images, labels = DIGITS.digits()[1]
    model.eval()
    return (model(images).logits.argmax(dim=1) == labels).float().mean().item()


RESNET = Task(
    "ResNet of 6 blocks on images of handwritten digits",
    mt.Workload(resnet, DIGITS.batch, loss, DIGITS.optimizer, batch_size=DIGITS.BATCH_SIZE),
    300,
    DIGITS.LEARNING_RATE,
    accuracy,
    "test accuracy",
    relative=False,
    uninformed=lambda: 1 / DIGITS.CLASSES,
)
