"""Tasks of `early_plans.py`: a Llama on text, and a denoiser of convolutions."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from learning_tasks import DIGITS, LENGTH, WINDOWS, Task, _windows, text_batch, texts, unigram_loss
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import mesa_tune as mt

WIDTH, GROUPS = 16, 4
NOISE = 1000  # seed of the validation noise


def llama() -> nn.Module:
    """Return a Llama of two blocks for bytes."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=172,
        num_hidden_layers=2,
        num_attention_heads=4,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def llama_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the loss that the model computes of bytes (batch, length)."""
    value: Tensor = model(input_ids=batch[:, :-1], labels=batch[:, :-1]).loss
    return value


@torch.no_grad()
def llama_score(model: nn.Module) -> float:
    """Return the mean loss per byte, in nats."""
    text = texts()[1]
    model.eval()
    return llama_loss(model, _windows(text, torch.linspace(0, len(text) - LENGTH - 1, WINDOWS).long())).item()


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=2e-3)


class Denoiser(nn.Module):
    """Predicts the noise in images (batch, 1, 32, 32): convolutions, group norms and SiLUs, residual."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, WIDTH, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.GroupNorm(GROUPS, WIDTH), nn.SiLU(), nn.Conv2d(WIDTH, WIDTH, 3, padding=1))
            for _ in range(4)
        )
        self.norm, self.last = nn.GroupNorm(GROUPS, WIDTH), nn.Conv2d(WIDTH, 1, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        x = self.first(images)
        for block in self.blocks:
            x = x + block(x)
        predicted: Tensor = self.last(self.norm(x))
        return predicted


def noisy(images: Tensor) -> tuple[Tensor, Tensor]:
    """Return images of a digit with noise of a random strength, and the noise."""
    strength = torch.rand(len(images), 1, 1, 1)
    noise = torch.randn_like(images)
    return (1 - strength) * images + strength * noise, noise


def noisy_batch(batch_size: int) -> tuple[Tensor, Tensor]:
    return noisy(DIGITS.batch(batch_size)[0])


def denoising_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


@torch.no_grad()
def denoising_score(model: nn.Module) -> float:
    """Return the mean squared error on the test images, with the same noise for all models."""
    state = torch.get_rng_state()
    torch.manual_seed(NOISE)
    batch = noisy(DIGITS.digits()[1][0])
    torch.set_rng_state(state)
    model.eval()
    return denoising_loss(model, batch).item()


NEW = {
    "llama": Task(
        "Llama of 2 blocks on the bytes of Python's standard library",
        mt.Workload(llama, text_batch, llama_loss, adamw, batch_size=16),
        300,
        2e-3,
        llama_score,
        "validation loss",
        relative=True,
        uninformed=unigram_loss,
    ),
    "denoiser": Task(
        "denoiser of 4 convolutions with group norms on images of handwritten digits",
        mt.Workload(Denoiser, noisy_batch, denoising_loss, adamw, batch_size=16),
        300,
        2e-3,
        denoising_score,
        "validation loss",
        relative=True,
        uninformed=lambda: 1.0,
    ),
}
