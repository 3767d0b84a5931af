"""What is asked of a search: its arguments, checked, in bytes and milliseconds; and the plan that answers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mesa_tune.errors import BudgetError, options
from mesa_tune.policy import Policy
from mesa_tune.policy.policy import Header
from mesa_tune.profiles.profile import Prediction, Profile
from mesa_tune.profiles.timeline.distinct import Assignment
from mesa_tune.search.again.traced import traced_prediction
from mesa_tune.search.clusters import producers
from mesa_tune.search.objectives import MAX_NOISE_RATIO, Solved, check_objective
from mesa_tune.search.plan import Baseline, Plan
from mesa_tune.search.problem import Limits, Space
from mesa_tune.search.restrictions import Pins, Restrictions
from mesa_tune.search.space import policy_at
from mesa_tune.units import Budget, counted, format_bytes, parse_bytes

if TYPE_CHECKING:
    from mesa_tune.measure.fake_steps import PolicyStep
    from mesa_tune.search.study.worker import Outcome


@dataclass(frozen=True)
class Request:
    """Arguments of the search, in bytes and milliseconds. `requested`: the budget as the user wrote it.

    `limits`: without those on noise ratio and bias.
    """

    profile: Profile
    batch_size: int
    budget: int | None
    baseline: Baseline
    limits: Limits
    pins: Pins
    restrictions: Restrictions
    objective: str
    max_noise_ratio: float
    seed: int
    requested: Budget | None

    @property
    def identity(self) -> str:
        """JSON, equal for equal requests."""
        asked = (self.objective, str(self.max_noise_ratio), self.restrictions.to_dict())
        parts = [self.batch_size, vars(self.limits), self._pins, self.seed, *asked]
        return json.dumps(parts, sort_keys=True)

    @property
    def _pins(self) -> dict[str, Any]:
        return {glob: settings.to_dict() for glob, settings in self.pins.items()}

    def again(self, peak: int) -> dict[str, Any]:
        """Return `Plan.request`; `peak`: of the plan, the budget where none was given."""
        ms, ratio = self.limits.ms, self.max_noise_ratio
        return {
            "budget": peak if self.limits.peak is None else self.limits.peak,
            "batch_size": self.batch_size,
            "max_saved": self.limits.saved,
            "max_slowdown": None if ms is None else ms / self.profile.plain_ms(self.batch_size),
            "max_noise_ratio": None if math.isinf(ratio) else ratio,
            "objective": "auto" if self.objective == "memory" else self.objective,
            "pins": self._pins,
            **self.restrictions.to_dict(),
            "seed": self.seed,
        }


def check_request(
    budget: int | str | None,
    *,
    batch_size: int | None = None,
    max_batch: bool = False,
    max_saved: int | str | None = None,
    max_slowdown: float | None = None,
    max_noise_ratio: float = MAX_NOISE_RATIO,
    objective: str = "auto",
    forbid: Iterable[str] | None = None,
    only: Iterable[str] | None = None,
    **_: object,
) -> None:
    """Raise what `search_policy` raises for arguments that are wrong for every profile."""
    check_objective(objective, budget)
    _require_positive("batch size", batch_size, whole=True)
    if max_batch and (budget is None or batch_size is not None):
        raise BudgetError("max-batch: needs a budget and no batch size\nit finds the largest that fits")
    _require_positive("max-slowdown", max_slowdown)
    _require_positive("max-noise-ratio", max_noise_ratio, finite=False)
    for amount, name in ((budget, "budget"), (max_saved, "max-saved")):
        if amount is not None:
            parse_bytes(amount, name)
    Restrictions.of(forbid, only)


def check_length(trials: int | None, timeout: float | None) -> None:
    """Raise BudgetError for limits of a study that are none."""
    if trials is not None and trials < 0:
        raise BudgetError(f"trials {trials}: must be 0 or more\n0 solves from the profile alone")
    _require_positive("timeout", timeout)


def _require_positive(name: str, value: float | None, *, whole: bool = False, finite: bool = True) -> None:
    if value is None or (math.isinf(value) and value > 0 and not finite):
        return
    if not (math.isfinite(value) and value > 0 and (not whole or value == int(value))):
        kind = "an integer of at least 1" if whole else "finite" if value == math.inf else "above zero"
        raise BudgetError(
            f"{name} {value!r}: must be {kind}\ngive such a number, or leave it out for the default"
        )


def exact_plan(request: Request) -> Plan:
    """Return the plan that compresses nothing: the plain step fits."""
    predicted = request.profile.predict_assignment({}, batch_size=request.batch_size)
    # Nothing is faster than the plain step, and nothing errs less.
    objective = "time" if request.objective == "auto" else request.objective
    return Plan(
        policy=Policy((), _header(request, predicted, objective)),
        predicted=predicted,
        baseline=request.baseline,
        budget_bytes=request.budget,
        batch_size=request.batch_size,
        profiled_batch_size=request.profile.batch_size,
        bound=request.profile.plain_ms(request.batch_size) if objective == "time" else 0.0,
        gap=0.0,
        solver="none",
        objective=objective,
        won="the plain step fits the budget: nothing is compressed",
        max_saved=request.limits.saved,
    )


def plan_of(
    request: Request,
    space: Space,
    solved: Solved,
    outcome: Outcome | None = None,
    trials: int | None = None,
    traced: PolicyStep | None = None,
) -> Plan:
    """Return the plan. `outcome`: of the study, which was to have `trials` if they are limited.

    `traced`: its step, whose bytes are then those that are promised.
    """
    chosen = outcome.chosen if outcome else solved.solution.chosen
    assignment = space.assignment(chosen)
    predicted = request.profile.predict_assignment(assignment, batch_size=request.batch_size)
    if traced is not None:
        predicted = traced_prediction(predicted, traced)
    return Plan(
        policy=replace(
            policy_at(request.profile, space, chosen),
            header=_header(request, predicted, solved.objective, assignment),
        ),
        predicted=predicted,
        baseline=request.baseline,
        budget_bytes=request.budget,
        batch_size=request.batch_size,
        profiled_batch_size=request.profile.batch_size,
        bound=solved.bound,
        gap=solved.gap,
        measured=outcome.measured if outcome else None,
        trials=len(outcome.history) if outcome else 0,
        history=outcome.history if outcome else (),
        solver="HiGHS and study" if outcome and outcome.won else "HiGHS",
        won=_won(outcome, trials),
        max_saved=request.limits.saved,
        objective=solved.objective,
        why=solved.why,
        max_noise_ratio=solved.limits.noise,
        request=request.again(predicted.peak_bytes),
    )


def _header(
    request: Request, predicted: Prediction, objective: str, assignment: Assignment | None = None
) -> Header:
    profile = request.profile
    plain_ms = profile.plain_ms(request.batch_size)
    ratio = predicted.gradient_noise_ratio
    return Header(
        model=Path(profile.model).stem if profile.model else None,
        fingerprint=profile.layers_fingerprint or None,
        torch=profile.torch,
        batch=request.batch_size,
        budget=None if request.budget is None else format_bytes(request.budget),
        objective=objective,
        producers=producers(profile.timeline, assignment or {}),
        predicted=", ".join(
            [
                f"peak {format_bytes(predicted.peak_bytes)}",
                f"saved {format_bytes(predicted.saved_bytes)}",
                f"gradient error {predicted.gradient_error:.2e}",
                *([] if ratio is None else [f"own noise ratio {ratio:.1e}"]),
                *([] if predicted.step_ms is None else [f"step {predicted.step_ms / plain_ms:.2f}x"]),
            ]
        ),
    )


def _won(outcome: Outcome | None, limit: int | None) -> str:
    if outcome is None:
        return "no study: solved from the profile alone"
    if outcome.measured is None:
        return f"not measured: no trial fits into the time; give {options('timeout')} more seconds"
    trials = counted(len(outcome.history), "trial")
    if outcome.ended:
        trials = (
            f"{len(outcome.history)} of {limit} trials ({outcome.ended})"
            if limit
            else f"{trials} ({outcome.ended})"
        )
    if not outcome.won:
        return f"{trials} found nothing better, so the solved plan stays"
    return f"{trials} won {outcome.won}"
