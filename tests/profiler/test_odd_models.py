"""Models that few write: the memory of their steps is predicted as it is.

What is hard: none is a chain of layers. Layers run several times, or in a loop, or by data; weights are tied,
frozen, complex, or have sparse gradients.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.func import functional_call, vmap
from transformers.utils.generic import ModelOutput

import mesa_tune as mt
from mesa_tune.profiler.errors.joint_error import JointError, squared
from mesa_tune.profiler.errors.recorded import squared_norm
from tests.builders import workload
from tests.step_memory import (
    BATCH,
    CLASSES,
    FOUR_BITS,
    SETTINGS,
    WIDTH,
    check_memory,
    ids,
    mlp,
    squares,
    swept,
    tokens,
)


class Repeated(nn.Module):
    """A layer that runs three times, and two names for one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.block, self.norm = mlp(), nn.LayerNorm(WIDTH)
        self.other = self.block

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in (self.block, self.other, self.block):
            x = x + layer(self.norm(x))
        return x


class Tied(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH, sparse=sparse)
        self.body, self.head = mlp(), nn.Linear(WIDTH, CLASSES, bias=False)
        if not sparse:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(self.embed(ids)))
        return logits


def next_token(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


class ByData(nn.Module):
    """Control flow that depends on the data: which branch, and how many times."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = mlp(), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x) if x.sum() < 1e9 else self.two(x)
        while x.square().mean() < 0.5:
            x = 2 * x + self.two(x)
        return x


class Cell(nn.Module):
    """A cell applied once per token."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.last = nn.GRUCell(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), WIDTH)
        for step in x.unbind(1)[:6]:
            state = self.cell(step, state)
        logits: Tensor = self.last(state)
        return logits


def adapted_by_peft() -> nn.Module:
    model = nn.Sequential(mlp(), nn.LayerNorm(WIDTH), mlp())
    return get_peft_model(model, LoraConfig(r=4, target_modules=["0.0", "2.2"], lora_dropout=0.1))


@dataclass(frozen=True)
class Pair:
    """A batch of inputs and targets."""

    x: Tensor
    target: Tensor
    note: str = "none"


def pair(n: int) -> Pair:
    return Pair(tokens(n), torch.randn(n, 20, WIDTH))


class Functional(nn.Module):
    """`functional_call` with other weights, `vmap` over experts."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.shift = nn.Parameter(torch.zeros(2 * WIDTH, WIDTH))
        self.experts = nn.Parameter(torch.randn(3, WIDTH, WIDTH) / 8)

    def forward(self, x: Tensor) -> Tensor:
        weights = {"0.weight": self.inner.get_parameter("0.weight") + self.shift}
        h = functional_call(self.inner, weights, (x,))
        each: Tensor = vmap(lambda w: torch.tanh(h @ w))(self.experts)
        return each.mean(0)


@dataclass
class Output(ModelOutput):
    """What transformers' models return."""

    loss: Tensor | None = None
    hidden: tuple[Tensor, ...] | None = None


class Structured(nn.Module):
    """A model that returns a `ModelOutput` with its loss and the hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([mlp() for _ in range(2)])

    def forward(self, x: Tensor) -> Output:
        hidden = [x]
        for layer in self.layers:
            hidden.append(layer(hidden[-1]))
        return Output(loss=hidden[-1].square().mean(), hidden=tuple(hidden))


class Buffered(nn.Module):
    """Running statistics and a queue, updated in place in every forward."""

    mean: Tensor
    queue: Tensor
    at: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.block, self.norm = mlp(), nn.BatchNorm1d(20)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("queue", torch.zeros(256, WIDTH))
        self.register_buffer("at", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.block(x - self.mean))
        with torch.no_grad():
            self.mean.mul_(0.9).add_(y.mean((0, 1)), alpha=0.1)
            self.queue.copy_(self.queue.roll(1, 0))
            self.queue[0] = y[0, 0]
            self.at.add_(1)
        out: Tensor = y * self.mean.sigmoid()
        return out


class Spectral(nn.Module):
    """Weights on the frequencies of a Fourier transform: complex parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = mlp(), mlp()
        self.weight = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(self.first(x)) * self.weight
        y: Tensor = self.last(torch.fft.irfft(spectrum, n=WIDTH))
        return y


class Thawed(nn.Module):
    """A layer that runs without gradients at first, then with them."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.last = mlp(), mlp()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.block(x)
        y: Tensor = self.last(self.block(x))
        return y


def sparse_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


Made = tuple[Callable[[], nn.Module], Callable[[int], Any], Callable[..., Tensor]]
MODELS: dict[str, Made] = {
    "reused layers": (Repeated, tokens, squares),
    "tied weights": (Tied, ids, next_token),
    "data-dependent control flow": (ByData, tokens, squares),
    "GRUCell": (Cell, tokens, squares),
    "adapters of PEFT": (adapted_by_peft, tokens, squares),
    "a dataclass as batch": (mlp, pair, lambda model, batch: F.mse_loss(model(batch.x), batch.target)),
    "functional_call and vmap": (Functional, tokens, squares),
    "a ModelOutput": (Structured, tokens, lambda model, x: model(x).loss),
    "buffers in place": (Buffered, tokens, squares),
    "complex parameters": (Spectral, tokens, squares),
    "sparse gradients": (lambda: Tied(sparse=True), ids, next_token),
    "no gradients at first": (Thawed, tokens, squares),
}


SWEPT = (
    "reused layers",
    "tied weights",
    "GRUCell",
    "a dataclass as batch",
    "buffers in place",
    "a ModelOutput",
    "complex parameters",
)


def workload_of(name: str) -> mt.Workload:
    optimizer = sparse_sgd if name == "sparse gradients" else None
    return workload(*MODELS[name], optimizer=optimizer, batch_size=BATCH)


@pytest.mark.filterwarnings("ignore:mesa-tune")
@pytest.mark.parametrize("name", swept(MODELS, SWEPT))
def test_memory_is_that_of_a_real_step(name: str) -> None:
    work = workload_of(name)
    check_memory(work, mt.profile(work, options=SETTINGS[1:], seeds=1))


def test_the_error_of_complex_gradients_counts_both_parts() -> None:
    work = workload_of("complex parameters")
    predicted = mt.profile(work, options=SETTINGS[1:], seeds=2).predict(FOUR_BITS).gradient_error
    measured = JointError(work).errors(FOUR_BITS, [(draw, 9) for draw in range(2)])
    assert predicted is not None
    assert 0.5 < statistics.fmean(measured) / predicted < 2
    for gradient in (torch.tensor([3 + 4j]), torch.tensor([3 + 4j]).conj()):
        assert squared_norm(gradient) == squared([gradient]) == 25
