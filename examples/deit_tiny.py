"""DeiT-Ti of transformers at its published size, on crops of scikit-learn's two sample photographs.

    mesa-tune profile examples/deit_tiny.py
    mesa-tune search --budget 1GB

The model is built from its configuration with random weights: nothing is downloaded. Its class token starts
at zero, as transformers initializes it.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from sklearn.datasets import load_sample_images
from torch import Tensor, nn
from transformers import DeiTConfig, DeiTForImageClassification

BATCH_SIZE = 16
CROP = 224
CELLS = (2, 3)  # rows and columns that each photograph is divided into

Batch = tuple[Tensor, Tensor]


@cache
def photographs() -> list[Tensor]:
    """Return the two photographs as float tensors (3, 427, 640), each channel with mean 0 and deviation 1."""
    images = [torch.tensor(image).permute(2, 0, 1).float() for image in load_sample_images().images]
    return [(image - image.mean((1, 2), keepdim=True)) / image.std((1, 2), keepdim=True) for image in images]


def model() -> nn.Module:
    # DeiT-Ti as published, with 1,000 classes; the labels here use the first 12.
    config = DeiTConfig(hidden_size=192, num_hidden_layers=12, num_attention_heads=3, intermediate_size=768)
    config.num_labels = 1000
    return DeiTForImageClassification(config)


def batch(batch_size: int) -> Batch:
    """Return random crops, half of them mirrored; the label is the photograph and the crop's cell."""
    crops, labels = zip(*(_crop() for _ in range(batch_size)), strict=True)
    return torch.stack(crops), torch.tensor(labels)


def _crop() -> tuple[Tensor, int]:
    photograph = _below(2)
    image = photographs()[photograph]
    rows, columns = image.shape[1] - CROP + 1, image.shape[2] - CROP + 1
    top, left = _below(rows), _below(columns)
    crop = image[:, top : top + CROP, left : left + CROP]
    cell = (top * CELLS[0] // rows) * CELLS[1] + left * CELLS[1] // columns
    return (crop.flip(2) if _below(2) else crop), photograph * CELLS[0] * CELLS[1] + cell


def _below(limit: int) -> int:
    return int(torch.randint(limit, ()))


def loss(model: nn.Module, batch: Batch) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images).logits, labels)


def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=5e-4, weight_decay=0.05)
