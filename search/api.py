"""`search_policy`: a plan from a profile and a budget."""

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
    from mesa_tune.profiler.errors.joint_error import Objective
    from mesa_tune.search.study import Outcome
    from mesa_tune.workload.workload import Workload

TRIALS = 100
TIMEOUT = 120.0


@dataclass(frozen=True)
class Request:
    """Arguments of the search, in bytes and milliseconds. `requested`: the budget as the user wrote it."""

    profile: Profile
    batch_size: int
    budget: int
    baseline: Baseline
    limits: Limits
    pins: Pins
    seed: int
    requested: Budget

    @property
    def identity(self) -> str:
        """A hash, equal for equal requests on equal profiles."""
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
    """Search for the policy with the least gradient error whose training step fits `budget`.

    First it is solved exactly, with the profile's errors of single layers. Then, with a `workload`, a study
    measures joint errors. A policy of the study replaces the exact solution only if it is better on fresh
    batches. If the plain step fits the budget, the policy is exact.

    `budget`: peak bytes of the whole step, or `6GB`, `6GiB`, `40%` of the plain peak. `trials` (default 100,
    0 for no study) and `timeout` (default 120 seconds) limit the study; either alone removes the other limit.
    `batch_size`: the size to plan for, default the profiled one. `max_saved`: limit on saved bytes.
    `max_slowdown`: limit on step time over the plain step's. `pins`: settings that layers (names or globs)
    must have. `storage`: path of a SQLite file or a URL, in which the same call continues the study.
    `objective`: measures joint errors instead of the workload.

    Raises:
        BudgetError: not an amount, not reachable, or a batch size that the profile cannot predict.
        RunError: a profile without errors or of bytes only, a storage that cannot be used.
        WorkloadError: the workload's functions fail.
    """
    _require_positive("batch size", batch_size, whole=True)
    _require_positive("timeout", timeout)
    _require_positive("max-slowdown", max_slowdown)
    if trials is not None and trials < 0:
        raise BudgetError(f"trials {trials}: must be 0 or more\n0 solves from the profile alone")
    profile.plain_ms(profile.batch_size)  # raises for a profile without prices
    request = _request(profile, budget, batch_size, max_saved, max_slowdown, pins or {}, seed)
    if not request.pins and _plain_fits(request):
        return _exact_plan(request)
    profile.require_prices()
    program = Program(make_space(profile, request.batch_size, request.pins))
    solved = program.solve(request.limits)
    if solved is None:
        raise unreachable(profile, program, request.limits, request.pins, request.requested)
    if (workload is None and objective is None) or trials == 0 or solved.cost == 0:
        return _plan(request, program, solved, None)
    objective = objective or _objective(profile, workload)
    outcome = _improved(request, program, solved, objective, trials, timeout, storage, progress)
    return _plan(request, program, solved, outcome)


def _request(
    profile: Profile,
    budget: int | str,
    batch_size: int | None,
    max_saved: int | str | None,
    max_slowdown: float | None,
    pins: Pins,
    seed: int,
) -> Request:
    # A budget that is not an amount is the first error to raise.
    amount = parse_bytes(budget)
    saved = None if max_saved is None else parse_bytes(max_saved, "max-saved")
    sized = profile.timeline.at(batch_size or profile.batch_size)
    baseline = Baseline(sized.peak_bytes({}), sized.saved_bytes({}))
    limits = Limits(
        amount.of(sized.with_workspaces.peak_bytes({})),
        None if saved is None else saved.of(baseline.saved_bytes),
        None if max_slowdown is None else max_slowdown * profile.plain_ms(sized.batch_size),
    )
    assert limits.peak is not None
    return Request(profile, sized.batch_size, limits.peak, baseline, limits, pins, seed, amount)


def _plain_fits(request: Request) -> bool:
    saved, plain = request.limits.saved, request.baseline
    needed = request.profile.timeline.at(request.batch_size).with_workspaces.peak_bytes({})
    return needed <= request.budget and (saved is None or plain.saved_bytes <= saved)


def _exact_plan(request: Request) -> Plan:
    predicted = request.profile.predict_assignment({}, batch_size=request.batch_size)
    return Plan(
        policy=Policy((), _header(request, predicted)),
        predicted=predicted,
        baseline=request.baseline,
        budget_bytes=request.budget,
        batch_size=request.batch_size,
        profiled_batch_size=request.profile.batch_size,
        bound=0.0,
        gap=0.0,
        solver="none",
        won="the plain step fits the budget: nothing is compressed",
        max_saved=request.limits.saved,
    )


def _objective(profile: Profile, workload: Workload | None) -> Objective:
    from mesa_tune.profiler.errors.joint_error import JointError

    assert workload is not None
    # A plain step of the planned batch may not fit in memory; one of the profiled batch did.
    return JointError(workload.with_batch_size(profile.batch_size))


def _improved(
    request: Request,
    program: Program,
    solved: Solution,
    objective: Objective,
    trials: int | None,
    timeout: float | None,
    storage: str | Path | None,
    progress: Callable[[str], None] | None,
) -> Outcome:
    from mesa_tune.search.study import LocalSearch, StudySettings

    by_default, model = trials is None and timeout is None, request.profile.model
    settings = StudySettings(
        identity=request.identity,
        trials=TRIALS if by_default else trials,
        timeout=TIMEOUT if by_default else timeout,
        seed=request.seed,
        storage=storage,
        labels={"model": model, "budget_bytes": request.budget, "batch_size": request.batch_size},
        progress=progress,
    )

    def policy_of(chosen: tuple[int, ...]) -> Policy:
        return _policy(request, program, chosen, None)

    return LocalSearch(program, solved, request.limits, objective, policy_of).run(settings)


def _plan(request: Request, program: Program, solved: Solution, outcome: Outcome | None) -> Plan:
    chosen = outcome.chosen if outcome else solved.chosen
    assignment = program.space.assignment(chosen)
    predicted = request.profile.predict_assignment(assignment, batch_size=request.batch_size)
    return Plan(
        policy=_policy(request, program, chosen, _header(request, predicted)),
        predicted=predicted,
        baseline=request.baseline,
        budget_bytes=request.budget,
        batch_size=request.batch_size,
        profiled_batch_size=request.profile.batch_size,
        bound=solved.bound,
        gap=solved.gap,
        measured=outcome.measured if outcome else None,
        trials=outcome.trials if outcome else 0,
        solver="HiGHS and study" if outcome and outcome.won else "HiGHS",
        won=_won(outcome),
        max_saved=request.limits.saved,
    )


def _policy(request: Request, program: Program, chosen: tuple[int, ...], header: Header | None) -> Policy:
    assignment = program.space.assignment(chosen)
    layers = request.profile.layers
    return Policy.from_assignments(
        ((layer.tag, layer.index, layer.name, assignment[layer.name]) for layer in layers), header
    )


def _header(request: Request, predicted: Prediction) -> Header:
    profile = request.profile
    plain_ms = profile.plain_ms(request.batch_size)
    ratio = predicted.gradient_noise_ratio
    return Header(
        model=Path(profile.model).stem if profile.model else None,
        fingerprint=profile.layers_fingerprint or None,
        torch=profile.torch,
        batch=request.batch_size,
        budget=format_bytes(request.budget),
        predicted=", ".join(
            [
                f"peak {format_bytes(predicted.peak_bytes)}",
                f"saved {format_bytes(predicted.saved_bytes)}",
                f"gradient error {predicted.gradient_error:.2e}",
                *([] if ratio is None else [f"noise ratio {ratio:.1e}"]),
                *([] if predicted.step_ms is None else [f"step {predicted.step_ms / plain_ms:.2f}x"]),
            ]
        ),
    )


def _won(outcome: Outcome | None) -> str:
    if outcome is None:
        return "no study: solved from the profile alone"
    trials, hint = counted(outcome.trials, "trial"), ""
    if outcome.asked is not None and outcome.trials < outcome.asked:
        trials = f"{outcome.trials} of {outcome.asked} trials (time was up)"
        hint = "; the same command continues it"
    if not outcome.won:
        return f"{trials} found nothing better on fresh batches, so the solved plan stays{hint}"
    gain = outcome.measured.gain / outcome.measured.solved
    error = outcome.measured.gain_error / outcome.measured.solved
    return f"{trials} won {gain:.1%} ± {error:.1%} of gradient error on fresh batches{hint}"


def _require_positive(name: str, value: float | None, *, whole: bool = False) -> None:
    if value is not None and not (math.isfinite(value) and value > 0 and (not whole or value == int(value))):
        kind = "an integer of at least 1" if whole else "above zero"
        raise BudgetError(
            f"{name} {value!r}: must be {kind}\ngive such a number, or leave it out for the default"
        )
