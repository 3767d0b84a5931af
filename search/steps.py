"""The steps among which a search chooses: with and without slices of losses (`tile`).

The hard part: slices change the peak and the time of the whole step, not of a layer alone. So each step is a
space and a problem of its own, and the best solution of all is the plan's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from mesa_tune.errors import BudgetError, MesaTuneError, PolicyError, options
from mesa_tune.profiles.profile import Profile
from mesa_tune.profiles.tiled_step import other_slices
from mesa_tune.search.again.correction import with_floor
from mesa_tune.search.linear.highs import Deadline, TimeUpError
from mesa_tune.search.objectives import Solved, fastest_of_lowest, solve, to_same_result
from mesa_tune.search.problem import Limits
from mesa_tune.search.restrictions import Pins, Restrictions, pinned_settings
from mesa_tune.search.solver import Program, Solution
from mesa_tune.search.space import make_space

_ROUNDS = 5
"""Solves at most, each within a limit on time that is lower by the excess of the prediction before."""

_WIDE = 5.0
"""Upper end of a noise ratio's interval over the ratio. Seven batches that vary as usual have 1.8, two 3."""


@dataclass(frozen=True)
class Step:
    """A step to search in; `sliced`: its large losses go backward in slices."""

    sliced: bool
    program: Program


def steps(profile: Profile, batch_size: int, pins: Pins, restrictions: Restrictions) -> list[Step]:
    """Return the steps that are allowed, with noise ratios as they become in training (`with_floor`).

    Raise PolicyError for pinned slices that none of them has.
    """
    later = with_floor(profile)
    return [
        Step(sliced, Program(make_space(later, batch_size, pins, restrictions, sliced=sliced)))
        for sliced in _possible(profile, pins, restrictions)
    ]


def _possible(profile: Profile, pins: Pins, restrictions: Restrictions) -> list[bool]:
    """Return whether the step has slices, for each that is allowed."""
    tiled, pinned = profile.tiled, pinned_settings(profile, pins)
    slices = [name for name, settings in pinned.items() if settings.tile > 1]
    why = other_slices(tiled, pinned)
    if why is not None:
        raise PolicyError(f"pin of slices: {why}\npin what the profile has traced, or nothing of it")
    if slices:
        return [True]
    if tiled is None or profile.in_slices.exact_ms is None or not restrictions.tile:
        return [False]
    return [False] if any(name in pinned for name in tiled.losses) else [False, True]


def lowest_peak(possible: Sequence[Step], limits: Limits, deadline: Deadline) -> int | None:
    """Return the lowest peak of all steps within the limits but that on the peak; None if there is none."""
    solutions = [step.program.smallest_peak(limits, deadline=deadline) for step in possible]
    return min((int(solution.cost) for solution in solutions if solution is not None), default=None)


def solved_best(
    profile: Profile,
    possible: Sequence[Step],
    limits: Limits,
    objective: str,
    ratio: float,
    deadline: Deadline,
) -> tuple[Step, Solved] | None:
    """Return the best solution of all steps, with its bound over all; None if no policy meets `limits`.

    Raise what `solve` raises, if no step has a solution.
    """
    results = [
        _solved(profile, step, limits, objective, ratio, deadline.part(1 / (len(possible) - number)))
        for number, step in enumerate(possible)
    ]
    pairs = [
        (step, result) for step, result in zip(possible, results, strict=True) if isinstance(result, Solved)
    ]
    if not pairs:
        # That no policy is within the noise ratio is proven only where the time of no step was up.
        errors = [result for result in results if isinstance(result, MesaTuneError)]
        if errors:
            raise next((error for error in errors if isinstance(error, TimeUpError)), errors[0])
        return None
    # Where one step is within the noise ratio, the least error of another is not asked for.
    wanted = min((solved.objective for _, solved in pairs), key=lambda name: name == "error")
    pairs = [(step, solved) for step, solved in pairs if solved.objective == wanted]
    step, best = _best(pairs, deadline)
    proven = [one.bound for _, one in pairs]
    # Nothing is known of a step whose time was up but that its plain step is no faster.
    for unsolved, result in zip(possible, results, strict=True):
        if isinstance(result, TimeUpError):
            proven.append(unsolved.program.space.base_ms if wanted == "time" else 0.0)
    return step, replace(best, bound=min(proven))


def solved_in_time(
    profile: Profile,
    possible: Sequence[Step],
    limits: Limits,
    objective: str,
    ratio: float,
    seconds: float = Deadline.seconds,
) -> tuple[Step, Solved] | None:
    """Return the best solution, whose predicted step is within the limit on its time; None if there is none.

    The solver's sum lacks what the first layers that compress add (`PriceTable`). So where the prediction
    exceeds the limit, the solver's is lowered by as much; where no policy is below that, halfway back; at
    last to the time of the exact step. Raise what `solved_best` raises, and BudgetError where only
    predictions exceed it.
    """
    asked = limits.ms
    best = solved_best(profile, possible, limits, objective, ratio, Deadline(seconds))
    if best is None or asked is None:
        return best
    reached = ms = _predicted_ms(profile, best)
    if ms <= asked:
        return best
    too_low, too_high = -math.inf, asked
    for left in reversed(range(_ROUNDS)):
        limit = max(too_high - (ms - asked), (too_low + too_high) / 2)
        if not left:
            limit = min(step.program.space.base_ms for step in possible)
        best = None
        with suppress(BudgetError, TimeUpError):
            within = replace(limits, ms=limit)
            best = solved_best(profile, possible, within, objective, ratio, Deadline(seconds))
        if best is None:
            too_low = limit
            continue
        ms = _predicted_ms(profile, best)
        if ms <= asked:
            return best
        too_high, reached = limit, min(reached, ms)
    slowdown = math.ceil(100 * reached / profile.plain_ms(possible[0].program.space.batch_size)) / 100
    raise BudgetError(
        "max-slowdown: no policy that is predicted to be that fast was found within the other limits\n"
        f"the fastest one found takes {slowdown:g} times plain: {options(max_slowdown=slowdown)}"
    )


def _predicted_ms(profile: Profile, best: tuple[Step, Solved]) -> float:
    """Return the predicted time of a solution's step; 0 if it is unknown."""
    space, chosen = best[0].program.space, best[1].solution.chosen
    predicted = profile.predict_assignment(space.assignment(chosen), batch_size=space.batch_size)
    return predicted.step_ms or 0.0


def solved_quietly(
    profile: Profile,
    possible: Sequence[Step],
    limits: Limits,
    objective: str,
    ratio: float,
    seconds: float = Deadline.seconds,
) -> tuple[Step, Solved] | None:
    """Return what `solved_in_time` does; where batches differ widely, with the interval's end within `ratio`.

    A mean over a few batches says little where one errs a hundred times as much as another. So where the
    predicted noise ratio has an interval that ends more than `_WIDE` times above it, this end is limited.
    """
    within, best = ratio, None
    for _ in range(_ROUNDS):
        try:
            best = solved_in_time(profile, possible, limits, objective, within, seconds)
        except BudgetError as error:
            if within == ratio:
                raise
            raise BudgetError(
                f"noise ratio {ratio:g}: batches err so differently that no plan's interval ends within it\n"
                f"raise {options('max_noise_ratio')} or the budget, or profile with more batches (seeds=)"
            ) from error
        excess = 0.0 if best is None else _excess(profile, *best, ratio)
        if excess <= 1:
            break
        within /= excess
    return best


def _excess(profile: Profile, step: Step, solved: Solved, ratio: float) -> float:
    """Return the end of a wide interval of the plan's noise ratio over `ratio`; 0 of one that is not wide."""
    space = step.program.space
    predicted = profile.predict_assignment(space.assignment(solved.solution.chosen))
    mean, ends = predicted.gradient_noise_ratio, predicted.gradient_noise_ratio_interval
    if solved.objective == "error" or mean is None or ends is None or ends[1] <= _WIDE * mean:
        return 0.0
    return ends[1] / ratio


def _best(pairs: Sequence[tuple[Step, Solved]], deadline: Deadline) -> tuple[Step, Solved]:
    """Return the pair of least cost; of equal ones the fastest."""
    least = min(solved.cost for _, solved in pairs)
    equal = [(step, solved) for step, solved in pairs if solved.cost == least]
    if equal[0][1].objective == "memory":
        equal = [(step, fastest_of_lowest(step.program, solved, deadline)) for step, solved in equal]
    return min(equal, key=lambda pair: pair[0].program.space.ms(pair[1].solution.chosen))


def _solved(
    profile: Profile, step: Step, limits: Limits, objective: str, ratio: float, deadline: Deadline
) -> Solved | MesaTuneError | None:
    try:
        return solve(profile, step.program, limits, objective, ratio, deadline)
    except (BudgetError, TimeUpError) as error:
        return error


def costs(step: Step, objective: str, solution: Solution) -> tuple[float, float]:
    """Return what `objective` minimises, then the time."""
    space, chosen = step.program.space, solution.chosen
    ms, ratio = space.ms(chosen), space.noise(chosen)
    if objective == "memory":
        return float(space.live(chosen).max()), ms
    if objective == "time":
        return to_same_result(ms, ratio if space.knows_noise else 0.0), ms
    return ratio, ms
