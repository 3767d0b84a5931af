"""What the tests of all frameworks share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import mesa_tune as mt
from mesa_tune import autotune, monitor, retune
from mesa_tune.measure.memory.meter import Meter, gradients_of, tensors_in
from mesa_tune.search.again import replan
from tests.conftest import forget_accelerators

CAMPAIGN = pytest.mark.slow("training")
"""Of trainings that profile and search before they begin, one of each framework is fast."""

FOUR_BITS = mt.Policy.uniform(level=16)
EXACT = mt.Policy.parse("# mesa-tune policy 1\n")
PREDICTED = """# mesa-tune policy 1
# predicted: peak 5.71 GB, saved 812 kB, gradient error 3.1e-04, own noise ratio 2.0e-02, step 1.06x
"""
LOGGED = {
    "mesa/peak_bytes": 5.71e9,
    "mesa/saved_bytes": 812e3,
    "mesa/gradient_error": 3.1e-4,
    "mesa/noise_ratio": 0.02,
}
"""What logs get of `PREDICTED`."""


@pytest.fixture(autouse=True)
def _two_settings_of_each_layer_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = [mt.LayerSettings(level=level) for level in (16, 4)]
    monkeypatch.setattr(autotune, "fast_grid", lambda: settings)
    monkeypatch.setattr(retune, "OPTIONS", settings)


@pytest.fixture(autouse=True)
def _no_accelerator_is_left() -> Iterator[None]:
    yield
    forget_accelerators()


@pytest.fixture
def eager_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second step is read, and whatever plan is then found replaces the one before."""
    monkeypatch.setattr(monitor, "FIRST_STEP", 2)
    monkeypatch.setattr(monitor, "GROWTH", 1e-5)
    monkeypatch.setattr(replan, "_LESS", math.inf)


def sharpen(model: nn.Module) -> None:
    """Multiply what makes queries and keys: errors of attention then count more beside their noise."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".q." in name or ".k." in name or "c_attn" in name:
                parameter.mul_(6.0)


class PeakMeter:
    """Measures the most live bytes of steps, with weights, gradients, optimizer state and batch."""

    def __init__(self) -> None:
        self.peaks: list[int] = []
        self._meter: Meter | None = None

    def begin(self, model: nn.Module, optimizer: Optimizer, batch: Iterable[Tensor] = ()) -> None:
        """Note that a step begins."""
        self._meter = Meter().__enter__()
        self._meter.count_older(
            [
                *model.parameters(),
                *model.buffers(),
                *gradients_of(model),
                *tensors_in(optimizer.state),
                *batch,
            ]
        )

    def end(self) -> None:
        """Note that the step has ended."""
        assert self._meter is not None
        self._meter.__exit__(None, None, None)
        self.peaks.append(self._meter.tensor_peak)
