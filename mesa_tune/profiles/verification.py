"""`Verification`: measurements of steps under a policy and of plain ones, beside the prediction."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mesa_tune.files import read_document, schema, typed, write_document
from mesa_tune.profiles.own_noise import AtCheckpoint
from mesa_tune.profiles.prediction import Prediction
from mesa_tune.profiles.shown import QUANTITIES, quantities_html

BATCHES = 8
"""Batches on which the gradient error is measured."""
_REMEDY = "make it again with `mesa-tune verify --force`"
_OF_PARAMETERS = ("gradient_noise_ratio", "worst_parameter", "worst_own_ratio")


@dataclass(frozen=True, slots=True)
class GroupError:
    """Relative squared errors of the gradient within one group of parameters, means over batches and seeds.

    `group`: its name. `elements`: of its trainable parameters. `gradient_error`: ‖ĝ − g‖² / ‖g‖² over them;
    `preconditioned_error`: the same with g and ĝ divided by √v̂ + ε. None: unknown, because an exact gradient
    is zero, or the optimizer is no Adam.
    """

    group: str
    elements: int
    gradient_error: float | None
    preconditioned_error: float | None


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured bytes of a training step, and its median time. None: the step did not fit in memory.

    On the CPU, the time is processor time: see `workload.clock`.
    """

    peak_bytes: int | None
    saved_bytes: int | None
    step_ms: float | None


@dataclass(frozen=True, slots=True)
class Ratio:
    """Ratio of the step time under the policy to plain, over pairs of steps: median and quartiles."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Verification:
    """Measurements of a workload's steps under a policy, of its plain steps, and the prediction.

    `gradient_errors`: relative squared errors, batch by batch, one for each rounding seed; `gradient_error`
    is their mean, `gradient_noise_ratio` that of more batches beside the parameters' own noise on these, and
    `worst_own_ratio` the largest of a parameter, or part of one.
    `checkpoints`: error and noise with the weights of each checkpoint of the workload.
    `step_ratio`: None if the two steps could not be timed in turn. `groups`: errors by group of parameters,
    the first of all; empty unless asked for.
    """

    baseline: Measured
    policy: Measured
    gradient_errors: tuple[float, ...]
    step_ratio: Ratio | None
    predicted: Prediction | None
    device: str
    batch_size: int
    torch: str
    steps: int
    gradient_noise_ratio: float | None = None
    checkpoints: tuple[AtCheckpoint, ...] = ()
    groups: tuple[GroupError, ...] = ()
    worst_parameter: str | None = None
    worst_own_ratio: float | None = None

    @property
    def gradient_error(self) -> float | None:
        """Mean of `gradient_errors`; None where exact gradients did not fit, even with checkpoints."""
        return statistics.fmean(self.gradient_errors) if self.gradient_errors else None

    @property
    def gradient_error_interval(self) -> tuple[float, float] | None:
        """Two standard errors on each side of the mean, from batch to batch; None for one batch."""
        seeds = max(1, len(self.gradient_errors) // BATCHES)
        starts = range(0, len(self.gradient_errors), seeds)
        means = [statistics.fmean(self.gradient_errors[start : start + seeds]) for start in starts]
        if len(means) < 2:
            return None
        half, mean = 2 * statistics.stdev(means) / math.sqrt(len(means)), statistics.fmean(means)
        return max(0.0, mean - half), mean + half

    @property
    def step_ms_interval(self) -> tuple[float, float] | None:
        """Middle half of the step times under the policy, as ratios to the plain step; None if unknown."""
        ratio, plain_ms = self.step_ratio, self.baseline.step_ms
        return None if ratio is None or plain_ms is None else (ratio.low * plain_ms, ratio.high * plain_ms)

    @property
    def worst_noise_ratio(self) -> float | None:
        """The largest noise ratio, of the model as given and at all checkpoints; None if none is known."""
        ratios = [self.gradient_noise_ratio, *(entry.gradient_noise_ratio for entry in self.checkpoints)]
        return max((ratio for ratio in ratios if ratio is not None), default=None)

    def predicted_beside(self, profiled_ms: float | None) -> Prediction | None:
        """Return the prediction with its step time scaled to the measured plain step.

        `profiled_ms`: time of the plain step in the profile. The machine may have been busier then, so only
        the ratio of the times is a prediction.
        """
        predicted, plain_ms = self.predicted, self.baseline.step_ms
        if predicted is None or predicted.step_ms is None or plain_ms is None or not profiled_ms:
            return predicted
        return replace(predicted, step_ms=predicted.step_ms / profiled_ms * plain_ms)

    def compared(self, predicted: Prediction | None) -> list[dict[str, Any]]:
        """Return predictions beside measurements: `quantity, unit, plain, predicted, measured, difference`.

        `difference` is measured / predicted − 1. `predicted_low, predicted_high, measured_low,
        measured_high`: ends of the intervals. None: unknown.
        """
        return [self._compared(name, unit, predicted) for name, unit in QUANTITIES.items()]

    def _compared(self, name: str, unit: str, predicted: Prediction | None) -> dict[str, Any]:
        expected, measured = getattr(predicted, name, None), self.to_dict()["policy"][name]
        sides = {"predicted": predicted, "measured": self}
        ends = {side: getattr(values, f"{name}_interval", None) for side, values in sides.items()}
        return {
            "quantity": name,
            "unit": unit,
            "plain": 0.0 if name.startswith("gradient_") else getattr(self.baseline, name),
            "predicted": expected,
            "measured": measured,
            "difference": measured / expected - 1 if expected and measured is not None else None,
            **{f"{side}_low": pair and pair[0] for side, pair in ends.items()},
            **{f"{side}_high": pair and pair[1] for side, pair in ends.items()},
        }

    def _repr_html_(self) -> str:
        ratio = self.step_ratio
        return quantities_html(
            f"Verification at batch {self.batch_size} on {self.device}",
            self.compared(self.predicted),
            ("plain", "predicted", "measured"),
            "the predicted step time is by the clock of the profile"
            + ("" if ratio is None else f"; a step takes {ratio.median:.2f} times the plain one"),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document `mesa-tune.verify/2`."""
        measured = {
            "gradient_error": self.gradient_error,
            "gradient_noise_ratio": self.gradient_noise_ratio,
            "worst_parameter": self.worst_parameter,
            "worst_own_ratio": self.worst_own_ratio,
        }
        return {
            "schema": schema("verify"),
            "device": self.device,
            "batch_size": self.batch_size,
            "torch": self.torch,
            "steps": self.steps,
            "baseline": asdict(self.baseline),
            "policy": {**asdict(self.policy), **measured},
            "predicted": self.predicted.to_dict() if self.predicted else None,
            "step_ratio": asdict(self.step_ratio) if self.step_ratio else None,
            "gradient_errors": list(self.gradient_errors),
            "checkpoints": [asdict(entry) for entry in self.checkpoints],
            "groups": [asdict(group) for group in self.groups],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Verification:
        """Return the verification with this `to_dict`; raise KeyError, TypeError or ValueError for others."""
        ratio, predicted = values["step_ratio"], values["predicted"]
        parts = {
            "baseline": _measured_from(values["baseline"]),
            "policy": _measured_from(values["policy"]),
            "gradient_errors": tuple(float(error) for error in values["gradient_errors"]),
            **{name: values["policy"].get(name) for name in _OF_PARAMETERS},
            "step_ratio": None if ratio is None else typed(Ratio, ratio),
            "predicted": None if predicted is None else Prediction.from_dict(predicted),
            "checkpoints": tuple(typed(AtCheckpoint, entry) for entry in values.get("checkpoints", ())),
            "groups": tuple(typed(GroupError, group) for group in values.get("groups", ())),
        }
        return typed(
            cls, {**{name: values[name] for name in ("device", "batch_size", "torch", "steps")}, **parts}
        )

    def save(self, path: str | Path) -> None:
        """Write the document to `path`, whole or not at all. Raise RunError if it cannot be written."""
        write_document(path, self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> Verification:
        """Return the verification saved at `path`. Raise RunError for a missing, damaged or other file."""
        return read_document(path, "verify", cls.from_dict, _REMEDY)


def _measured_from(values: Mapping[str, Any]) -> Measured:
    return typed(Measured, {name: values[name] for name in Measured.__dataclass_fields__})
