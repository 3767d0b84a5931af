"""The parameters of a trial, and the plan that the exact solver makes of them.

The hard part: prices of single layers do not tell how those of several layers combine. So a trial gives each
group of like layers another factor on the price that is minimised, of times or of errors, and moves the
limits on noise ratio and slowdown. What it asks for is solved again, within the bytes. A high price is enough
to leave a group exact: to let trials leave groups exact, or choose their group sizes, made more than half of
the problems infeasible, and won less often.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from mesa_tune.search.linear.highs import Deadline, TimeUpError
from mesa_tune.search.objectives import noise_price
from mesa_tune.search.problem import Chosen, Floats, Limits, Module, Unit
from mesa_tune.search.solver import Program
from mesa_tune.search.study.trial import Goal, Measured

MOST_GROUPS = 24
_FACTOR = {"time": 1.5, "error": 2.5}
"""Largest natural logarithms of the factors on prices."""
MARGIN = {"noise": 1.4, "slowdown": 0.4}
"""Largest natural logarithms of the factors on limits."""
AIM = {"noise": 0.9, "slowdown": 0.98}
"""Corrected trials aim at this share of a limit."""
_GAP, _SECONDS = 1e-3, 5.0
"""A plan is measured anyway, so it needs no tight proof."""
_THIRDS = ("early", "middle", "late")


class Setting(NamedTuple):
    """A problem that differs from the exact one: its limits, and a factor on the price of every choice."""

    limits: Limits
    factors: Floats


class Knobs:
    """The parameters of the trials of one program. `neutral`: those that leave it unchanged."""

    def __init__(self, program: Program, goal: Goal) -> None:
        self.program, self.goal = program, goal
        limits = {"noise": goal.limits.noise, "slowdown": goal.slowdown}
        self.limited = {name: limit for name, limit in limits.items() if limit is not None}
        self.groups = {} if goal.objective == "memory" else _groups(program.space.decisions)

    @cached_property
    def neutral(self) -> dict[str, Any]:
        margins = {f"{name} margin": 0.0 for name in self.limited}
        return margins | {f"price of {group}": 0.0 for group in self.groups}

    def corrected(self, params: Mapping[str, Any], plan: Measured) -> dict[str, Any]:
        """Return parameters with the limits at which a measured plan would have met those it exceeds.

        Errors, and times added to the plain step, count in proportion to the predicted ones. Return nothing
        where the plan exceeds no limit that can be moved.
        """
        moved, space, goal = {}, self.program.space, self.goal
        for name, limit in self.limited.items():
            if name in goal.exceeded(plan):
                aim = AIM[name] * limit
                if name == "noise":
                    aim *= space.noise(plan.chosen) / (goal.ratio(plan.errors) or limit)
                elif plan.pace is not None and plan.pace > 1:
                    aim = 1 + (aim - 1) * (space.ms(plan.chosen) / goal.plain_ms - 1) / (plan.pace - 1)
                lowest = math.exp(-MARGIN[name]) * limit
                moved[f"{name} margin"] = math.log(max(aim, lowest) / limit)
        return {**params, **moved} if moved else {}

    def asked(self, trial: Any) -> Setting:
        """Return what the parameters of a trial change; all are asked for in every trial."""
        limits, factors = self._moved(trial), np.ones(len(self.program.rows.choices))
        for group, numbers in self.groups.items():
            largest = _FACTOR[self.goal.objective]
            factor = math.exp(trial.suggest_float(f"price of {group}", -largest, largest))
            for number in numbers:
                start = self.program.rows.starts[number]
                factors[start : start + len(self.program.space.decisions[number].choices)] = factor
        return Setting(limits, factors)

    def solved(self, setting: Setting) -> Chosen | None:
        """Return the exact solution of the changed problem; None if there is none, or none soon."""
        program, deadline = self.program, Deadline(_SECONDS)
        limits, costs, price = setting.limits, program.times * setting.factors, 1.0
        try:
            if self.goal.objective == "memory":
                lowest = program.smallest_peak(limits, gap=_GAP, deadline=deadline.part(0.5))
                if lowest is None:
                    return None
                limits = replace(limits, peak=int(lowest.cost))
            if self.goal.objective == "error":  # the interaction costs what it is
                costs = program.noise * (setting.factors - 1.0)
            else:
                price = noise_price(program.space, program.space.base_ms)
            found = program.solve(limits, costs, price=price, gap=_GAP, deadline=deadline)
        except TimeUpError:
            return None
        return None if found is None else found.chosen

    def _moved(self, trial: Any) -> Limits:
        """Return the limits, those on noise ratio and slowdown moved."""
        limits = self.goal.limits
        factors = {
            name: math.exp(trial.suggest_float(f"{name} margin", -MARGIN[name], MARGIN[name]))
            for name in self.limited
        }
        noise = None if limits.noise is None else limits.noise * factors["noise"]
        return replace(limits, noise=noise, ms=None if limits.ms is None else limits.ms * factors["slowdown"])


def _groups(decisions: Sequence[Unit | Module]) -> dict[str, list[int]]:
    """Return the numbers of the decisions of each group of like layers: of a kind, in a third of the depth.

    Where these are too many, whole kinds; the rarest of these together.
    """
    for named in (_kind_and_third, _kind):
        groups: dict[str, list[int]] = {}
        for number, decision in enumerate(decisions):
            if len(decision.choices) > 1 or isinstance(decision, Module):
                groups.setdefault(named(decision, number, len(decisions)), []).append(number)
        if len(groups) <= MOST_GROUPS:
            return groups
    by_size = sorted(groups, key=lambda name: len(groups[name]), reverse=True)
    rare = [number for name in by_size[MOST_GROUPS - 1 :] for number in groups[name]]
    return {**{name: groups[name] for name in by_size[: MOST_GROUPS - 1]}, "other kinds": rare}


def _kind_and_third(decision: Unit | Module, number: int, count: int) -> str:
    return f"{decision.tag} {_THIRDS[3 * number // count]}"


def _kind(decision: Unit | Module, number: int, count: int) -> str:
    return decision.tag
