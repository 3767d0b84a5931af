"""Clocks that time a training step, or parts of it, beside other work on the machine.

What is hard: another process takes the processor in the middle of a step. So on the CPU, a clock counts the
processor time of its thread, which runs forward and backward. On a GPU, events mark the time on its stream.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch

Mark = Any
"""A moment on a clock."""


class Clock(Protocol):
    """Marks moments, and returns the milliseconds between them."""

    def now(self) -> Mark:
        """Return the moment."""
        ...

    def ms(self, marks: Sequence[Mark]) -> list[float]:
        """Return the milliseconds from each mark to the next."""
        ...


class ThreadClock:
    """Processor time of this thread."""

    def now(self) -> float:
        return time.thread_time()

    def ms(self, marks: Sequence[float]) -> list[float]:
        return [1e3 * (after - before) for before, after in pairwise(marks)]


class CudaClock:
    """Time on the current stream of the GPU `device`. `ms` waits for the GPU."""

    def __init__(self, device: str) -> None:
        self.device = device

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def ms(self, marks: Sequence[torch.cuda.Event]) -> list[float]:
        torch.cuda.synchronize(self.device)
        return [before.elapsed_time(after) for before, after in pairwise(marks)]


def clock_of(device: str) -> Clock:
    """Return the clock for steps on `device`."""
    return CudaClock(device) if device.startswith("cuda") else ThreadClock()
