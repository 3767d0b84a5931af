"""An MLP-Mixer on scikit-learn's handwritten digits, trained by Lightning; the step is its training_step.

mesa-tune profile examples/lightning_digits.py
python examples/lightning_digits.py                        plain training
python examples/lightning_digits.py --policy policy.txt    training with a searched policy
"""

from __future__ import annotations

import argparse
from functools import cache

import lightning
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE = 64
PIXELS, WIDTH, DEPTH, CLASSES = 64, 64, 4, 10
EPOCHS = 10

Batch = tuple[Tensor, Tensor]


class Block(nn.Module):
    """Mixes pixels, then channels: (batch, pixels, width) to the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.pixels = nn.Sequential(nn.Linear(PIXELS, PIXELS), nn.GELU(), nn.Linear(PIXELS, PIXELS))
        self.channels = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.pixels(self.norm1(x).mT).mT
        return x + self.channels(self.norm2(x))


class Digits(lightning.LightningModule):
    """Images (batch, 64) to logits (batch, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(1, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(DEPTH)))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(images.unsqueeze(-1))).mean(dim=1))

    def training_step(self, batch: Batch, _: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer(list(self.parameters()))


@cache
def digits() -> TensorDataset:
    """Return the 1,797 images and their labels."""
    images, labels = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(images, dtype=torch.float32) / 8 - 1, torch.tensor(labels))


def model() -> nn.Module:
    return Digits()


def batch(batch_size: int) -> Batch:
    images, labels = digits()[torch.randint(len(digits()), (batch_size,))]
    return images, labels


def loss(model: Digits, batch: Batch) -> Tensor:
    return model.training_step(batch, 0)


def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def train(policy: str | None = None, epochs: int = EPOCHS) -> float:
    """Train from scratch, and return the loss of all images."""
    lightning.seed_everything(0, verbose=False)
    callbacks: list[lightning.Callback] = []
    if policy is not None:
        from mesa_tune.integrations.lightning import MesaTuneCallback

        callbacks = [MesaTuneCallback(policy)]
    module = Digits()
    loader = DataLoader(digits(), BATCH_SIZE, shuffle=True, drop_last=True)
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="auto",
        devices=1,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader)
    with torch.no_grad():
        images, labels = digits().tensors
        return loss(module.cpu(), (images, labels)).item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train an MLP-Mixer on handwritten digits.")
    parser.add_argument("--policy", help="store activations as this policy.txt says")
    print(f"loss {train(parser.parse_args().policy):.4f}")
