"""A small vision transformer on scikit-learn's handwritten digits, as a model file and as a training script.

mesa-tune profile examples/digits_vit.py
python examples/digits_vit.py                        plain training
python examples/digits_vit.py --policy policy.txt    training with a searched policy
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

if TYPE_CHECKING:
    from mesa_tune import Policy

BATCH_SIZE = 32
IMAGE, PATCH, WIDTH, HEADS, DEPTH, CLASSES = 32, 4, 64, 2, 6, 10
STEPS = 340
LEARNING_RATE = 3e-3
WARMUP = 0.1  # fraction of the steps in which the learning rate rises
TEST_SAMPLES = 360

Batch = tuple[Tensor, Tensor]


class Attention(nn.Module):
    """Self-attention over all tokens: (batch, tokens, width) to the same shape."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        samples, tokens, width = x.shape
        split = self.qkv(x).reshape(samples, tokens, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.proj(mixed.transpose(1, 2).reshape(samples, tokens, width))


class Block(nn.Module):
    """Attention and an MLP of two layers, each after a LayerNorm, with residual connections."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """Images (batch, 1, 32, 32) to logits (batch, 10), with 64 patches."""

    def __init__(self) -> None:
        super().__init__()
        # The kernel also covers neighbouring patches, because strokes are wider: this trains faster.
        self.patches = nn.Conv2d(1, WIDTH, kernel_size=3 * PATCH, stride=PATCH, padding=PATCH)
        self.positions = nn.Parameter(0.02 * torch.randn(1, (IMAGE // PATCH) ** 2, WIDTH))
        self.blocks = nn.ModuleList(Block(WIDTH, HEADS) for _ in range(DEPTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(dim=1))


@cache
def digits() -> tuple[Batch, Batch]:
    """Return images of 32 × 32 with labels: 1,437 for training and 360 for testing, always the same split."""
    pixels, classes = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 8 - 1
    images = F.interpolate(images, size=(IMAGE, IMAGE), mode="bilinear")
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    labels = torch.tensor(classes)
    test, train = order[:TEST_SAMPLES], order[TEST_SAMPLES:]
    return (images[train], labels[train]), (images[test], labels[test])


def model() -> nn.Module:
    return VisionTransformer()


def batch(batch_size: int) -> Batch:
    images, labels = digits()[0]
    chosen = torch.randint(len(images), (batch_size,))
    return images[chosen], labels[chosen]


def loss(model: nn.Module, batch: Batch) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.05, fused=True)


def train(policy: Policy | None = None, seed: int = 0, steps: int = STEPS) -> float:
    """Train from scratch and return the accuracy on the test images, 0 to 1.

    The seed determines initialization and data order, with and without a policy.
    """
    torch.manual_seed(seed)
    network = model()
    compressed = compression(network, policy, seed)
    stepper = optimizer(list(network.parameters()))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        stepper, LEARNING_RATE, total_steps=steps, pct_start=WARMUP
    )
    for _ in range(steps):
        samples = batch(BATCH_SIZE)
        with compressed():
            value = loss(network, samples)
        stepper.zero_grad()
        value.backward()
        stepper.step()
        schedule.step()
    return accuracy(network)


def compression(
    network: nn.Module, policy: Policy | None, seed: int
) -> Callable[[], AbstractContextManager[object]]:
    """Convert the model, and return the context in which to compute the loss: all that a policy needs."""
    if policy is None:
        return nullcontext
    import mesa_tune as mt

    mt.convert(network, policy, seed=seed)
    return partial(mt.compress_saved, policy)


@torch.no_grad()
def accuracy(network: nn.Module) -> float:
    """Return the fraction of the test images that `network` classifies correctly."""
    images, labels = digits()[1]
    network.eval()
    return (network(images).argmax(dim=1) == labels).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small vision transformer on handwritten digits.")
    parser.add_argument("--policy", type=Path, help="store activations as this policy.txt says")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    result = train_with(arguments.policy, arguments.seed) if arguments.policy else train(seed=arguments.seed)
    print(f"test accuracy {100 * result:.1f} %")


def train_with(path: Path, seed: int) -> float:
    """Train under the policy at `path` and return the accuracy; exit if the policy does not fit the model."""
    from mesa_tune import MesaTuneError, Policy

    try:
        return train(Policy.load(path), seed)
    except MesaTuneError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
