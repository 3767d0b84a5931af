"""`Prediction`: what a profile expects of a step under a policy, and `Peak`: what a step needs at most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from mesa_tune.files import typed
from mesa_tune.units import format_bytes

WEIGHTS: Final = "weights"
GRADIENTS: Final = "gradients"
OPTIMIZER_STATE: Final = "optimizer state"
BATCH: Final = "batch"
SAVED: Final = "saved tensors"
WORKING: Final = "working memory"
STATIC: Final = (WEIGHTS, GRADIENTS, OPTIMIZER_STATE, BATCH)
"""Kinds that are alive when a step begins. Gradients are also born in it."""


def moment_text(phase: str, layer: str | None) -> str:
    """Return a moment of the step in words; `layer`: whose call it is, None between calls."""
    moment = "the optimizer's step" if phase == "step" else f"the {phase}"
    return f"in {moment} of {layer}" if layer else f"in {moment}"


@dataclass(frozen=True)
class Peak:
    """The slot of a step that needs the most bytes.

    `layer`: whose call it is; None between calls. `phase`: forward, backward or step (the optimizer's).
    `bytes`: needed then, by kind; they sum to the peak. Weights include buffers. Working memory is everything
    that no backward needs later: results on their way, decoded copies, buffers of the optimizer's step, and
    what kernels take besides tensors.
    """

    layer: str | None
    phase: str
    bytes: Mapping[str, int]

    @property
    def moment(self) -> str:
        """When the peak is: `in the backward of blocks.5.mlp.2`."""
        return moment_text(self.phase, self.layer)

    @property
    def text(self) -> str:
        """One line: when the peak is, and the kinds of its bytes, largest first."""
        kinds = sorted(
            (kind for kind, count in self.bytes.items() if count), key=lambda kind: -self.bytes[kind]
        )
        return f"{self.moment}: " + ", ".join(f"{kind} {format_bytes(self.bytes[kind])}" for kind in kinds)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Peak:
        """Return the peak with this `to_dict`."""
        counts = {str(kind): int(count) for kind, count in values["bytes"].items()}
        layer = values["layer"]
        return Peak(None if layer is None else str(layer), str(values["phase"]), counts)


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
