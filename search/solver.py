"""The exact plan: one choice per unit, least cost, within all limits. Integer programming (HiGHS).

The hard part is numerical. Errors span nine orders of magnitude, but the solver stops at absolute differences
of 1e-6. So costs are divided by the cost of the best solution so far, choices that alone cost more are
dropped, and the problem is solved again until the scale fits. The second problem is size: a step has
thousands of time slots, of which few can be the peak. So a slot becomes a constraint only when a solution
exceeds the budget there, at first a solution in fractions, which is found much faster. The third is that the
noise ratio is not linear: see `Rows.interaction`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from mesa_tune.errors import RunError
from mesa_tune.search.linear.highs import Answer, Deadline, Row, TimeUpError, minimise
from mesa_tune.search.linear.polish import polished
from mesa_tune.search.linear.rows import Rows, exceeds, new_rows
from mesa_tune.search.problem import Floats, Limits, Space

GAP, LARGE_GAP = 1e-6, 1e-4
"""The gap at which the solver stops; the second for more than `_LARGE` choices."""
_LARGE = 500
UNFELT = 0.001
"""Nobody feels this share of a step's time."""
_ACCURACY = 1e-6
"""Differences of costs that the solver does not see."""
# Bytes are passed to the solver as fractions of a limit; its constraints are accurate to about 1e-7.
_SLACK = 1e-7
_MANY = 1500
"""Columns of a step that is first solved in part."""


@dataclass(frozen=True)
class Solution:
    """One position per decision, the total cost, and a proven lower bound on the cost of any solution."""

    chosen: tuple[int, ...]
    cost: float
    bound: float

    @property
    def gap(self) -> float:
        """Largest fraction of the cost that a better solution could save."""
        return max(0.0, (self.cost - self.bound) / self.cost) if self.cost > 0 else 0.0


@dataclass(frozen=True)
class Program:
    """A space with its solver."""

    space: Space

    @cached_property
    def rows(self) -> Rows:
        return Rows(self.space)

    @property
    def noise(self) -> Floats:
        """The noise ratio of each choice."""
        return self.rows.noise

    @cached_property
    def times(self) -> Floats:
        """The milliseconds of each choice."""
        return self.rows.of_choices(attrgetter("ms"))

    def solve(
        self,
        limits: Limits,
        costs: Floats | None = None,
        *,
        price: float = 1.0,
        gap: float | None = None,
        tolerance: float = 0.0,
        allowed: NDArray[np.bool_] | None = None,
        deadline: Deadline | None = None,
    ) -> Solution | None:
        """Return the cheapest solution within `limits`, or None. Of equal costs, fewer saved bytes win.

        A solution costs the sum of `costs`, one per choice (default: nothing), and `price` times its noise
        ratio. The solver stops at a relative `gap`; of a large problem also at a difference of `tolerance`.
        `allowed`: mask of choices, default all. `deadline`: default in a minute. If the time is up, return
        the best solution so far with its proven bound; raise TimeUpError if there is none.
        """
        costs = price * self.noise + (0.0 if costs is None else costs)
        allowed = np.ones(len(costs), dtype=bool) if allowed is None else allowed
        relaxed = _Relaxed(self.rows, limits, self._gap(gap), deadline or Deadline())
        tolerance = tolerance if len(self.rows.choices) > _LARGE else 0.0
        best = self._cheapest(relaxed, costs, price, tolerance, allowed)
        if best is None:
            return None
        chosen = polished(self.space, limits, best.chosen, costs, allowed)
        cost = self._cost(chosen, costs, price)
        return Solution(chosen, cost, min(best.bound, cost))

    def least(self, limits: Limits, costs: Floats, deadline: Deadline) -> float | None:
        """Return a lower bound on the sum of `costs` of any solution; None if there is none."""
        relaxed = _Relaxed(self.rows, limits, GAP, deadline)
        return relaxed.bound_of(costs)

    def _cost(self, chosen: tuple[int, ...], costs: Floats, price: float) -> float:
        return float(costs[self.rows.columns(chosen)].sum()) + price * self.space.interaction(chosen)

    def _cheapest(
        self,
        relaxed: _Relaxed,
        costs: Floats,
        price: float,
        tolerance: float,
        allowed: NDArray[np.bool_],
    ) -> Solution | None:
        """As `solve`, but which of equally cheap solutions it returns is undefined."""
        scale, best = float(costs[allowed].max(initial=0.0)) or 1.0, None
        for _ in range(6):
            try:
                solution = relaxed.solve(costs / scale, price / scale, allowed, tolerance / scale)
            except TimeUpError:
                if best is None:
                    raise
                break
            if solution is None:
                break
            cost = self._cost(solution.chosen, costs, price)
            bound = max(solution.bound * scale, best.bound if best else 0.0)
            if best is None or cost <= best.cost:
                best = Solution(solution.chosen, cost, bound)
            best = replace(best, bound=min(bound, best.cost))
            if best.cost <= 0 or scale * _ACCURACY <= max(best.cost * relaxed.gap, tolerance):
                break
            allowed = allowed & (costs <= best.cost * (1 + 1e-9))
            scale = best.cost / 100
        return best

    def _gap(self, gap: float | None) -> float:
        if gap is not None:
            return gap
        return GAP if len(self.rows.choices) <= _LARGE else LARGE_GAP

    def smallest_peak(
        self, limits: Limits, *, gap: float | None = None, deadline: Deadline | None = None
    ) -> Solution | None:
        """Return the solution with the lowest peak within the other limits; its cost is the peak in bytes.

        Time that is up: as in `solve`.
        """
        within = replace(limits, peak=None)
        relaxed = _LowestPeak(self.rows, within, self._gap(gap), deadline or Deadline())
        nothing = np.zeros(len(self.rows.choices))
        solution = relaxed.solve(nothing, 0.0, np.ones(len(nothing), dtype=bool))
        if solution is None:
            return None
        peak = float(self.space.live(solution.chosen).max())
        return Solution(solution.chosen, peak, min(peak, solution.bound * relaxed.scale))

    def smallest_saved(self, *, deadline: Deadline | None = None) -> int:
        """Return the fewest possible saved bytes. Raise TimeUpError if the time is up first."""
        saved = np.array([*(float(part.saved) for part in self.rows.parts), 0.0])
        relaxed = _Relaxed(self.rows, Limits(), GAP, deadline or Deadline())
        answer = relaxed.minimise(saved / max(1.0, saved.max(initial=0.0)), np.ones(len(saved)), GAP)
        if answer.values is None:
            raise RunError("the units of this profile have no choices that go together\nprofile it again")
        return self.space.saved(self.rows.chosen(answer.values))


@dataclass
class _Relaxed:
    """The problem with some of its rows: of the slots only `slots`, of the interaction only `tangents`.

    What it costs at least, the whole problem costs at least. `inside`: the limits, or slightly tighter ones,
    where the solver's accuracy demands it. Then it proves nothing about the whole problem. `priced`: whether
    the noise ratio has a cost or a limit, so that the interaction matters.
    """

    rows: Rows
    limits: Limits
    gap: float
    deadline: Deadline
    slots: list[int] = field(default_factory=list)
    tangents: list[Row] = field(default_factory=list)
    worst: list[Row] = field(default_factory=list)
    priced: bool = False

    def __post_init__(self) -> None:
        self._loosen()
        self.bound = -np.inf
        self.slots.append(int(self.rows.plain_live.argmax()))

    def _loosen(self) -> None:
        """Drop what may exclude solutions of the whole problem."""
        self.inside, self.tighter, self.is_proving = self.limits, 0.0, True

    def bound_of(self, costs: Floats) -> float | None:
        """Return a lower bound on the cost of any solution, in fractions; None if there is none."""
        costs, upper = self._columns(costs, 0.0, np.ones(len(costs), dtype=bool))
        return None if (answer := self._in_fractions(costs, upper)).values is None else answer.bound

    def _columns(self, costs: Floats, price: float, allowed: NDArray[np.bool_]) -> tuple[Floats, Floats]:
        """Return the cost of every column, and its largest value."""
        self.priced = price > 0 or self.limits.noise is not None
        links = len(self.rows.space.links)
        upper = np.concatenate([allowed.astype(np.float64), np.ones(links + 1)])
        upper[self.rows.interaction] = np.inf if self.priced else 0.0
        return np.concatenate([costs, np.zeros(links), [price]]), upper

    def solve(
        self, costs: Floats, price: float, allowed: NDArray[np.bool_], tolerance: float = 0.0
    ) -> Solution | None:
        """Return the cheapest solution within the limits, or None.

        `costs`: one per choice. `price`: of the interaction. `tolerance`: a difference of costs at which to
        stop, as at the gap.
        """
        costs, upper = self._columns(costs, price, allowed)
        self.bound = -np.inf
        self._loosen()
        fractions = self._in_fractions(costs, upper)
        if fractions.values is None:
            return None
        self.bound = fractions.bound
        gap = max(self.gap, tolerance / self.bound if self.bound > 0 else 0.0)
        best: Solution | None = None
        # Many first only for the few units that are undecided in fractions: it takes a fraction of the time,
        # adds the rows that matter, and is the solution if the time is up.
        undecided = [self._undecided(fractions.values, upper)] if len(costs) > _MANY else []
        whole = upper[: len(self.rows.choices)].sum()
        few = [
            (columns, False) for columns in undecided if columns[: len(self.rows.choices)].sum() < whole / 2
        ]
        for columns, proving in (*few, (upper, True)):
            self._loosen()
            try:
                found = self._whole(costs, columns, gap, proving)
            except TimeUpError:
                if best is None and proving:
                    raise
                continue
            if found is not None and (best is None or found.cost <= best.cost):
                best = found
            if best is not None and best.cost - self.bound <= gap * best.cost:
                break
        return None if best is None else replace(best, bound=max(0.0, self.bound))

    def _undecided(self, values: Floats, upper: Floats) -> Floats:
        """Return `upper` with 0 for the other choices of decisions that are whole in `values`."""
        columns = upper.copy()
        for start, decision in zip(self.rows.starts, self.rows.space.decisions, strict=True):
            part = slice(start, start + len(decision.choices))
            whole = values[part].round()
            if np.abs(values[part] - whole).max(initial=0.0) < 1e-6:
                columns[part] = np.minimum(whole, upper[part])
        return columns

    def _whole(self, costs: Floats, upper: Floats, gap: float, proving: bool) -> Solution | None:
        """Add rows until the solution is one of the whole problem; None if there is none.

        `proving`: `upper` allows all columns, so the bound is one of the problem.
        """
        while True:
            answer = self.minimise(costs, upper, gap)
            if answer.values is None:
                return None
            if proving and self.is_proving:
                self.bound = max(self.bound, answer.bound)
            chosen = self.rows.chosen(answer.values)
            grown = self.grow(self._rounded(chosen, answer.values))
            if self.accepts(chosen, answer) and not grown:
                return Solution(chosen, self.cost(costs, answer.values), self.bound)
            if not grown:
                self._tighten()

    def cost(self, costs: Floats, values: Floats) -> float:
        """Return the cost of an answer."""
        return float(costs @ values)

    def _in_fractions(self, costs: Floats, upper: Floats) -> Answer:
        """Add rows until the solution in fractions exceeds none, and return it."""
        while True:
            answer = self.minimise(costs, upper)
            if answer.values is None or not self.grow(answer.values):
                return answer

    def minimise(self, costs: Floats, upper: Floats, gap: float | None = None) -> Answer:
        """Minimise under the present rows; without `gap` choices may be fractions."""
        rows = self.present_rows()
        integral = None if gap is None else np.append(self.rows.integral, 0)
        return minimise(costs, rows, upper, self.deadline, integral=integral, gap=gap or 0.0)

    def present_rows(self) -> list[Row]:
        """Return the rows of the problem so far."""
        others = [*self.rows.others(self.inside), *self.tangents, *self.worst]
        return [*self.rows.structure, *self.slot_rows(), *others]

    def slot_rows(self) -> list[Row]:
        """Return the rows of `slots`."""
        peak = self.inside.peak
        return [] if peak is None else [self.rows.below(slot, peak) for slot in self.slots]

    def accepts(self, chosen: tuple[int, ...], answer: Answer) -> bool:
        """Return True if a solution of the present rows is one of the whole problem."""
        return self.limits.allow(self.rows.space, chosen)

    def grow(self, values: Floats) -> bool:
        """Add rows that `values`, of all columns, exceed; return False if there are no new ones.

        The solver meets a row only up to its accuracy, so one that is there may seem to be exceeded.
        """
        slots = self.exceeded(values)
        self.slots += slots
        tangents, worst = list[Row](), list[Row]()
        if self.priced and exceeds(tangent := self.rows.interacting(values), values):
            tangents = new_rows([tangent], self.tangents)
        if self.limits.worst is not None:
            worst = new_rows(self.rows.worst(values, self.limits.worst), self.worst)
        self.tangents += tangents
        self.worst += worst
        return bool(slots or tangents or worst)

    def exceeded(self, values: Floats) -> list[int]:
        """Return the slots, not among `slots`, that have more bytes than the limit on the peak."""
        if self.limits.peak is None:
            return []
        return self.above(values, self.limits.peak)

    def above(self, values: Floats, peak: float) -> list[int]:
        """Return the local maxima above `peak` that are not among `slots`."""
        known = set(self.slots)
        live = self.rows.live(values)
        return [slot for slot in _local_maxima(live, peak * (1 + 1e-9)) if slot not in known]

    def _rounded(self, chosen: tuple[int, ...], values: Floats) -> Floats:
        """Return the columns of whole choices; those after the links as in `values`."""
        values, space = values.copy(), self.rows.space
        values[: len(self.rows.choices)] = 0.0
        values[self.rows.columns(chosen)] = 1.0
        saved = {id(link) for link in space.saved_links(chosen)}
        values[len(self.rows.choices) : len(self.rows.parts)] = [id(link) in saved for link in space.links]
        return values

    def _tighten(self) -> None:
        """Exclude a solution within all rows that exceeds a limit: by the solver's accuracy."""
        self.tighter += 10 * _SLACK
        self.is_proving = False
        self.inside = self.limits.tighter(self.tighter)


@dataclass
class _LowestPeak(_Relaxed):
    """The peak as the cost: one more column, which is at least the bytes of every slot over `scale`."""

    @cached_property
    def scale(self) -> float:
        return float(self.rows.plain_live.max())

    def cost(self, costs: Floats, values: Floats) -> float:
        return float(values[-1])

    def minimise(self, costs: Floats, upper: Floats, gap: float | None = None) -> Answer:
        rows = self.present_rows()
        return minimise(
            np.append(np.zeros(len(costs)), 1.0),
            rows,
            np.append(upper, np.inf),
            self.deadline,
            integral=None if gap is None else np.append(self.rows.integral, [0, 0]),
            gap=gap or 0.0,
        )

    def slot_rows(self) -> list[Row]:
        return [self._row(slot) for slot in self.slots]

    def _row(self, slot: int) -> Row:
        columns, values = self.rows.slot(slot, self.scale)
        columns, values = np.append(columns, len(self.rows.parts) + 1), np.append(values, -1.0)
        return Row(columns, values, -np.inf, -self.rows.base[slot] / self.scale)

    def accepts(self, chosen: tuple[int, ...], answer: Answer) -> bool:
        assert answer.values is not None
        peak = answer.values[-1] * self.scale * (1 + _SLACK)
        space = self.rows.space
        known = set(self.slots)
        higher = [slot for slot in _local_maxima(space.live(chosen), peak) if slot not in known]
        return not higher and self.limits.allow(space, chosen)

    def exceeded(self, values: Floats) -> list[int]:
        return self.above(values, values[-1] * self.scale * (1 + _SLACK))


def _local_maxima(live: Floats | NDArray[np.int64], limit: float) -> list[int]:
    """Return the slots above `limit` that no neighbour exceeds; of equal neighbours the first."""
    padded = np.concatenate([[-1], live, [-1]])
    peaks = (padded[1:-1] > padded[:-2]) & (padded[1:-1] >= padded[2:]) & (live > limit)
    return [int(row) for row in np.flatnonzero(peaks)]
