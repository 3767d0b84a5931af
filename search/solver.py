"""The exact plan: one choice a unit, least total error, every limit kept; a mixed-integer program (HiGHS).

What is hard is numbers. Errors span nine orders of magnitude while a solver stops at absolute differences
of 1e-6: so costs are scaled to the best solution known, choices that alone cost more than that are dropped,
and the problem is solved again until the scale fits. And a step has thousands of moments, of which few can
be the peak: so a moment becomes a constraint when a solution exceeds the budget there, until none does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mesa_tune.search.polish import polished
from mesa_tune.search.space import Floats, Limits, Space

GAP = 1e-6
NODES = 200_000
SECONDS = 60.0
# Bytes go to the solver as fractions of a limit; it keeps constraints only to about 1e-7 of that.
_SLACK = 1e-7


@dataclass(frozen=True)
class Solution:
    """One position a unit, its total cost, and a proven lower bound on the cost of any."""

    chosen: tuple[int, ...]
    cost: float
    bound: float

    @property
    def gap(self) -> float:
        """How much of the cost a better solution could save at most, as a fraction."""
        return max(0.0, (self.cost - self.bound) / self.cost) if self.cost > 0 else 0.0


@dataclass(frozen=True)
class Program:
    """A space as matrices: a column for each choice of each unit, then one for each link."""

    space: Space

    def solve(
        self,
        limits: Limits,
        costs: Floats | None = None,
        *,
        gap: float = GAP,
        allowed: NDArray[np.bool_] | None = None,
    ) -> Solution | None:
        """The cheapest choice within `limits`; None if there is none. `costs` (a choice) default to errors.

        Of equally cheap ones that with fewer saved bytes. `allowed`: the choices that may be taken, all by
        default.
        """
        costs = self.errors if costs is None else costs
        allowed = np.ones(len(costs), dtype=bool) if allowed is None else allowed
        best = self._cheapest(limits, costs, allowed, gap)
        if best is None:
            return None
        chosen = polished(self.space, limits, best.chosen, costs, allowed)
        cost = float(costs[self._columns(chosen)].sum())
        return Solution(chosen, cost, min(best.bound, cost))

    def _cheapest(
        self, limits: Limits, costs: Floats, allowed: NDArray[np.bool_], gap: float
    ) -> Solution | None:
        """As `solve`; which one of equally cheap choices is left to the solver."""
        scale, best, rows = float(costs.max(initial=0.0)) or 1.0, None, list(self._first_rows)
        for _ in range(6):
            found = self._solve_rows(limits, costs / scale, allowed, rows, gap)
            if found is None:
                return best
            cost = float(costs[self._columns(found.chosen)].sum())
            bound = max(found.bound * scale, best.bound if best else 0.0)
            if best is None or cost <= best.cost:
                best = Solution(found.chosen, cost, min(bound, cost))
            if best.cost <= 0 or scale <= best.cost:
                break
            allowed = allowed & (costs <= best.cost * (1 + 1e-9))
            scale = best.cost / 100
        return best

    def smallest_peak(self, limits: Limits) -> Solution | None:
        """The choice with the lowest peak within the other limits; its cost is the peak in bytes."""
        rows = list(self._first_rows)
        free = replace(limits, peak=None)
        scale = float(self.space.live(self._plain).max())
        while True:
            found = _minimise(
                np.append(np.zeros(self._width), 1.0),
                [self._structure(1), *self._peak_rows(rows, scale), *self._other_rows(free, 1)],
                np.append(self._integral, 0),
                np.append(np.ones(self._width), np.inf),
                GAP,
            )
            if found is None:
                return None
            chosen = self._chosen(found.x)
            live = self.space.live(chosen)
            new = [row for row in _local_maxima(live, found.x[-1] * scale * (1 + _SLACK)) if row not in rows]
            if not new:
                return Solution(chosen, float(live.max()), float(found.mip_dual_bound) * scale)
            rows += new

    def smallest_saved(self) -> int:
        """The fewest bytes that can be kept between forward and backward."""
        costs = np.append(self._saved, np.array([link.saved for link in self.space.links], dtype=float))
        scale = float(costs.max(initial=1.0))
        found = _minimise(costs / scale, [self._structure(0)], self._integral, np.ones(self._width), GAP)
        assert found is not None  # no limit, so every choice is feasible
        return self.space.saved(self._chosen(found.x))

    @cached_property
    def errors(self) -> Floats:
        """The gradient error of every choice of every unit, in the order of the columns."""
        return np.array([choice.error for unit in self.space.units for choice in unit.choices], dtype=float)

    def _solve_rows(
        self, limits: Limits, costs: Floats, allowed: NDArray[np.bool_], rows: list[int], gap: float
    ) -> Solution | None:
        """Solve with the moments `rows` as constraints, and more until no other exceeds the limit."""
        cost = np.append(costs, np.zeros(len(self.space.links)))
        upper = np.append(allowed.astype(float), np.ones(len(self.space.links)))
        tighter = 0.0
        while True:
            inside = _tightened(limits, tighter)
            constraints = [self._structure(0), *self._budget_rows(rows, inside), *self._other_rows(inside, 0)]
            found = _minimise(cost, constraints, self._integral, upper, gap)
            if found is None:
                return None
            chosen = self._chosen(found.x)
            if limits.kept(self.space, chosen):
                return Solution(chosen, float(found.fun), float(found.mip_dual_bound or 0.0))
            new = self._exceeded(limits, chosen, rows)
            rows += new
            # All moments are constraints and the limit is still exceeded: by the solver's tolerance.
            tighter += 0.0 if new else 10 * _SLACK

    def _exceeded(self, limits: Limits, chosen: Sequence[int], rows: list[int]) -> list[int]:
        if limits.peak is None:
            return []
        return [row for row in _local_maxima(self.space.live(chosen), limits.peak) if row not in rows]

    def _structure(self, extra: int) -> Any:
        """One choice a unit; a link at least as large as each of its units' exact choice; a cluster derives
        as a whole.
        """
        from scipy.optimize import LinearConstraint
        from scipy.sparse import lil_array

        pairs = [(number, unit) for number, link in enumerate(self.space.links) for unit in link.units]
        alike = [(units[0], other) for units in self.space.clusters for other in units[1:]]
        count = len(self.space.units)
        matrix = lil_array((count + len(pairs) + len(alike), self._width + extra))
        for row, (start, unit) in enumerate(zip(self._starts, self.space.units, strict=True)):
            matrix[[row], start : start + len(unit.choices)] = 1.0
        for row, (number, place) in enumerate(pairs, count):
            matrix[row, len(self.errors) + number] = 1.0
            exact = self.space.units[place].exact
            if exact is not None:
                matrix[row, self._starts[place] + exact] = -1.0
        for row, (one, other) in enumerate(alike, count + len(pairs)):
            matrix[[row], self._derived_columns(one)] = 1.0
            matrix[[row], self._derived_columns(other)] = -1.0
        low = np.append(np.ones(count), np.zeros(len(pairs) + len(alike)))
        high = np.concatenate([np.ones(count), np.full(len(pairs), np.inf), np.zeros(len(alike))])
        return LinearConstraint(matrix.tocsr(), low, high)

    def _derived_columns(self, number: int) -> list[int]:
        choices = self.space.units[number].choices
        return [self._starts[number] + place for place, choice in enumerate(choices) if choice.derived]

    def _budget_rows(self, rows: Sequence[int], limits: Limits) -> list[Any]:
        from scipy.optimize import LinearConstraint

        if limits.peak is None:
            return []
        scale = float(limits.peak)
        return [
            LinearConstraint(self._live[rows] / scale, -np.inf, (limits.peak - self.space.base[rows]) / scale)
        ]

    def _peak_rows(self, rows: Sequence[int], scale: float) -> list[Any]:
        from scipy.optimize import LinearConstraint

        matrix = np.hstack([self._live[rows] / scale, -np.ones((len(rows), 1))])
        return [LinearConstraint(matrix, -np.inf, -self.space.base[rows] / scale)]

    def _other_rows(self, limits: Limits, extra: int) -> list[Any]:
        from scipy.optimize import LinearConstraint

        links = [link.saved for link in self.space.links]
        rows = []
        if limits.saved is not None:
            scale = float(max(limits.saved, 1))
            row = np.concatenate([self._saved, links, np.zeros(extra)]) / scale
            rows.append(
                LinearConstraint(row[None, :], -np.inf, (limits.saved - self.space.base_saved) / scale)
            )
        if limits.ms is not None:
            ms = [choice.ms for unit in self.space.units for choice in unit.choices]
            row = np.concatenate([ms, np.zeros(len(links) + extra)]) / limits.ms
            rows.append(LinearConstraint(row[None, :], -np.inf, (limits.ms - self.space.base_ms) / limits.ms))
        return rows

    @cached_property
    def _starts(self) -> list[int]:
        return list(accumulate((len(unit.choices) for unit in self.space.units), initial=0))[:-1]

    @cached_property
    def _width(self) -> int:
        return len(self.errors) + len(self.space.links)

    @cached_property
    def _integral(self) -> NDArray[np.int64]:
        # A link is at least the largest of binaries and never wanted larger: whole by itself.
        return np.append(
            np.ones(len(self.errors), dtype=np.int64), np.zeros(len(self.space.links), dtype=np.int64)
        )

    @cached_property
    def _live(self) -> Floats:
        columns = [choice.live for unit in self.space.units for choice in unit.choices]
        columns += [link.live for link in self.space.links]
        return np.array(columns, dtype=float).T.reshape(len(self.space.base), -1)

    @cached_property
    def _saved(self) -> Floats:
        return np.array([choice.saved for unit in self.space.units for choice in unit.choices], dtype=float)

    @cached_property
    def _plain(self) -> tuple[int, ...]:
        return tuple(unit.exact or 0 for unit in self.space.units)

    @cached_property
    def _first_rows(self) -> tuple[int, ...]:
        return (int(self.space.live(self._plain).argmax()),)

    def _columns(self, chosen: Sequence[int]) -> list[int]:
        return [start + place for start, place in zip(self._starts, chosen, strict=True)]

    def _chosen(self, values: Floats) -> tuple[int, ...]:
        pairs = zip(self._starts, self.space.units, strict=True)
        return tuple(int(values[start : start + len(unit.choices)].argmax()) for start, unit in pairs)


def _minimise(cost: Floats, constraints: list[Any], integral: NDArray[Any], upper: Floats, gap: float) -> Any:
    """HiGHS's result, or None if the constraints contradict each other."""
    from scipy.optimize import Bounds, milp

    with _silent():
        found = milp(
            cost,
            integrality=integral,
            bounds=Bounds(0.0, upper),
            constraints=constraints,
            options={"mip_rel_gap": gap, "node_limit": NODES, "time_limit": SECONDS},
        )
    return found if found.x is not None else None


@contextmanager
def _silent() -> Iterator[None]:
    """Nothing reaches standard output: HiGHS prints a line there now and then, whatever its options say."""
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def _tightened(limits: Limits, part: float) -> Limits:
    if not part:
        return limits
    return Limits(
        None if limits.peak is None else int(limits.peak * (1 - part)),
        None if limits.saved is None else int(limits.saved * (1 - part)),
        None if limits.ms is None else limits.ms * (1 - part),
    )


def _local_maxima(live: NDArray[np.int64], limit: float) -> list[int]:
    """The moments above `limit` that no neighbour exceeds; of a plateau the first."""
    padded = np.concatenate([[-1], live, [-1]])
    peaks = (padded[1:-1] > padded[:-2]) & (padded[1:-1] >= padded[2:]) & (live > limit)
    return [int(place) for place in np.flatnonzero(peaks)]
