"""Timing of a step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def median_ms(run: Callable[[], object], repeats: int, device: str) -> float:
    """Return the median milliseconds of `run()` over `repeats` calls, after one warm-up call."""
    run()
    return statistics.median(_once(run, device) for _ in range(repeats))


def _once(run: Callable[[], object], device: str) -> float:
    _wait(device)
    start = time.perf_counter()
    run()
    _wait(device)
    return 1e3 * (time.perf_counter() - start)


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
