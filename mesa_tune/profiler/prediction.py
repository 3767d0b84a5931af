"""`Prediction`: what a profile expects of a training step under a policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mesa_tune.files import typed
from mesa_tune.profiler.memory.kinds import Peak

UNSTEADY = 0.1
"""Spread of step times, as a share of the plain step, at which nothing is claimed of them."""


def unsteady(spread: float) -> tuple[str, ...]:
    """Return a note on step times of this spread, if it is large."""
    if spread <= UNSTEADY:
        return ()
    what = "steps did not take equal times, as beside other work on this machine"
    return (f"{what}: predicted ones are uncertain by {spread:.0%} of a plain step",)


@dataclass(frozen=True)
class Prediction:
    """Prediction for a training step under a policy. None: unknown. `peak`: when the peak is, and of what.

    `gradient_error_interval`: the mean error over 16 other batches lies between these ends with a probability
    of 92 %, counting batches and rounding; None also for a profile of one batch. `worst_parameter`: the
    trained parameter, or part of one, with the largest own noise ratio, `worst_own_ratio`.
    `peak_bytes`: with what kernels take besides tensors. `library_bytes`: what oneDNN keeps besides, under
    every policy; None on a GPU, where nothing models it.
    """

    saved_bytes: int
    peak_bytes: int
    gradient_error: float | None
    step_ms: float | None
    gradient_noise_ratio: float | None = None
    peak: Peak | None = None
    gradient_error_interval: tuple[float, float] | None = None
    library_bytes: int | None = None
    gradient_noise_ratio_interval: tuple[float, float] | None = None
    worst_parameter: str | None = None
    worst_own_ratio: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, with the interval as `interval`."""
        ends, peak = self.gradient_error_interval, self.peak
        values = {key: value for key, value in vars(self).items() if key != "gradient_error_interval"}
        return {
            **values,
            "peak": None if peak is None else peak.to_dict(),
            "interval": None if ends is None else list(ends),
        }

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Prediction:
        """Return the prediction with this `to_dict`."""
        plain = {key: value for key, value in values.items() if key != "interval"}
        peak, ends = values.get("peak"), values.get("interval")
        parts = {
            "peak": None if peak is None else Peak.from_dict(peak),
            "gradient_error_interval": _pair(ends),
            "gradient_noise_ratio_interval": _pair(values.get("gradient_noise_ratio_interval")),
        }
        return typed(Prediction, {**plain, **parts})


def _pair(ends: Sequence[float] | None) -> tuple[float, float] | None:
    return None if ends is None else (float(ends[0]), float(ends[1]))
