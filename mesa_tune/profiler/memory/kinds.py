"""Kinds of memory in a training step, and the moment of the step with the most of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

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
