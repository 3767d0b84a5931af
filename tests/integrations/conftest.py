"""What the tests of all frameworks share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
from torch import Tensor, nn
from torch.optim import Optimizer

from mesa_tune.profiler.memory.meter import Meter, gradients_of, tensors_in
from tests.conftest import forget_accelerators


@pytest.fixture(autouse=True)
def _no_accelerator_is_left() -> Iterator[None]:
    yield
    forget_accelerators()


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
        self.peaks.append(self._meter.high_water)
