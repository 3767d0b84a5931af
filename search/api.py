"""`search_policy`: from a profile and a budget to a plan."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mesa_tune.errors import BudgetError
from mesa_tune.policy import Policy
from mesa_tune.policy.policy import Header
from mesa_tune.profiler.profile import Prediction, Profile
from mesa_tune.search.plan import Baseline, Plan
from mesa_tune.search.solver import Program, Solution
from mesa_tune.search.space import Limits, Pins, make_space
from mesa_tune.search.unreachable import unreachable
from mesa_tune.units import Budget, counted, format_bytes, parse_bytes

if TYPE_CHECKING:
    from mesa_tune.profiler.joint_error import Objective
    from mesa_tune.search.study import Outcome
    from mesa_tune.workload.workload import Workload

TRIALS = 100
TIMEOUT = 120.0


@dataclass(frozen=True)
class Task:
    """What was asked for, in bytes and milliseconds."""

    profile: Profile
    batch_size: int
    budget: int
    baseline: Baseline
    limits: Limits
    pins: Pins
    seed: int
    typed: Budget

    @property
    def identity(self) -> str:
        """Equal for equal tasks on equal profiles."""
        pins = {glob: settings.to_dict() for glob, settings in self.pins.items()}
        parts = [self.profile.to_dict(), self.batch_size, vars(self.limits), pins, self.seed]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


def search_policy(
    profile: Profile,
    budget: int | str,
    *,
    workload: Workload | None = None,
    trials: int | None = None,
    timeout: float | None = None,
    batch_size: int | None = None,
    max_saved: int | str | None = None,
    max_slowdown: float | None = None,
    pins: Pins | None = None,
    seed: int = 0,
    storage: str | Path | None = None,
    progress: Callable[[str], None] | None = None,
    objective: Objective | None = None,
) -> Plan:
    """The policy with the least gradient error whose training step keeps `budget`.

    `budget`: peak bytes of the whole step, or `6GB`, `6GiB`, `40%` of the plain peak. First exactly, on the
    profile's single-layer errors; then, with a `workload`, a study of `trials` (default 100, 0 for none) or
    `timeout` seconds (default 120; either alone lifts the other's default) measures joint errors and
    replaces the exact solution only by what is better on fresh batches. `batch_size`: plan for one that was
    not profiled. `max_saved`: also a limit on saved bytes; `max_slowdown`: on the step's time over the
    plain one's; `pins`: settings that layers (names or globs) must have. `storage`: path of a SQLite file
    or a URL, in which the same call continues the study. `objective`: takes the place of measuring on the
    workload. A budget that the plain step keeps gives the exact policy.

    Raises:
        BudgetError: not an amount, not reachable, or a batch size that the profile cannot be stretched to.
        RunError: a profile without errors, a storage that cannot be used.
        WorkloadError: the workload's functions fail.
    """
    _require_positive("batch size", batch_size, whole=True)
    _require_positive("timeout", timeout)
    _require_positive("max-slowdown", max_slowdown)
    if trials is not None and trials < 0:
        raise BudgetError(f"trials {trials}: must be 0 or more\n0 solves from the profile alone")
    task = _task(profile, budget, batch_size, max_saved, max_slowdown, pins or {}, seed)
    if not task.pins and _plain_fits(task):
        return _exact_plan(task)
    program = Program(make_space(profile, task.batch_size, task.pins))
    solved = program.solve(task.limits)
    if solved is None:
        raise unreachable(profile, program, task.limits, task.pins, task.typed)
    if (workload is None and objective is None) or trials == 0 or solved.cost == 0:
        return _plan(task, program, solved, None)
    outcome = _improved(
        task, program, solved, objective or _objective(profile, workload), trials, timeout, storage, progress
    )
    return _plan(task, program, solved, outcome)


def _task(
    profile: Profile,
    budget: int | str,
    batch_size: int | None,
    max_saved: int | str | None,
    max_slowdown: float | None,
    pins: Pins,
    seed: int,
) -> Task:
    # An amount that is none should fail before anything else is looked at.
    amount = parse_bytes(budget)
    saved = None if max_saved is None else parse_bytes(max_saved, "max-saved")
    sized = profile.timeline.at(batch_size or profile.batch_size)
    baseline = Baseline(sized.peak_bytes({}), sized.saved_bytes({}))
    step_ms = profile.step_ms * sized.batch_size / profile.batch_size
    limits = Limits(
        amount.of(baseline.peak_bytes),
        None if saved is None else saved.of(baseline.saved_bytes),
        None if max_slowdown is None else max_slowdown * step_ms,
    )
    assert limits.peak is not None
    return Task(profile, sized.batch_size, limits.peak, baseline, limits, pins, seed, amount)


def _plain_fits(task: Task) -> bool:
    saved = task.limits.saved
    return task.baseline.peak_bytes <= task.budget and (saved is None or task.baseline.saved_bytes <= saved)


def _exact_plan(task: Task) -> Plan:
    predicted = task.profile.predict_assignment({}, batch_size=task.batch_size)
    return Plan(
        policy=Policy((), _header(task, predicted)),
        predicted=predicted,
        baseline=task.baseline,
        budget_bytes=task.budget,
        batch_size=task.batch_size,
        profiled_batch_size=task.profile.batch_size,
        bound=0.0,
        gap=0.0,
        solver="none",
        won="the plain step keeps the budget: nothing is compressed",
        max_saved=task.limits.saved,
    )


def _objective(profile: Profile, workload: Workload | None) -> Objective:
    from mesa_tune.profiler.joint_error import JointError

    assert workload is not None
    # The planned batch may not fit without a policy, the profiled one did.
    return JointError(workload.with_batch_size(profile.batch_size))


def _improved(
    task: Task,
    program: Program,
    solved: Solution,
    objective: Objective,
    trials: int | None,
    timeout: float | None,
    storage: str | Path | None,
    progress: Callable[[str], None] | None,
) -> Outcome:
    from mesa_tune.search.study import Improvement, Request

    unlimited = trials is None and timeout is None
    request = Request(
        identity=task.identity,
        trials=TRIALS if unlimited else trials,
        timeout=TIMEOUT if unlimited else timeout,
        seed=task.seed,
        storage=storage,
        labels={"model": task.profile.model, "budget_bytes": task.budget, "batch_size": task.batch_size},
        progress=progress,
    )

    def policy_of(chosen: tuple[int, ...]) -> Policy:
        return _policy(task, program, chosen, None)

    return Improvement(program, solved, task.limits, objective, policy_of).run(request)


def _plan(task: Task, program: Program, solved: Solution, outcome: Outcome | None) -> Plan:
    chosen = outcome.chosen if outcome else solved.chosen
    predicted = task.profile.predict_assignment(program.space.assignment(chosen), batch_size=task.batch_size)
    return Plan(
        policy=_policy(task, program, chosen, _header(task, predicted)),
        predicted=predicted,
        baseline=task.baseline,
        budget_bytes=task.budget,
        batch_size=task.batch_size,
        profiled_batch_size=task.profile.batch_size,
        bound=solved.bound,
        gap=solved.gap,
        measured=outcome.measured if outcome else None,
        trials=outcome.trials if outcome else 0,
        solver="HiGHS and study" if outcome and outcome.won else "HiGHS",
        won=_won(outcome),
        max_saved=task.limits.saved,
    )


def _policy(task: Task, program: Program, chosen: tuple[int, ...], header: Header | None) -> Policy:
    assignment = program.space.assignment(chosen)
    layers = task.profile.layers
    return Policy.from_assignments(
        ((layer.tag, layer.index, layer.name, assignment[layer.name]) for layer in layers), header
    )


def _header(task: Task, predicted: Prediction) -> Header:
    slowdown = (predicted.step_ms or 0.0) / (task.profile.step_ms * task.batch_size / task.profile.batch_size)
    return Header(
        model=Path(task.profile.model).stem if task.profile.model else None,
        fingerprint=task.profile.layers_fingerprint or None,
        torch=task.profile.torch,
        batch=task.batch_size,
        budget=format_bytes(task.budget),
        predicted=(
            f"peak {format_bytes(predicted.peak_bytes)}, saved {format_bytes(predicted.saved_bytes)}, "
            f"gradient error {predicted.gradient_error:.2e}, step {slowdown:.2f}x"
        ),
    )


def _won(outcome: Outcome | None) -> str:
    if outcome is None:
        return "no study: solved from the profile alone"
    measured, short = outcome.measured, outcome.asked is not None and outcome.trials < outcome.asked
    trials = counted(outcome.trials, "trial")
    if short:
        trials = f"{outcome.trials} of {outcome.asked} trials (time was up)"
    goes_on = "; the same command goes on with it" if short else ""
    if not outcome.won:
        return f"{trials} found nothing better on fresh batches, so the solved plan stays{goes_on}"
    part = measured.gain / measured.solved
    error = measured.gain_error / measured.solved
    return f"{trials} won {part:.1%} ± {error:.1%} of gradient error on fresh batches{goes_on}"


def _require_positive(name: str, value: float | None, *, whole: bool = False) -> None:
    if value is not None and not (math.isfinite(value) and value > 0 and (not whole or value == int(value))):
        kind = "an integer of at least 1" if whole else "above zero"
        raise BudgetError(
            f"{name} {value!r}: must be {kind}\ngive such a number, or leave it out for the default"
        )
