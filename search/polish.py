"""Which of equally good plans: the one that keeps the fewest bytes.

A solver stops within a part in a million of the best, and knows no difference between plans that err
equally. So it leaves layers that hardly err compressed although what they keep is alive anyway: the copy
then comes on top of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mesa_tune.search.space import Floats, Limits, Space


def polished(
    space: Space, limits: Limits, chosen: Sequence[int], costs: Floats, allowed: NDArray[np.bool_]
) -> tuple[int, ...]:
    """`chosen` with other choices for single units wherever that saves bytes and costs no more.

    Where bytes are equal, the cheaper choice. `limits` stay kept; `costs` and `allowed` are a choice each.
    """
    ends = np.cumsum([len(unit.choices) for unit in space.units])
    found = tuple(chosen)
    for number, end in enumerate(ends):
        here = slice(end - len(space.units[number].choices), end)
        # One unit after another: what the first frees tells what the next one saves.
        found = _best(space, limits, found, number, costs[here], allowed[here])
    return found


def _best(
    space: Space,
    limits: Limits,
    chosen: tuple[int, ...],
    number: int,
    costs: Floats,
    allowed: NDArray[np.bool_],
) -> tuple[int, ...]:
    """`chosen`, with the choice for one unit that keeps the fewest bytes, of those that cost no more."""
    choices, now = space.units[number].choices, chosen[number]
    # A cluster derives as a whole, or not at all: other choices of that are for the solver.
    # A link is not in `saved`, so this only leaves out what cannot save anything.
    rivals = [
        place
        for place, choice in enumerate(choices)
        if place != now
        and choice.derived == choices[now].derived
        and allowed[place]
        and costs[place] <= costs[now]
        and choice.saved <= choices[now].saved
    ]
    best, least = chosen, (space.saved(chosen), costs[now]) if rivals else (0, 0.0)
    for place in rivals:
        tried = (*chosen[:number], place, *chosen[number + 1 :])
        kept = (space.saved(tried), costs[place])
        if kept < least and limits.kept(space, tried):
            best, least = tried, kept
    return best
