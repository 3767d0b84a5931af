"""`mt.Monitor`: gradient error and noise ratio measured in a training, which goes on as without it."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mesa_tune as mt
from mesa_tune.codecs import quantize
from mesa_tune.conversion.model import conversion_of

Batch = tuple[Tensor, Tensor]
SIZE, TOKENS, WIDTH, CLASSES = 32, 16, 32, 10


class Net(nn.Module):
    """Batch norm, dropout, and an MLP whose tensors are large enough to be encoded."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, width)
        self.norm = nn.BatchNorm1d(TOKENS)
        self.drop = nn.Dropout(0.2)
        self.second = nn.Linear(width, width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Samples of tokens to logits."""
        x = F.gelu(self.drop(self.norm(self.first(x))))
        result: Tensor = self.head(F.gelu(self.second(x)).mean(1))
        return result


class Plain(Net):
    """The same without batch norm: a sample's gradient does not depend on the others of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def draw(size: int = SIZE) -> Batch:
    labels = torch.randint(0, CLASSES, (size,))
    return torch.randn(size, TOKENS, WIDTH) + F.one_hot(labels, WIDTH).unsqueeze(1), labels


def made(kind: type[nn.Module] = Plain, level: int = 16) -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    return mt.convert(kind(), mt.Policy.uniform(level=level), seed=1), draw()


def trained(
    model: nn.Module, steps: int, watch: Callable[[Batch], object] | None = None
) -> tuple[list[float], torch.optim.Optimizer]:
    torch.manual_seed(5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    values = []
    for _ in range(steps):
        batch = draw()
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        optimizer.step()
        if watch is not None:
            watch(batch)
        values.append(value.item())
    return values, optimizer


@pytest.mark.parametrize("level", [4, 16])
def test_readings_are_those_of_verify(level: int) -> None:
    model, _ = made(level=level)
    state = copy.deepcopy(model.state_dict())

    def build() -> nn.Module:
        fresh = Plain()
        fresh.load_state_dict(state)
        return fresh

    monitor = mt.Monitor(model, loss, every=1, limit=1e3)
    readings = [monitor.step(draw()) for _ in range(8)]
    verified = mt.verify(mt.Workload(build, draw, loss, batch_size=SIZE), mt.Policy.uniform(level=level))
    assert verified.gradient_error is not None
    assert verified.gradient_noise_ratio is not None
    inside = 0
    for reading in readings:
        assert reading is not None
        assert reading.noise_ratio_interval is not None
        assert reading.gradient_error_interval is not None
        inside += (
            reading.noise_ratio_interval[0] < verified.gradient_noise_ratio < reading.noise_ratio_interval[1]
        )
        inside += (
            reading.gradient_error_interval[0] < verified.gradient_error < reading.gradient_error_interval[1]
        )
        assert reading.noise_ratio_interval[1] < 8 * reading.noise_ratio_interval[0]
    assert inside >= 14  # 93 % intervals


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_training_goes_on_bit_for_bit(compiled: bool) -> None:
    results = []
    for watched in (False, True):
        model, batch = made(Net)
        if compiled:
            model.compile(backend="aot_eager")
        monitor = mt.Monitor(model, loss, every=2)
        values, optimizer = trained(model, 6, monitor.step if watched else None)
        noise = mt.state_dict(model)["conversions"][""]["key"]
        parameters = copy.deepcopy([*model.state_dict().values()])
        gradients = [parameter.grad for parameter in model.parameters()]
        moments = [value for state in optimizer.state.values() for value in state.values()]
        results.append((values, noise, [*parameters, *gradients, *moments, torch.get_rng_state()]))
        assert len(monitor.history) == (3 if watched else 0)
    (values, noise, tensors), (others, other_noise, other_tensors) = results
    assert values == others
    assert torch.equal(noise, other_noise)
    assert all(map(torch.equal, tensors, other_tensors))
