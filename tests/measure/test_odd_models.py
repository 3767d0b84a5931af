"""Models that few write: the memory of their steps is predicted as it is.

What is hard: none is a chain of layers. Layers run several times, or in a loop, or by data; weights are tied,
frozen, complex, or have sparse gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.func import functional_call, vmap
from transformers.utils.generic import ModelOutput

import mesa_tune as mt
from mesa_tune.measure.errors.joint_error import JointError
from mesa_tune.measure.errors.noise import squared
from mesa_tune.measure.errors.recorded import squared_norm
from tests.builders import known, mean_error, workload
from tests.step_memory import (
    BATCH,
    CLASSES,
    FOUR_BITS,
    SETTINGS,
    WIDTH,
    Composed,
    check_memory,
    ids,
    mlp,
    squares,
    swept,
    tokens,
)


def repeated() -> nn.Module:
    """A layer that runs three times, and two names for one layer."""

    def forward(model: Any, x: Tensor) -> Tensor:
        x = model.first(x)
        for layer in (model.block, model.other, model.block):
            x = x + layer(model.norm(x))
        return x

    first, block = nn.Linear(WIDTH, WIDTH), mlp()
    return Composed(forward, first=first, block=block, norm=nn.LayerNorm(WIDTH), other=block)


def tied(sparse: bool = False) -> nn.Module:
    """A language model whose head is its embedding, if that is not sparse."""
    embed, body = nn.Embedding(CLASSES, WIDTH, sparse=sparse), mlp()
    head = nn.Linear(WIDTH, CLASSES, bias=False)
    if not sparse:
        head.weight = embed.weight
    return Composed(lambda m, ids: m.head(m.body(m.embed(ids))), embed=embed, body=body, head=head)


def next_token(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def by_data() -> nn.Module:
    """Control flow that depends on the data: which branch, and how many times."""

    def forward(model: Any, x: Any) -> Any:
        x = model.one(x) if x.sum() < 1e9 else model.two(x)
        while x.square().mean() < 0.5:
            x = 2 * x + model.two(x)
        return x

    return Composed(forward, one=mlp(), two=nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))


def cell() -> nn.Module:
    """A cell applied once per token."""

    def forward(model: Any, x: Tensor) -> Any:
        state = x.new_zeros(len(x), WIDTH)
        for step in x.unbind(1)[:6]:
            state = model.cell(step, state)
        return model.last(state)

    return Composed(forward, cell=nn.GRUCell(WIDTH, WIDTH), last=nn.Linear(WIDTH, CLASSES))


def adapted_by_peft() -> nn.Module:
    model = nn.Sequential(mlp(), nn.LayerNorm(WIDTH), mlp())
    return get_peft_model(model, LoraConfig(r=4, target_modules=["0.0", "2.2"], lora_dropout=0.1))


@dataclass(frozen=True)
class Pair:
    """A batch of inputs and targets."""

    x: Tensor
    target: Tensor
    note: str = "none"


def functional() -> nn.Module:
    """`functional_call` with other weights, `vmap` over experts."""

    def forward(model: Any, x: Tensor) -> Tensor:
        weights = {"0.weight": model.inner.get_parameter("0.weight") + model.shift}
        h = functional_call(model.inner, weights, (x,))
        return vmap(lambda w: torch.tanh(h @ w))(model.experts).mean(0)

    shift = nn.Parameter(torch.zeros(2 * WIDTH, WIDTH))
    experts = nn.Parameter(torch.randn(3, WIDTH, WIDTH) / 8)
    return Composed(forward, inner=mlp(), shift=shift, experts=experts)


@dataclass
class Output(ModelOutput):
    """What transformers' models return."""

    loss: Tensor | None = None
    hidden: tuple[Tensor, ...] | None = None


def structured() -> nn.Module:
    """A model that returns a `ModelOutput` with its loss and the hidden states."""

    def forward(model: Any, x: Tensor) -> Output:
        hidden = [x]
        for layer in model.layers:
            hidden.append(layer(hidden[-1]))
        return Output(loss=hidden[-1].square().mean(), hidden=tuple(hidden))

    return Composed(forward, layers=nn.ModuleList([mlp() for _ in range(2)]))


def buffered() -> nn.Module:
    """Running statistics and a queue, updated in place in every forward."""

    def forward(model: Any, x: Tensor) -> Any:
        y = model.norm(model.block(x - model.mean))
        with torch.no_grad():
            model.mean.mul_(0.9).add_(y.mean((0, 1)), alpha=0.1)
            model.queue.copy_(model.queue.roll(1, 0))
            model.queue[0] = y[0, 0]
            model.at.add_(1)
        return y * model.mean.sigmoid()

    zeros = {"mean": torch.zeros(WIDTH), "queue": torch.zeros(256, WIDTH), "at": torch.tensor(0)}
    buffers = {name: nn.Buffer(value) for name, value in zeros.items()}
    return Composed(forward, block=mlp(), norm=nn.BatchNorm1d(20), **buffers)


def spectral() -> nn.Module:
    """Weights on the frequencies of a Fourier transform: complex parameters."""

    def forward(model: Any, x: Tensor) -> Any:
        return model.last(torch.fft.irfft(torch.fft.rfft(model.first(x)) * model.weight, n=WIDTH))

    weight = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64))
    return Composed(forward, first=mlp(), last=mlp(), weight=weight)


def thawed() -> nn.Module:
    """A layer that runs without gradients at first, then with them."""

    def forward(model: Any, x: Tensor) -> Any:
        with torch.no_grad():
            x = model.block(x)
        return model.last(model.block(x))

    return Composed(forward, block=mlp(), last=mlp())


Made = tuple[Callable[[], nn.Module], Callable[[int], Any], Callable[..., Tensor]]
MODELS: dict[str, Made] = {
    "reused layers": (repeated, tokens, squares),
    "tied weights": (tied, ids, next_token),
    "data-dependent control flow": (by_data, tokens, squares),
    "GRUCell": (cell, tokens, squares),
    "adapters of PEFT": (adapted_by_peft, tokens, squares),
    "a dataclass as batch": (
        mlp,
        lambda n: Pair(tokens(n), tokens(n)),
        lambda model, batch: F.mse_loss(model(batch.x), batch.target),
    ),
    "functional_call and vmap": (functional, tokens, squares),
    "a ModelOutput": (structured, tokens, lambda model, x: model(x).loss),
    "buffers in place": (buffered, tokens, squares),
    "complex parameters": (spectral, tokens, squares),
    "sparse gradients": (lambda: tied(sparse=True), ids, next_token),
    "no gradients at first": (thawed, tokens, squares),
}
QUICK = {"data-dependent control flow", "adapters of PEFT", "functional_call and vmap", "sparse gradients"}
SWEPT = MODELS.keys() - QUICK - {"no gradients at first"}


def workload_of(name: str) -> mt.Workload:
    optimizer = partial(torch.optim.SGD, lr=0.1) if name == "sparse gradients" else None
    return workload(*MODELS[name], optimizer=optimizer, batch_size=BATCH)


@pytest.mark.filterwarnings("ignore:mesa-tune")
@pytest.mark.parametrize("name", swept(MODELS, SWEPT))
def test_memory_is_that_of_a_real_step(name: str) -> None:
    work = workload_of(name)
    check_memory(work, mt.profile(work, options=SETTINGS[1:], seeds=1))


def test_the_error_of_complex_gradients_counts_both_parts() -> None:
    work = workload_of("complex parameters")
    predicted = mt.profile(work, options=SETTINGS[1:], seeds=2).predict(FOUR_BITS).gradient_error
    measured = mean_error(JointError(work), FOUR_BITS, [(draw, 9) for draw in range(2)])
    assert 0.5 < measured / known(predicted) < 2
    for gradient in (torch.tensor([3 + 4j]), torch.tensor([3 + 4j]).conj()):
        assert squared_norm(gradient) == squared(gradient) == 25
