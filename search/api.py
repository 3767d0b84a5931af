"""`search_policy`: a plan from a profile and a budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mesa_tune.errors import BudgetError, options
from mesa_tune.profiles.profile import Profile
from mesa_tune.search.again.traced import ROUNDS, SECONDS, SMALL, corrected
from mesa_tune.search.batch_sizes import most_samples, no_batch, within_memory
from mesa_tune.search.frontier import front, point
from mesa_tune.search.linear.highs import Deadline
from mesa_tune.search.objectives import MAX_NOISE_RATIO, MEMORY_SLOWDOWN, Solved
from mesa_tune.search.plan import Baseline, FrontierPoint, Plan
from mesa_tune.search.problem import Chosen, Limits
from mesa_tune.search.request import Request, check_length, check_request, exact_plan, plan_of
from mesa_tune.search.restrictions import Pins, Restrictions, pinned_settings
from mesa_tune.search.solver import Program
from mesa_tune.search.space import with_producers
from mesa_tune.search.steps import Step, solved_quietly, steps
from mesa_tune.search.study.study import Sharing, Task, Work, improved
from mesa_tune.search.unreachable import unreachable
from mesa_tune.units import Budget, format_bytes, parse_bytes

if TYPE_CHECKING:
    from mesa_tune.measure.fake_steps import PolicyStep, PolicyTracer
    from mesa_tune.search.study.trial import Meter
    from mesa_tune.search.study.worker import Outcome
    from mesa_tune.workload.workload import Workload


def search_policy(
    profile: Profile,
    budget: int | str | None = None,
    *,
    workload: Workload | None = None,
    trials: int | None = None,
    timeout: float | None = None,
    batch_size: int | None = None,
    max_batch: bool = False,
    max_saved: int | str | None = None,
    max_slowdown: float | None = None,
    max_noise_ratio: float = MAX_NOISE_RATIO,
    objective: str = "auto",
    pins: Pins | None = None,
    forbid: Iterable[str] | None = None,
    only: Iterable[str] | None = None,
    seed: int = 0,
    storage: str | Path | None = None,
    progress: Callable[[str], None] | None = None,
    measure: Meter | None = None,
    sharing: Sharing | None = None,
) -> Plan:
    """Search for the best policy whose training step fits `budget`.

    Best is, by `objective`: `time`, the least time to the same result, step × (1 + 8 × gradient noise ratio),
    of a ratio of at most `max_noise_ratio`, of which bias, as far as it was measured, is at most a third, and
    with no parameter whose own ratio exceeds 1; `error`, the least noise ratio;
    `memory`, the lowest peak within `max_noise_ratio` and `max_slowdown` (default 1.5), which needs no
    budget; `auto`, `time`, but `error` where no policy is within the ratio or where it is unknown: in a
    profile without noise. `Plan.objective` and `.why` tell.

    First it is solved exactly, with the profile's prices of single layers. Then, with a `workload`, a study
    measures joint errors and steps' times. A policy of the study replaces the exact solution only if it is
    better in fresh measurements: it errs less, is faster or has a lower peak, by `objective`, or it is within
    the noise ratio where the solution is not. If the plain step fits the budget, the policy is exact.

    `budget`: peak bytes of the whole step, or `6GB`, `6GiB`, `40%` of the plain peak. `trials` (default 10,
    0 for no study) and `timeout` (default 30 seconds from the call on) limit the study; either alone removes
    the other limit.
    `batch_size`: the size to plan for, default the profiled one. `max_batch`: plan for the largest size whose
    step fits the budget, within the noise ratio where one can be; bytes are then real memory, with a margin
    for what predictions miss, and a percentage is of the profiled step. `max_saved`: limit on saved bytes.
    `max_slowdown`: limit on step time over the plain step's. `pins`: settings that layers (names or globs)
    must have. `forbid`: what no other layer may use: derive, recompute, offload, tile, rows. `only`:
    the settings (keys of policy.txt) that may differ from their defaults. `storage`: path of a SQLite file,
    `journal:PATH` or a URL, in which the same call continues the study. `measure`: measures errors and times
    instead of the workload. `sharing`: called with the study's name; its context is entered while others may
    join the study. A `max_noise_ratio` of inf is no limit.

    Raises:
        BudgetError: not an amount, not reachable, or a batch size that the profile cannot predict.
        PolicyError: a pin that matches no layer, an unknown name in `forbid` or `only`.
        RunError: a profile without errors or of bytes only, a noise ratio that is unknown but needed, a time
            that was up before any plan was found, a storage that cannot be used.
        WorkloadError: the workload's functions fail.
    """
    work = Work.limited(storage, trials, timeout, progress, sharing)
    check_length(trials, timeout)
    solved = solve(
        profile,
        budget,
        batch_size=batch_size,
        max_batch=max_batch,
        max_saved=max_saved,
        max_slowdown=max_slowdown,
        max_noise_ratio=max_noise_ratio,
        objective=objective,
        pins=pins,
        forbid=forbid,
        only=only,
        seed=seed,
    )
    if workload is not None:
        solved = solved.traced(workload)
    if trials == 0:
        return solved.plan
    return solved.studied(work, measure)


@dataclass(frozen=True)
class SolvedSearch:
    """A request with the `plan` of its exact solution, `best` of the `possible` steps.

    `best`: None if nothing is compressed. `tracer`: has traced the plan's `step`; None where its bytes are
    inferred.
    """

    request: Request
    plan: Plan
    best: tuple[Step, Solved] | None = None
    possible: Sequence[Step] = ()
    tracer: PolicyTracer | None = None
    step: PolicyStep | None = None

    def traced(self, workload: Workload) -> SolvedSearch:
        """Return the search whose plan's own step was traced and fits: it is solved again until one does.

        Where a step cannot be traced (`PolicyTracer`), as on a GPU, bytes stay inferred. Raise BudgetError if
        no plan was found.
        """
        from mesa_tune.measure.fake_steps import PolicyTracer

        request, best, possible = self.request, self.best, self.possible
        if best is None:
            return self
        limits, least = request.limits, math.inf
        tracer = PolicyTracer.of(workload, request.profile, request.batch_size)
        for left in reversed(range(ROUNDS)):
            space, chosen = best[0].program.space, best[1].solution.chosen
            traced = tracer.trace(with_producers(request.profile, space, chosen))
            if traced is None:
                return replace(self, tracer=tracer)
            excess = 0 if request.limits.peak is None else traced.peak - request.limits.peak
            if excess <= 0:
                plan = plan_of(request, space, best[1], traced=traced)
                return SolvedSearch(request, plan, best, possible, tracer, traced)
            least = min(least, traced.peak)
            # A few bytes are in every step, and no choice's.
            if limits.peak is not None and (excess < SMALL * traced.peak or left < ROUNDS // 2):
                limits = replace(limits, peak=limits.peak - excess)
            again = self._solved_again(best[0], chosen, traced, limits, possible, left) if left else None
            if again is None:
                break
            best, possible = again
        raise BudgetError(
            f"budget {format_bytes(request.budget or 0)}: no plan was found whose traced step fits\n"
            f"the smallest one found takes {format_bytes(int(least))}: raise {options('budget')} to that"
        )

    def _solved_again(
        self,
        step: Step,
        chosen: Chosen,
        traced: PolicyStep,
        limits: Limits,
        possible: Sequence[Step],
        left: int,
    ) -> tuple[tuple[Step, Solved], Sequence[Step]] | None:
        """Return the best solution with what was traced, and the steps that know it; None if there is none.

        `left`: how many solutions can be traced yet; the last is the smallest.
        """
        request, profile = self.request, self.request.profile
        own = profile.in_slices if step.sliced else profile
        known = Step(step.sliced, Program(corrected(step.program.space, chosen, traced, own)))
        possible = [known if each is step else each for each in possible]
        objective = "memory" if left == 1 else request.objective
        best = solved_quietly(profile, possible, limits, objective, request.max_noise_ratio, SECONDS)
        return None if best is None else (best, possible)

    def studied(self, work: Work, measure: Meter | None = None) -> Plan:
        """Return the plan of a study around the solution; this plan, where there is nothing to measure.

        `measure`: measures in place of the workload that was traced.
        """
        request, profile = self.request, self.request.profile
        can_measure = measure is not None or (self.tracer is not None and profile.own_noise is not None)
        if self.best is None or not can_measure:
            return self.plan
        step, solved = self.best
        space = step.program.space
        if not space.noise(solved.solution.chosen):
            return self.plan
        with nullcontext(measure) if measure else self._measuring() as meter:
            outcome = _improved(request, step, solved, meter, work)
        traced = self.step
        if self.tracer is not None and outcome.won:
            traced = self.tracer.trace(with_producers(profile, space, outcome.chosen))
        return plan_of(request, space, solved, outcome, work.trials, traced)

    def with_frontier(self, plan: Plan, end: float) -> Plan:
        """Return `plan` with those for other budgets, each traced once, as far as the time suffices."""
        if self.tracer is None or self.best is None:
            return plan
        request, points = self.request, list[FrontierPoint]()
        asked = plan.frontier_objective, request.max_noise_ratio
        for budget, step, chosen in front(request.profile, self.possible, *asked, end=end):
            traced = self.tracer.trace(with_producers(request.profile, step.program.space, chosen))
            points.append(point(request.profile, request.batch_size, budget, step, chosen, traced))
        return replace(plan, frontier=tuple(points))

    def _measuring(self) -> AbstractContextManager[Meter]:
        from mesa_tune.measure.timing.step_meter import measuring

        assert self.tracer is not None
        return measuring(self.request.profile, self.tracer)


def solve(
    profile: Profile,
    budget: int | str | None,
    *,
    batch_size: int | None,
    max_batch: bool,
    max_saved: int | str | None,
    max_slowdown: float | None,
    max_noise_ratio: float,
    objective: str,
    pins: Pins | None,
    forbid: Iterable[str] | None,
    only: Iterable[str] | None,
    seed: int,
) -> SolvedSearch:
    """Solve a request exactly: arguments and errors are those of `search_policy`."""
    check_request(
        budget,
        batch_size=batch_size,
        max_batch=max_batch,
        max_saved=max_saved,
        max_slowdown=max_slowdown,
        max_noise_ratio=max_noise_ratio,
        objective=objective,
        forbid=forbid,
        only=only,
    )
    profile.plain_ms(profile.batch_size)  # raises for a profile without prices
    if objective == "memory" and max_slowdown is None:
        max_slowdown = MEMORY_SLOWDOWN
    restrictions = Restrictions.of(forbid, only)
    options = (pins or {}, restrictions, objective, max_noise_ratio)
    limits, requested = _limits(profile, budget, batch_size, max_saved, max_slowdown)
    size, asked_peak = batch_size or profile.batch_size, limits.peak
    if max_batch:
        size, limits = _largest(profile, limits, requested, max_slowdown, *options)
    request = Request(profile, size, asked_peak, _baseline(profile, size), limits, *options, seed, requested)
    if _plain_fits(profile, limits, size, objective, pins):
        return SolvedSearch(request, exact_plan(request))
    profile.require_prices()
    possible = steps(profile, size, request.pins, restrictions)
    best = solved_quietly(profile, possible, limits, objective, max_noise_ratio)
    if best is None:
        raise unreachable(profile, possible, limits, request.pins, requested, Deadline())
    return SolvedSearch(request, plan_of(request, best[0].program.space, best[1]), best, possible)


def _limits(
    profile: Profile,
    budget: int | str | None,
    batch_size: int | None,
    max_saved: int | str | None,
    max_slowdown: float | None,
) -> tuple[Limits, Budget | None]:
    """Return the limits, and the budget as the user wrote it."""
    amount = None if budget is None else parse_bytes(budget)
    saved = None if max_saved is None else parse_bytes(max_saved, "max-saved")
    sized = profile.timeline.at(batch_size or profile.batch_size)
    limits = Limits(
        None if amount is None else amount.of(sized.peak_bytes({})),
        None if saved is None else saved.of(sized.saved_bytes({})),
        None if max_slowdown is None else max_slowdown * profile.plain_ms(sized.batch_size),
    )
    return limits, amount


def _baseline(profile: Profile, batch_size: int) -> Baseline:
    """Return the plain step's bytes."""
    sized = profile.timeline.at(batch_size)
    return Baseline(sized.peak_bytes({}), sized.saved_bytes({}))


def _largest(
    profile: Profile,
    given: Limits,
    budget: Budget | None,
    max_slowdown: float | None,
    pins: Pins,
    restrictions: Restrictions,
    objective: str,
    max_noise_ratio: float,
) -> tuple[int, Limits]:
    """Return the largest batch size that has a plan, and the limits at it.

    `given`: the limits on bytes; percentages are of the profiled step. A `budget` in bytes is memory in which
    the step is to train, so that its peak must leave room for what no prediction has.
    """
    is_memory = budget is not None and budget.fraction is None

    def limits_at(size: int) -> Limits:
        ms = None if max_slowdown is None else max_slowdown * profile.plain_ms(size)
        limits = replace(given, ms=ms)
        return within_memory(profile, limits, size) if is_memory else limits

    size = most_samples(profile, limits_at, objective, max_noise_ratio, pins, restrictions)
    if not size:
        raise no_batch(profile, given, is_memory, restrictions)
    return size, limits_at(size)


def plain_fits(
    profile: Profile,
    budget: int | str | None,
    *,
    batch_size: int | None = None,
    max_saved: int | str | None = None,
    objective: str = "auto",
    pins: Pins | None = None,
    **_: object,
) -> bool:
    """Return whether `search_policy` leaves the model plain: its step fits, and no pin compresses.

    Prices are not needed.
    """
    limits, _amount = _limits(profile, budget, batch_size, max_saved, None)
    return _plain_fits(profile, limits, batch_size or profile.batch_size, objective, pins)


def _plain_fits(profile: Profile, limits: Limits, batch_size: int, objective: str, pins: Pins | None) -> bool:
    pinned = pinned_settings(profile, pins or {}).values()
    sized = profile.timeline.at(batch_size)
    fits = (limits.peak is None or sized.peak_bytes({}) <= limits.peak) and (
        limits.saved is None or sized.saved_bytes({}) <= limits.saved
    )
    return fits and objective != "memory" and all(settings.exact for settings in pinned)


def _improved(request: Request, step: Step, solved: Solved, measure: Meter, work: Work) -> Outcome:
    program, chosen, limits, profile = step.program, solved.solution.chosen, solved.limits, request.profile
    if solved.objective == "memory":  # the solution was solved again within its own peak
        limits = replace(limits, peak=request.limits.peak)
    asked = request.batch_size, request.pins, request.restrictions
    task = Task(*asked, step.sliced, limits, chosen, request.seed, solved.objective)
    labels = {"model": profile.model, "budget_bytes": request.budget, "batch_size": request.batch_size}
    return improved(profile, program, task, measure, work, request.identity, labels)
