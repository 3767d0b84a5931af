"""What can be had: peak, saved bytes, step time and noise ratio of the best plans, budget by budget."""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mesa_tune.policy import Policy
from mesa_tune.profiles.other_entries import REFERENCE
from mesa_tune.profiles.profile import Prediction, Profile
from mesa_tune.search.again.traced import traced_prediction
from mesa_tune.search.linear.highs import Deadline, TimeUpError
from mesa_tune.search.objectives import MAX_NOISE_RATIO, noise_limits, noise_price
from mesa_tune.search.plan import FrontierPoint
from mesa_tune.search.problem import Chosen, Limits
from mesa_tune.search.restrictions import NO_RESTRICTIONS
from mesa_tune.search.solver import Program, Solution
from mesa_tune.search.steps import Step, costs, steps

if TYPE_CHECKING:
    import pandas as pd

    from mesa_tune.measure.fake_steps import PolicyStep

# Points of a curve need no tight proof.
_GAP, _SECONDS = 1e-2, 1.0
_UNIFORM_BITS = (8, 6, 4, 3, 2, 1)


def pareto(
    profile: Profile,
    *,
    batch_size: int | None = None,
    budgets: int = 6,
    through: int | None = None,
    max_noise_ratio: float = MAX_NOISE_RATIO,
    objectives: Sequence[str] = ("time", "error"),
    marked: Mapping[str, Prediction] | None = None,
    known: Sequence[FrontierPoint] = (),
) -> pd.DataFrame:
    """Return a table of predictions: of the best plans for budgets from the lowest peak to the plain one.

    Columns: `kind` (an objective; `plain`; `uniform`: the same bits everywhere; `again`: all blocks run
    again from inputs of 8 bits; or a label of `marked`), `label`, `budget`, `peak_bytes`, `saved_bytes`,
    `step_ms`, `gradient_error`, `noise_ratio`, `traced` (see `FrontierPoint`). `through`: a budget that takes
    the place of the nearest one. A budget without a plan within the ratio has no row; without a known ratio
    `time` has none. Solved to 1 %, within seconds. `known`: the plans of the first objective, which are then
    not solved again, and no others are.
    """
    import pandas as pd

    size = batch_size or profile.batch_size
    plain = profile.predict_assignment({}, batch_size=size)
    ms = None if profile.step_ms is None else profile.plain_ms(size)
    rows = [_row("plain", "plain", None, replace(plain, step_ms=ms))]
    for bits in _UNIFORM_BITS:
        predicted = profile.predict(Policy.uniform(level=2**bits), batch_size=size)
        rows.append(_row("uniform", f"{bits} bits" if bits > 1 else "1 bit", None, predicted))
    if profile.timeline.modules:
        again = dict.fromkeys(profile.timeline.modules, REFERENCE)
        predicted = profile.predict_assignment(again, batch_size=size)
        rows.append(_row("again", "blocks run again", None, predicted))
    points = (
        {objectives[0]: known}
        if known
        else _solved_points(profile, size, objectives, max_noise_ratio, budgets, through)
    )
    for objective, own in points.items():
        rows += [_point_row(objective, point, plain.peak_bytes) for point in own]
    rows += [_row(label, label, None, predicted) for label, predicted in (marked or {}).items()]
    numbers = dict.fromkeys(("step_ms", "gradient_error", "noise_ratio"), float)
    return pd.DataFrame(rows).astype(numbers)


def _solved_points(
    profile: Profile, size: int, objectives: Sequence[str], ratio: float, budgets: int, through: int | None
) -> dict[str, list[FrontierPoint]]:
    possible = steps(profile, size, {}, NO_RESTRICTIONS)
    return {
        objective: [
            point(profile, size, *found)
            for found in front(profile, possible, objective, ratio, budgets, through)
        ]
        for objective in objectives
    }


def front(
    profile: Profile,
    possible: Sequence[Step],
    objective: str,
    ratio: float,
    budgets: int = 6,
    through: int | None = None,
    end: float = math.inf,
) -> Iterator[tuple[int, Step, Chosen]]:
    """Yield budgets, from the lowest peak on, each with the step and the choices of its best plan.

    No further one is solved after `end`, by `time.monotonic`.
    """
    size = possible[0].program.space.batch_size
    limits = noise_limits(profile, Limits(), ratio if objective == "time" else math.inf)
    if isinstance(limits, str):
        return
    smallest = [(step, lowest(step, limits)) for step in possible]
    reached = [(int(solution.cost), step, solution) for step, solution in smallest if solution]
    if not reached:
        return
    least = min(cost for cost, _, _ in reached)
    plain = profile.timeline.at(size).peak_bytes({})
    best: list[tuple[tuple[float, float], Step, Solution]] = []
    for peak in sorted(_between(least, plain, budgets, through)):
        if time.monotonic() > end:
            return
        found = [
            (costs(step, objective, solution), step, solution)
            for cost, step, least_peak in reached
            if cost <= peak
            for solution in [_solved(step.program, objective, limits, peak) or least_peak]
        ]
        # Where the time did not suffice, the plan of the smaller budget is the better one.
        best = [min(found + best, key=operator.itemgetter(0))]
        yield peak, best[0][1], best[0][2].chosen


def point(
    profile: Profile, size: int, budget: int, step: Step, chosen: Chosen, traced: PolicyStep | None = None
) -> FrontierPoint:
    """Return the point of a plan for `budget`; `traced`: its step."""
    predicted = profile.predict_assignment(step.program.space.assignment(chosen), batch_size=size)
    if traced is not None:
        predicted = traced_prediction(predicted, traced)
    names = ("peak_bytes", "saved_bytes", "step_ms", "gradient_error", "gradient_noise_ratio")
    values = {name: getattr(predicted, name) for name in names}
    return FrontierPoint(budget, **values, traced=traced is not None)


def _between(least: int, plain: int, count: int, through: int | None) -> list[int]:
    """Return `count` budgets in equal steps from the least, one of them `through`."""
    budgets = [least + (plain - least) * number // count for number in range(count)]
    if through is not None and least <= through < plain and count > 1:
        nearest = min(budgets[1:], key=lambda budget: abs(budget - through))
        budgets[budgets.index(nearest)] = through
    return budgets


def lowest(step: Step, limits: Limits) -> Solution | None:
    """Return the solution of the lowest peak, to 1 % or as close as seconds allow; None if there is none."""
    return step.program.smallest_peak(limits, gap=_GAP, deadline=Deadline(2 * _SECONDS))


def _solved(program: Program, objective: str, limits: Limits, peak: int) -> Solution | None:
    inside, timed = replace(limits, peak=peak), objective == "time"
    space = program.space
    costs, price = (program.times, noise_price(space, space.base_ms)) if timed else (None, 1.0)
    try:
        return program.solve(inside, costs, price=price, gap=_GAP, deadline=Deadline(_SECONDS))
    except TimeUpError:
        return None


def _point_row(objective: str, point: FrontierPoint, plain: int) -> dict[str, Any]:
    label = f"{objective}, {point.budget_bytes / plain:.0%} of plain"
    return {**_row(objective, label, point.budget_bytes, point), "traced": point.traced}


def _row(kind: str, label: str, budget: int | None, predicted: Prediction | FrontierPoint) -> dict[str, Any]:
    return {
        "kind": kind,
        "label": label,
        "budget": budget,
        "peak_bytes": predicted.peak_bytes,
        "saved_bytes": predicted.saved_bytes,
        "step_ms": predicted.step_ms,
        "gradient_error": predicted.gradient_error,
        "noise_ratio": predicted.gradient_noise_ratio,
        "traced": False,
    }
