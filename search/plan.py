"""`Plan`: a policy for a memory budget, and what is known of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mesa_tune.files import read_document, schema, typed, write_document
from mesa_tune.policy import Policy
from mesa_tune.profiler.profile import Prediction, Profile

_REMEDY = "make it again with `mesa-tune search --force`"


@dataclass(frozen=True)
class Baseline:
    """The plain step at the planned batch size, in bytes."""

    peak_bytes: int
    saved_bytes: int


@dataclass(frozen=True)
class Measurement:
    """Joint gradient errors on batches and rounding seeds that no decision was made on.

    `gradient_error` is the plan's, with its standard error; `solved` the exact solution's on the same
    `pairs` of batch and seed; `gain` how much lower the plan's is, with `gain_error`, the standard error of
    the paired difference.
    """

    gradient_error: float
    standard_error: float
    solved: float
    gain: float
    gain_error: float
    pairs: int


@dataclass(frozen=True)
class Plan:
    """The policy chosen for a budget.

    `bound`: no assignment of the profiled options within the limits has a smaller sum of single-layer
    errors; the exact solution's is at most `gap` (a fraction) above it. `measured`: the joint error, None
    without a workload. `won`: in words, what the study won over the exact solution.
    """

    policy: Policy
    predicted: Prediction
    baseline: Baseline
    budget_bytes: int
    batch_size: int
    profiled_batch_size: int
    bound: float
    gap: float
    measured: Measurement | None = None
    trials: int = 0
    solver: str = "HiGHS"
    won: str = ""
    max_saved: int | None = None
    policy_path: str | None = None

    @property
    def is_exact(self) -> bool:
        """True if nothing is compressed: the plain step keeps the budget."""
        return not self.policy.rules or self.predicted.gradient_error == 0.0

    def stores_loss(self, profile: Profile) -> bool:
        """True if the policy compresses layers of the loss function, which `convert` does not reach."""
        assignment = profile.assignment(self.policy)
        used = profile.timeline.at(self.batch_size).compressed(assignment)
        return any(name.startswith("loss.") for name in used)

    def training(self, profile: Profile) -> list[str]:
        """The lines that put the policy into a training script."""
        load = f'mt.Policy.load("{self.policy_path or "policy.txt"}")'
        if not self.stores_loss(profile):
            return ["import mesa_tune as mt", f"mt.convert(model, {load})"]
        return [
            "import mesa_tune as mt",
            f"policy = {load}",
            "mt.convert(model, policy)",
            "...",
            "with mt.compress_saved(policy):  # the loss, too",
            "    loss = ...",
        ]

    def at(self, path: str | Path) -> Plan:
        """The same plan, whose policy is saved at `path`."""
        return replace(self, policy_path=str(path))

    def to_dict(self) -> dict[str, Any]:
        """The JSON document `mesa-tune.plan/1`."""
        return {
            "schema": schema("plan"),
            **{key: value for key, value in vars(self).items() if key not in _PARTS},
            "policy": self.policy.dumps(),
            "predicted": self.predicted.to_dict(),
            "baseline": dict(vars(self.baseline)),
            "measured": dict(vars(self.measured)) if self.measured else None,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Plan:
        """The plan that `to_dict` made `values` of. KeyError, TypeError or ValueError for anything else."""
        measured = values["measured"]
        parts = {
            "policy": Policy.parse(values["policy"], source="plan.json"),
            "predicted": Prediction.from_dict(values["predicted"]),
            "baseline": typed(Baseline, values["baseline"]),
            "measured": None if measured is None else typed(Measurement, measured),
        }
        return typed(cls, {**{key: value for key, value in values.items() if key != "schema"}, **parts})

    def save(self, path: str | Path) -> None:
        """Write the document to `path`, whole or not at all. RunError where it cannot be written."""
        write_document(path, self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """The plan saved at `path`. RunError for a file that is missing, damaged or something else."""
        return read_document(path, "plan", cls.from_dict, _REMEDY)


_PARTS = ("policy", "predicted", "baseline", "measured")
