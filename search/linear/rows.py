"""A space as rows of a linear program.

Columns: every choice of every unit and of every module, every link, and the interaction of their noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from mesa_tune.search.linear.highs import Row
from mesa_tune.search.problem import NONE, Choice, Floats, Limits, Link, Space

Part = Choice | Link

_ACCURACY = 1e-7
"""Of the solver, in its rows."""


@dataclass(frozen=True)
class Rows:
    """The columns of `space`, and the rows that constrain them.

    A space without links has no columns for them. Slots of the timeline become rows only when asked for.
    """

    space: Space

    @cached_property
    def choices(self) -> list[Choice]:
        """The choices in the order of the columns."""
        return [choice for decision in self.space.decisions for choice in decision.choices]

    @cached_property
    def parts(self) -> list[Part]:
        """The choices, then the links: whatever a column stands for."""
        return [*self.choices, *self.space.links]

    @cached_property
    def starts(self) -> list[int]:
        """The first column of each decision."""
        sizes = (len(decision.choices) for decision in self.space.decisions)
        return list(accumulate(sizes, initial=0))[:-1]

    @cached_property
    def integral(self) -> NDArray[np.int64]:
        """1 for choices. Links need no integrality: a link can be the largest of its binary variables."""
        return np.repeat(np.array([1, 0]), [len(self.choices), len(self.space.links)])

    @cached_property
    def base(self) -> Floats:
        return self.space.base.astype(np.float64)

    @cached_property
    def plain_live(self) -> NDArray[np.int64]:
        """The bytes alive in each slot if every unit is exact; of one that cannot be, the first choice."""
        chosen = [unit.exact or 0 for unit in self.space.units]
        return self.space.live([*chosen, *[NONE] * len(self.space.modules)])

    def of_choices(self, value: Callable[[Choice], float]) -> Floats:
        """Return the value of each choice."""
        return np.array([value(choice) for choice in self.choices], dtype=np.float64)

    def columns(self, chosen: Sequence[int]) -> list[int]:
        """Return the columns of the chosen choices."""
        pairs = zip(self.starts, chosen, strict=True)
        return [start + position for start, position in pairs if position != NONE]

    def chosen(self, values: Floats) -> tuple[int, ...]:
        """Return the positions whose columns are 1 in `values`."""
        return tuple(
            _largest(values[start : start + len(decision.choices)])
            for start, decision in zip(self.starts, self.space.decisions, strict=True)
        )

    def live(self, values: Floats) -> Floats:
        """Return the bytes alive in each slot where columns may be fractions."""
        total = self.base.copy()
        for column in np.flatnonzero(values[: len(self.parts)] > 1e-9):
            total += values[column] * self.parts[column].live
        return total

    @cached_property
    def structure(self) -> list[Row]:
        """The rows of every problem: one choice per unit and the modules around it; links; clusters."""
        return [*map(self._one, range(len(self.space.units))), *self._links(), *self._clusters()]

    def _one(self, unit: int) -> Row:
        decisions = [unit, *(len(self.space.units) + module for module in self.space.around[unit])]
        columns = [column for decision in decisions for column in self._columns_of(decision)]
        return _row(columns, np.ones(len(columns)), 1.0, 1.0)

    def _links(self) -> Iterator[Row]:
        """Yield rows that make a link at least what each of its units and modules asks for."""
        for number, link in enumerate(self.space.links):
            column = len(self.choices) + number
            for needing in filter(None, self._needing(number, link)):
                yield _row([column, *needing], [1.0, *[-1.0] * len(needing)], 0.0, np.inf)

    def _needing(self, number: int, link: Link) -> Iterator[list[int]]:
        """Yield columns that need the link, at most one of which is chosen."""
        for unit in link.units:
            yield self._where(unit, lambda choice: choice.settings.exact == link.exact)
        for module in range(len(self.space.modules)):
            yield self._where(len(self.space.units) + module, lambda choice: number in choice.links)

    def _clusters(self) -> Iterator[Row]:
        for first, *others in self.space.clusters:
            start = self._where(first, lambda choice: choice.derived)
            for unit in others:
                columns = self._where(unit, lambda choice: choice.derived)
                values = [1.0] * len(start) + [-1.0] * len(columns)
                yield _row([*start, *columns], values, 0.0, 0.0)

    def _columns_of(self, decision: int) -> range:
        start = self.starts[decision]
        return range(start, start + len(self.space.decisions[decision].choices))

    def _where(self, decision: int, condition: Callable[[Choice], bool]) -> list[int]:
        return [column for column in self._columns_of(decision) if condition(self.choices[column])]

    def slot(self, slot: int, scale: float) -> tuple[NDArray[np.int64], Floats]:
        """Return columns and values of the bytes alive in a slot, over `scale`, without the base."""
        return _sparse(np.array([part.live[slot] for part in self.parts], dtype=np.float64) / scale)

    def below(self, slot: int, peak: int) -> Row:
        """Return the row that limits the bytes alive in a slot to `peak`."""
        columns, values = self.slot(slot, float(peak))
        return Row(columns, values, -np.inf, (peak - self.base[slot]) / peak)

    def others(self, limits: Limits) -> Iterator[Row]:
        """Yield the rows of all limits but the peak; that of the noise ratio without interaction."""
        space = self.space
        if limits.saved is not None:
            saved = [float(part.saved) for part in self.parts]
            yield _limit(saved, limits.saved - space.base_saved, max(limits.saved, 1))
        if limits.ms is not None:
            yield _limit(self.of_choices(lambda choice: choice.ms), limits.ms - space.base_ms, limits.ms)
        if limits.bias is not None:
            yield _limit(self.of_choices(lambda choice: choice.bias), limits.bias, limits.bias)
        if limits.noise is not None:
            # If already the floor of the ratio exceeds the limit, only choices without an error are left.
            noise = limits.noise if space.floor <= limits.noise else 0.0
            interacting = np.append(self.noise, np.zeros(len(space.links) + 1))
            interacting[self.interaction] = 1.0
            yield _limit(interacting, noise, limits.noise)

    @property
    def interaction(self) -> int:
        """The column of the interaction, after all others: what is added to the sum of noise ratios."""
        return len(self.parts)

    @cached_property
    def noise(self) -> Floats:
        """The noise ratio of each choice by itself."""
        return self.of_choices(attrgetter("noise"))

    def interacting(self, values: Floats) -> Row:
        """Return a row that the interaction of all choices meets, and exactly so that of `values`.

        The interaction is I = S² − W, of the sums S of roots and W of weights. A tangent is below the square:
        S² ≥ 2 S₀ S − S₀², with S₀ at `values`.
        """
        roots, weights = self._roots_and_weights
        present = float(roots @ values[: len(self.choices)])
        columns, row = _sparse(2 * present * roots - weights)
        return Row(np.append(columns, self.interaction), np.append(row, -1.0), -np.inf, present**2)

    def worst(self, values: Floats, limit: float) -> list[Row]:
        """Return a row for each parameter whose own noise ratio in `values` exceeds `limit`."""
        columns, parts, shares = self._shares
        own = np.zeros(int(parts.max(initial=-1)) + 1)
        np.add.at(own, parts, shares * values[columns])
        rows = []
        for part in np.flatnonzero(own > limit * (1 + 1e-6)):
            mine = parts == part
            rows.append(Row(columns[mine], shares[mine] / limit, -np.inf, 1.0))
        return rows

    @cached_property
    def _shares(self) -> tuple[NDArray[np.int64], NDArray[np.int64], Floats]:
        """Columns, parts, and the own noise ratio of the part in that choice."""
        entries = [
            (column, part, share * self.noise[column])
            for number, decision in enumerate(self.space.decisions)
            for part, share in decision.shares
            for column in self._columns_of(number)
            if self.noise[column]
        ]
        columns, parts, shares = zip(*entries, strict=True) if entries else ((), (), ())
        return np.array(columns, np.int64), np.array(parts, np.int64), np.array(shares, np.float64)

    @cached_property
    def _roots_and_weights(self) -> tuple[Floats, Floats]:
        return self.of_choices(attrgetter("root")), self.of_choices(attrgetter("weight"))


def exceeds(row: Row, values: Floats) -> bool:
    """Return True if `values` are above the row's upper end by more than the solver's accuracy."""
    return bool(row.values @ values[row.columns] > row.high + _ACCURACY * max(1.0, abs(row.high)))


def new_rows(rows: Sequence[Row], present: Sequence[Row]) -> list[Row]:
    """Return the rows that none of `present` equals, up to the solver's accuracy."""
    return [row for row in rows if not any(_equal(row, other) for other in present)]


def _equal(row: Row, other: Row) -> bool:
    return np.array_equal(row.columns, other.columns) and np.allclose(
        [*row.values, row.high], [*other.values, other.high], rtol=_ACCURACY, atol=0.0
    )


def _limit(values: Sequence[float] | Floats, high: float, scale: float) -> Row:
    # The solver's accuracy is absolute, so values are fractions of the limit; a limit of 0 is left as it is.
    scale = scale if scale > 0 else 1.0
    columns, scaled = _sparse(np.asarray(values, dtype=np.float64) / scale)
    return Row(columns, scaled, -np.inf, high / scale)


def _sparse(values: Floats) -> tuple[NDArray[np.int64], Floats]:
    columns = np.flatnonzero(values)
    return columns, values[columns]


def _row(columns: Iterable[int], values: Sequence[float] | Floats, low: float, high: float) -> Row:
    return Row(np.fromiter(columns, dtype=np.int64), np.asarray(values, dtype=np.float64), low, high)


def _largest(values: Floats) -> int:
    """Return the position of the largest value, `NONE` if no value is nearer to 1 than to 0."""
    if len(values) == 0 or values.max() <= 0.5:
        return NONE
    return int(values.argmax())
