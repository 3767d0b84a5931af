"""The exact plan: one choice per unit, least total error, within all limits. Integer programming (HiGHS).

The hard part is numerical. Errors span nine orders of magnitude, but the solver stops at absolute differences
of 1e-6. So costs are divided by the cost of the best solution so far, choices that alone cost more are
dropped, and the problem is solved again until the scale fits. The second problem is size: a step has
thousands of time slots, of which few can be the peak. So a slot becomes a constraint only when a solution
exceeds the budget there, and this is repeated until no solution exceeds it.
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
# Bytes are passed to the solver as fractions of a limit; its constraints are accurate to about 1e-7.
_SLACK = 1e-7


@dataclass(frozen=True)
class Solution:
    """One position per unit, the total cost, and a proven lower bound on the cost of any solution."""

    chosen: tuple[int, ...]
    cost: float
    bound: float

    @property
    def gap(self) -> float:
        """Largest fraction of the cost that a better solution could save."""
        return max(0.0, (self.cost - self.bound) / self.cost) if self.cost > 0 else 0.0


@dataclass(frozen=True)
class Program:
    """A space as matrices. Columns: every choice of every unit, then every link. Rows: constraints."""

    space: Space

    def solve(
        self,
        limits: Limits,
        costs: Floats | None = None,
        *,
        gap: float = GAP,
        allowed: NDArray[np.bool_] | None = None,
    ) -> Solution | None:
        """Return the cheapest solution within `limits`, or None. Of equal costs, fewer saved bytes win.

        `costs`: one per choice, default the errors. `allowed`: mask of choices, default all.
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
        """As `solve`, but which of equally cheap solutions it returns is undefined."""
        scale, best, rows = float(costs.max(initial=0.0)) or 1.0, None, list(self._first_rows)
        for _ in range(6):
            solution = self._solve_rows(limits, costs / scale, allowed, rows, gap)
            if solution is None:
                return best
            cost = float(costs[self._columns(solution.chosen)].sum())
            bound = max(solution.bound * scale, best.bound if best else 0.0)
            if best is None or cost <= best.cost:
                best = Solution(solution.chosen, cost, min(bound, cost))
            if best.cost <= 0 or scale <= best.cost:
                break
            allowed = allowed & (costs <= best.cost * (1 + 1e-9))
            scale = best.cost / 100
        return best

    def smallest_peak(self, limits: Limits) -> Solution | None:
        """Return the solution with the lowest peak within the other limits; its cost is the peak in bytes."""
        rows = list(self._first_rows)
        free = replace(limits, peak=None)
        scale = float(self.space.live(self._plain).max())
        while True:
            result = _minimise(
                np.append(np.zeros(self._width), 1.0),
                [self._structure(1), *self._peak_rows(rows, scale), *self._other_rows(free, 1)],
                np.append(self._integral, 0),
                np.append(np.ones(self._width), np.inf),
                GAP,
            )
            if result is None:
                return None
            chosen = self._chosen(result.x)
            live = self.space.live(chosen)
            new = [row for row in _local_maxima(live, result.x[-1] * scale * (1 + _SLACK)) if row not in rows]
            if not new:
                return Solution(chosen, float(live.max()), float(result.mip_dual_bound) * scale)
            rows += new

    def smallest_saved(self) -> int:
        """Return the fewest possible saved bytes."""
        costs = np.append(self._saved, np.array([link.saved for link in self.space.links], dtype=float))
        scale = float(costs.max(initial=1.0))
        result = _minimise(costs / scale, [self._structure(0)], self._integral, np.ones(self._width), GAP)
        assert result is not None  # no limit, so every choice is feasible
        return self.space.saved(self._chosen(result.x))

    @cached_property
    def errors(self) -> Floats:
        """Gradient error of every choice of every unit, in the order of the columns."""
        return np.array([choice.error for unit in self.space.units for choice in unit.choices], dtype=float)

    def _solve_rows(
        self, limits: Limits, costs: Floats, allowed: NDArray[np.bool_], rows: list[int], gap: float
    ) -> Solution | None:
        """Solve with the slots `rows` as constraints, and add slots until none exceeds the limit."""
        cost = np.append(costs, np.zeros(len(self.space.links)))
        upper = np.append(allowed.astype(float), np.ones(len(self.space.links)))
        tighter = 0.0
        while True:
            inside = _tightened(limits, tighter)
            constraints = [self._structure(0), *self._budget_rows(rows, inside), *self._other_rows(inside, 0)]
            result = _minimise(cost, constraints, self._integral, upper, gap)
            if result is None:
                return None
            chosen = self._chosen(result.x)
            if limits.allow(self.space, chosen):
                return Solution(chosen, float(result.fun), float(result.mip_dual_bound or 0.0))
            new = self._exceeded(limits, chosen, rows)
            rows += new
            # Without new slots the limit is exceeded by the solver's tolerance.
            tighter += 0.0 if new else 10 * _SLACK

    def _exceeded(self, limits: Limits, chosen: Sequence[int], rows: list[int]) -> list[int]:
        if limits.peak is None:
            return []
        return [row for row in _local_maxima(self.space.live(chosen), limits.peak) if row not in rows]

    def _structure(self, extra: int) -> Any:
        """Constrain: one choice per unit; a link at least the exact choice of each of its units, or at least
        the sum of its other choices; all units of a cluster derive, or none.
        """
        from scipy.optimize import LinearConstraint
        from scipy.sparse import lil_array

        pairs = [(index, number) for index, link in enumerate(self.space.links) for number in link.units]
        alike = [(units[0], unit) for units in self.space.clusters for unit in units[1:]]
        count, least = len(self.space.units), np.zeros(len(pairs))
        matrix = lil_array((count + len(pairs) + len(alike), self._width + extra))
        for row, (start, unit) in enumerate(zip(self._starts, self.space.units, strict=True)):
            matrix[[row], start : start + len(unit.choices)] = 1.0
        for row, (link, number) in enumerate(pairs, count):
            matrix[row, len(self.errors) + link] = 1.0
            exact = self.space.units[number].exact
            is_exact = self.space.links[link].exact
            if exact is not None:
                matrix[row, self._starts[number] + exact] = -1.0 if is_exact else 1.0
            least[row - count] = 0.0 if is_exact else 1.0
        for row, (first, number) in enumerate(alike, count + len(pairs)):
            matrix[[row], self._derived_columns(first)] = 1.0
            matrix[[row], self._derived_columns(number)] = -1.0
        low = np.concatenate([np.ones(count), least, np.zeros(len(alike))])
        high = np.concatenate([np.ones(count), np.full(len(pairs), np.inf), np.zeros(len(alike))])
        return LinearConstraint(matrix.tocsr(), low, high)

    def _derived_columns(self, number: int) -> list[int]:
        choices = self.space.units[number].choices
        return [self._starts[number] + index for index, choice in enumerate(choices) if choice.derived]

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
        # Links need no integrality: at a minimum a link equals the largest of its binary variables.
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
        return [start + position for start, position in zip(self._starts, chosen, strict=True)]

    def _chosen(self, values: Floats) -> tuple[int, ...]:
        pairs = zip(self._starts, self.space.units, strict=True)
        return tuple(int(values[start : start + len(unit.choices)].argmax()) for start, unit in pairs)


def _minimise(cost: Floats, constraints: list[Any], integral: NDArray[Any], upper: Floats, gap: float) -> Any:
    """Return the result of HiGHS, or None if the constraints are infeasible."""
    from scipy.optimize import Bounds, milp

    with _silent():
        result = milp(
            cost,
            integrality=integral,
            bounds=Bounds(0.0, upper),
            constraints=constraints,
            options={"mip_rel_gap": gap, "node_limit": NODES, "time_limit": SECONDS},
        )
    return result if result.x is not None else None


@contextmanager
def _silent() -> Iterator[None]:
    """Silence standard output: HiGHS sometimes prints a line there in spite of its options."""
    sys.stdout.flush()
    stdout, null = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 1)
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
        os.close(null)


def _tightened(limits: Limits, fraction: float) -> Limits:
    if not fraction:
        return limits
    return Limits(
        None if limits.peak is None else int(limits.peak * (1 - fraction)),
        None if limits.saved is None else int(limits.saved * (1 - fraction)),
        None if limits.ms is None else limits.ms * (1 - fraction),
    )


def _local_maxima(live: NDArray[np.int64], limit: float) -> list[int]:
    """Return the slots above `limit` that no neighbour exceeds; of equal neighbours the first."""
    padded = np.concatenate([[-1], live, [-1]])
    peaks = (padded[1:-1] > padded[:-2]) & (padded[1:-1] >= padded[2:]) & (live > limit)
    return [int(row) for row in np.flatnonzero(peaks)]
