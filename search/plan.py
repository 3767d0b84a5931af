"""`Plan`: a policy for a memory budget, with predictions and measurements. Saved as plan.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mesa_tune.files import read_document, schema, typed, write_document
from mesa_tune.policy import Policy
from mesa_tune.profiles.profile import Prediction, Profile
from mesa_tune.profiles.shown import QUANTITIES, quantities_html
from mesa_tune.units import format_bytes, format_error

_REMEDY = "make it again with `mesa-tune search --force`"


@dataclass(frozen=True)
class Baseline:
    """Bytes of the plain step at the planned batch size."""

    peak_bytes: int
    saved_bytes: int


@dataclass(frozen=True)
class Measurement:
    """Joint gradient errors on fresh batches and rounding seeds, which no decision was based on.

    `gradient_error` is the plan's mean, with its `standard_error`; `noise_ratio` its mean ratio, None if
    unknown. `solved` is the mean noise ratio of the exact solution on the same `pairs` (a number of pairs of
    batch and seed), `gain` how much lower the plan's is, and `gain_error` the standard error of this paired
    difference.
    """

    gradient_error: float
    standard_error: float
    solved: float
    gain: float
    gain_error: float
    pairs: int
    noise_ratio: float | None = None


@dataclass(frozen=True)
class TrialEntry:
    """A trial of the study: the value that the study minimised, and what was measured.

    `value`: for objective `time` the step's time over plain's (predicted, if the plan is above the noise
    ratio), for `error` the gradient error, for `memory` the peak over the solved plan's. `gradient_error`:
    mean over the batches measured. `is_within`: whether the plan is within the noise ratio and the slowdown;
    `is_whole`: whether it was measured to the end. None: unknown, or not finite.
    """

    value: float | None
    peak_bytes: int
    gradient_error: float | None
    noise_ratio: float | None
    is_within: bool
    is_whole: bool


@dataclass(frozen=True)
class FrontierPoint:
    """The best plan for another budget, by the same objective: what a profile predicts of it.

    `traced`: whether its bytes are those of its own step, traced; else they are inferred.
    """

    budget_bytes: int
    peak_bytes: int
    saved_bytes: int
    step_ms: float | None
    gradient_error: float | None
    gradient_noise_ratio: float | None
    traced: bool


@dataclass(frozen=True)
class Plan:
    """The policy chosen for a budget.

    `objective`: `time`, `error` or `memory`; `why`: in words, why it is not the one asked for. `bound`: a
    proven lower bound on the objective, of all policies within the limits, by summed prices of single layers:
    milliseconds to the same result, step × (1 + 8 × noise ratio); noise ratio; or peak bytes. The best
    solution is above it by at most `gap` of itself. `budget_bytes`:
    None without a budget. `measured`: the joint error, None without a workload. `won`: in words, what the
    study improved of the exact solution. `history`: the trials of the study, the exact solution first.
    `frontier`: plans for other budgets, smallest first, where there was time to solve them.
    `request`: arguments of `search_policy` that `solved_again` solves with, as values for JSON.
    """

    policy: Policy
    predicted: Prediction
    baseline: Baseline
    budget_bytes: int | None
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
    objective: str = "error"
    why: str = ""
    max_noise_ratio: float | None = None
    history: tuple[TrialEntry, ...] = ()
    frontier: tuple[FrontierPoint, ...] = ()
    request: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_exact(self) -> bool:
        """True if nothing is compressed: the plain step fits the budget."""
        return not self.policy.rules or self.predicted.gradient_error == 0.0

    @property
    def frontier_objective(self) -> str:
        """What the plans of the `frontier` are best in."""
        return "time" if self.objective == "memory" else self.objective

    @property
    def is_from_study(self) -> bool:
        """True if a trial of the study replaced the exact solution."""
        return self.solver.endswith("study")

    @property
    def claim(self) -> str:
        """What is proven of the solved plan, in words."""
        if self.gap <= _PROVEN:
            return f"no plan of the settings tried {_BETTER[self.objective]}, {_PRICES[self.objective]}"
        part = f"{self.gap:.1%} of its {_QUANTITIES[self.objective]}"
        return f"at most {part} above the least of any plan, {_PRICES[self.objective]}"

    @property
    def summary(self) -> str:
        """What the plan does to the peak, the step and the gradient, in one line."""
        predicted, before = self.predicted, format_bytes(self.baseline.peak_bytes)
        budget = None if self.budget_bytes is None else format_bytes(self.budget_bytes)
        if not self.policy.rules and budget is None:
            return f"no policy has a lower peak than the plain step, {before}: nothing is compressed"
        if not self.policy.rules:
            return f"the plain step fits the budget: {before} of {budget}; nothing is compressed"
        step, ratio = self.policy.header.step_ratio, predicted.gradient_noise_ratio
        peak = f"peak {before} -> {format_bytes(predicted.peak_bytes)}"
        parts = [
            peak + (f" (budget {budget})" if budget else ""),
            "" if step is None else f"step {step:.2f} times plain's",
            f"gradient error {format_error(predicted.gradient_error)}" if ratio is None else "",
            "" if ratio is None else f"noise ratio {format_error(ratio)}",
        ]
        where = f"; policy in {self.policy_path}" if self.policy_path else ""
        return f"predicted {', '.join(filter(None, parts))}{where}"

    def stores_loss(self, profile: Profile) -> bool:
        """Return True if the policy compresses layers of the loss, which `convert` cannot compress."""
        assignment = profile.assignment(self.policy)
        used = profile.timeline.at(self.batch_size).compressed(assignment)
        return any(name.startswith("loss.") for name in used)

    def training(self, profile: Profile) -> list[str]:
        """Return the lines that apply the policy in a training script."""
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

    def _repr_html_(self) -> str:
        budget = "no budget" if self.budget_bytes is None else f"budget {format_bytes(self.budget_bytes)}"
        plain = dict(vars(self.baseline)) | {"gradient_error": 0.0, "gradient_noise_ratio": 0.0}
        rows = [
            {"quantity": name, "plain": plain.get(name), "predicted": getattr(self.predicted, name)}
            for name in QUANTITIES
        ]
        title = f"Plan: {budget}, batch {self.batch_size}"
        return quantities_html(title, rows, ("plain", "predicted"), self.won)

    def at(self, path: str | Path) -> Plan:
        """Return the same plan with its policy saved at `path`."""
        return replace(self, policy_path=str(path))

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document `mesa-tune.plan/3`."""
        return {
            "schema": schema("plan"),
            **{key: value for key, value in vars(self).items() if key not in _PARTS},
            "policy": self.policy.dumps(),
            "predicted": self.predicted.to_dict(),
            "baseline": dict(vars(self.baseline)),
            "measured": dict(vars(self.measured)) if self.measured else None,
            "history": [dict(vars(trial)) for trial in self.history],
            "frontier": [dict(vars(point)) for point in self.frontier],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Plan:
        """Return the plan that `to_dict` wrote. Raise KeyError, TypeError or ValueError for anything else."""
        measured = values["measured"]
        parts = {
            "policy": Policy.parse(values["policy"], source="plan.json"),
            "predicted": Prediction.from_dict(values["predicted"]),
            "baseline": typed(Baseline, values["baseline"]),
            "measured": None if measured is None else typed(Measurement, measured),
            "history": tuple(typed(TrialEntry, trial) for trial in values.get("history", ())),
            "frontier": tuple(typed(FrontierPoint, point) for point in values.get("frontier", ())),
        }
        return typed(cls, {**{key: value for key, value in values.items() if key != "schema"}, **parts})

    def save(self, path: str | Path) -> None:
        """Write the document to `path` atomically. Raise RunError if it cannot be written."""
        write_document(path, self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Return the plan saved at `path`. Raise RunError for a missing, damaged or other file."""
        return read_document(path, "plan", cls.from_dict, _REMEDY)


_PARTS = ("policy", "predicted", "baseline", "measured", "history", "frontier")

# The solver proves a minimum only up to its own tolerance.
_PROVEN = 1e-3
_BETTER = {"time": "takes less time", "error": "errs less", "memory": "has a lower peak"}
_QUANTITIES = {"time": "time", "error": "noise ratio", "memory": "peak"}
_SUMMED = "by summed single-layer prices"
_PRICES = {"time": _SUMMED, "error": _SUMMED, "memory": "by the timeline"}
