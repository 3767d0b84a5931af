"""Polishing of a solution: fewer saved bytes at the same cost.

The hard part: the solver stops within 1e-6 of the best cost, and has no preference among plans of equal
cost. So it may compress a layer of almost no error whose exact tensor is alive anyway, and the packed copy
only adds bytes; or take 2 bits where 8 are as fast.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mesa_tune.search.problem import NONE, Choice, Floats, Limits, Space


def polished(
    space: Space,
    limits: Limits,
    chosen: Sequence[int],
    costs: Floats,
    allowed: NDArray[np.bool_],
) -> tuple[int, ...]:
    """Replace the choices of single units in `chosen` by better ones that cost no more.

    Better are fewer saved bytes, then lower costs. The result is within `limits`. `costs` and `allowed` have
    one element per choice.
    """
    ends = np.cumsum([len(unit.choices) for unit in space.units])
    best = tuple(chosen)
    for number, end in enumerate(ends):
        columns = slice(end - len(space.units[number].choices), end)
        if best[number] != NONE:
            # One unit at a time: what a unit saves depends on the units before it.
            best = _best(space, limits, best, number, costs[columns], allowed[columns])
    return best


def _best(
    space: Space,
    limits: Limits,
    chosen: tuple[int, ...],
    number: int,
    costs: Floats,
    allowed: NDArray[np.bool_],
) -> tuple[int, ...]:
    """Return `chosen` with the best choice of unit `number` that costs no more."""
    choices, now = space.units[number].choices, chosen[number]
    rivals = [
        position
        for position, choice in enumerate(choices)
        if position != now
        and allowed[position]
        and costs[position] <= costs[now]
        and _may_replace(choice, choices[now])
    ]
    best, least = chosen, (space.saved(chosen), costs[now]) if rivals else (0, 0.0)
    for position in rivals:
        candidate = (*chosen[:number], position, *chosen[number + 1 :])
        value = (space.saved(candidate), costs[position])
        if value < least and limits.allow(space, candidate):
            best, least = candidate, value
    return best


def _may_replace(choice: Choice, now: Choice) -> bool:
    # Only the solver may change whether a cluster derives, as that concerns several units.
    if choice.derived != now.derived or choice.root > now.root:
        return False
    # The saved bytes of links are not in `choice.saved`, so this drops no choice that saves bytes.
    return choice.saved <= now.saved
