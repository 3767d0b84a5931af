"""What can be had: peak, saved bytes, step time and noise ratio of the best plans, budget by budget."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mesa_tune.policy import Policy
from mesa_tune.profiler.profile import Prediction, Profile
from mesa_tune.search.linear.highs import TimeUpError
from mesa_tune.search.objectives import MAX_NOISE_RATIO, noise_limits
from mesa_tune.search.problem import Limits
from mesa_tune.search.restrictions import NO_RESTRICTIONS
from mesa_tune.search.solver import Program, Solution
from mesa_tune.search.steps import Step, costs, steps

if TYPE_CHECKING:
    import pandas as pd

# Points of a curve need no tight proof.
_GAP, _SECONDS = 1e-2, 1.0
_UNIFORM = tuple(2**bits for bits in (1, 2, 3, 4, 8))


def pareto(
    profile: Profile,
    *,
    batch_size: int | None = None,
    budgets: int = 6,
    max_noise_ratio: float = MAX_NOISE_RATIO,
    objectives: Sequence[str] = ("time", "error"),
) -> pd.DataFrame:
    """Return a table of predictions: of the best plans for budgets from the lowest peak to the plain one.

    Columns: `objective` (`uniform` for policies with the same bits everywhere, `plain`), `policy` (a label),
    `budget`, `peak_bytes`, `saved_bytes`, `step_ms`, `gradient_error`, `noise_ratio`. A budget without a plan
    within the ratio has no row; without a known ratio `time` has none. Solved to 1 %, within seconds.
    """
    import pandas as pd

    size = batch_size or profile.batch_size
    possible = steps(profile, size, {}, NO_RESTRICTIONS)
    rows = [_row("plain", "plain", None, profile.predict_assignment({}, batch_size=size))]
    for level in _UNIFORM:
        label = f"uniform {(level - 1).bit_length()} bits"
        predicted = profile.predict(Policy.uniform(level=level), batch_size=size)
        rows.append(_row("uniform", label, None, predicted))
    for objective in objectives:
        rows += _curve(profile, possible, objective, max_noise_ratio, budgets)
    return pd.DataFrame(rows)


def _curve(
    profile: Profile, possible: Sequence[Step], objective: str, ratio: float, budgets: int
) -> Iterator[dict[str, Any]]:
    size = possible[0].program.space.batch_size
    limits = noise_limits(profile, size, Limits(), ratio if objective == "time" else math.inf)
    if isinstance(limits, str):
        return
    lowest = [(step, _lowest(step, limits)) for step in possible]
    reached = [(int(solution.cost), step, solution) for step, solution in lowest if solution]
    if not reached:
        return
    least = min(cost for cost, _, _ in reached)
    plain = profile.timeline.at(size).needed_bytes({})
    for number in range(budgets):
        peak = int(least + (plain - least) * number / budgets)
        found = [
            (costs(step, objective, solution), step, solution)
            for cost, step, smallest in reached
            if cost <= peak
            for solution in [_solved(step.program, objective, limits, peak) or smallest]
        ]
        _, step, solution = min(found, key=operator.itemgetter(0))
        assignment = step.program.space.assignment(solution.chosen)
        predicted = profile.predict_assignment(assignment, batch_size=size)
        yield _row(objective, f"{objective}, {peak / plain:.0%} of plain", peak, predicted)


def _lowest(step: Step, limits: Limits) -> Solution | None:
    return step.program.smallest_peak(limits, gap=_GAP, seconds=2 * _SECONDS)


def _solved(program: Program, objective: str, limits: Limits, peak: int) -> Solution | None:
    inside = replace(limits, peak=peak)
    costs, further = (program.times, program.errors) if objective == "time" else (program.errors, None)
    try:
        return program.solve(inside, costs, gap=_GAP, further=further, seconds=_SECONDS)
    except TimeUpError:
        return None


def _row(objective: str, label: str, budget: int | None, predicted: Prediction) -> dict[str, Any]:
    return {
        "objective": objective,
        "policy": label,
        "budget": budget,
        "peak_bytes": predicted.peak_bytes,
        "saved_bytes": predicted.saved_bytes,
        "step_ms": predicted.step_ms,
        "gradient_error": predicted.gradient_error,
        "noise_ratio": predicted.gradient_noise_ratio,
    }
