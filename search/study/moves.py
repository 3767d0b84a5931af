"""Moves of the study: how a trial proposes another plan.

The hard part: prices of single layers do not tell how those of several layers combine. Of errors, a move
either multiplies those of each kind of layer by a price and solves again, or solves again for a few units
with randomly scaled errors while the other units stay. Of times, it multiplies those of each kind. A limit on
the noise ratio is moved. Every proposal is within the limits but that one: the noise ratio is measured.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mesa_tune.search.linear.highs import Deadline, TimeUpError
from mesa_tune.search.objectives import noise_price
from mesa_tune.search.problem import NONE, Floats, Limits
from mesa_tune.search.solver import Program
from mesa_tune.search.study.fitting import drawn_factors

# A proposal is measured anyway, so its solution needs no tight proof.
_GAP, _TIME_GAP = 1e-3, 1e-2
_SECONDS = 5.0
_PRICE, _PACE = 1.5, 0.7
"""Largest natural logarithms of the factors on errors and on times."""
MARGIN = 1.4
"""Largest natural logarithm of the factor on the limit on the noise ratio."""
TIME_MARGIN = 0.4
"""Largest natural logarithm of the factor on the limit on the time."""
_PACE_SPREAD, _PRICE_SPREAD, _BASE_SPREAD = 0.5, 2.0, 0.2
"""Standard deviations of the factors on times, on errors, on the plain step, before anything was measured."""
_PACE_ERROR, _PRICE_ERROR = 0.005, 0.1
"""What they cannot explain: of a time as a fraction of the plain step's, of an error as one of itself."""
_THIRDS = ("early", "middle", "late")


def _soon() -> Deadline:
    return Deadline(_SECONDS)


class Moves(ABC):
    """Moves for one program under `limits`."""

    def __init__(self, program: Program, limits: Limits) -> None:
        self.program = program
        self.limits = limits

    @property
    @abstractmethod
    def neutral(self) -> dict[str, Any]:
        """The trial parameters that leave the program unchanged."""

    @abstractmethod
    def propose(self, trial: Any, best: Sequence[int], generator: np.random.Generator) -> tuple[int, ...]:
        """Propose a plan within the limits, or return `best`, the best plan so far, if there is no other.

        `generator`: for what is no parameter of the trial, but drawn.
        """

    @property
    def price(self) -> float:
        """Milliseconds that a noise ratio of 1 costs, of a step as fast as the fastest choices."""
        return noise_price(self.program.space, self.program.space.base_ms)

    def with_margin(self, trial: Any) -> Limits:
        """Return the limits with another one on the noise ratio, if there is one."""
        if self.limits.noise is None:
            return self.limits
        margin = math.exp(trial.suggest_float("noise margin", -MARGIN, MARGIN))
        return replace(self.limits, noise=self.limits.noise * margin)


class KindMoves(Moves):
    """Moves with a parameter for each kind of layer, called `named`, the logarithm of a factor.

    `largest`: its largest value.
    """

    named: str
    largest: float

    def __init__(self, program: Program, limits: Limits) -> None:
        super().__init__(program, limits)
        self.units = program.space.decisions
        self.sizes = [len(unit.choices) for unit in self.units]
        # A module has no choice as a further one.
        fixed = {number for number, size in enumerate(self.sizes[: len(program.space.units)]) if size == 1}
        self.free = [number for number in range(len(self.units)) if number not in fixed]
        self.kinds = [self._kind(number) for number in range(len(self.units))]

    @property
    def neutral(self) -> dict[str, Any]:
        """The trial parameters that leave the program unchanged."""
        return {f"{self.named} {kind}": 0.0 for kind in self._decided}

    def _factors(self, trial: Any) -> Floats:
        """Return a factor for every choice, from one parameter for each kind of layer."""
        logarithms = {
            kind: trial.suggest_float(f"{self.named} {kind}", -self.largest, self.largest)
            for kind in self._decided
        }
        factors = [math.exp(logarithms.get(kind, 0.0)) for kind in self.kinds]
        return np.asarray(np.repeat(factors, self.sizes))

    def _kind(self, number: int) -> str:
        return f"{self.units[number].tag} {_THIRDS[3 * number // len(self.units)]}"

    @property
    def _decided(self) -> list[str]:
        """The kinds of units that have a choice, in order."""
        return list(dict.fromkeys(self.kinds[number] for number in self.free))

    def _named(self, factors: Floats) -> dict[str, float]:
        """Return the trial parameters of a factor for each kind. What all have in common changes no plan."""
        smallest = factors.max() * math.exp(-2 * self.largest)  # a draw may be below zero
        logarithms = np.log(np.maximum(factors, max(smallest, 1e-9)))
        middle = (logarithms.max() + logarithms.min()) / 2
        logarithms = np.clip(logarithms - middle, -self.largest, self.largest)  # of rounding
        names = (f"{self.named} {kind}" for kind in self._decided)
        return dict(zip(names, logarithms.tolist(), strict=True))

    def _rows(self, costs: Floats, plans: Sequence[Sequence[int]]) -> Floats:
        """Return what each kind of layer costs in each plan, [plans, kinds]."""
        return np.array([self._by_kind(costs, chosen) for chosen in plans])

    def _by_kind(self, costs: Floats, chosen: Sequence[int]) -> list[float]:
        sums = dict.fromkeys(self._decided, 0.0)
        for kind, start, position in zip(self.kinds, self.program.rows.starts, chosen, strict=True):
            if kind in sums and position != NONE:
                sums[kind] += float(costs[start + position])
        return list(sums.values())


class TimeMoves(KindMoves):
    """Another limit on the noise ratio, and other times of each kind of layer."""

    named, largest = "time", _PACE

    @property
    def neutral(self) -> dict[str, Any]:
        """The trial parameters that leave the program unchanged."""
        margin = {} if self.limits.noise is None else {"noise margin": 0.0}
        return {**margin, **super().neutral}

    def fitted(
        self, steps: Sequence[Sequence[int]], paces: Floats, errors: Floats, generator: np.random.Generator
    ) -> dict[str, float]:
        """Return trial parameters with times that explain the `paces` of the plans `steps`."""
        added = self._rows(self.program.times, steps) / self.program.space.base_ms
        rows = np.column_stack([added, np.ones(len(added))])
        spreads = np.array([*[_PACE_SPREAD] * added.shape[1], _BASE_SPREAD])
        errors = np.hypot(errors, _PACE_ERROR)
        return self._named(drawn_factors(rows, paces, errors, spreads, generator)[:-1])

    def propose(self, trial: Any, best: Sequence[int], generator: np.random.Generator) -> tuple[int, ...]:
        """Propose the fastest plan by other times within another limit on the noise ratio."""
        limits, program = self.with_margin(trial), self.program
        times, price, solution = program.times * self._factors(trial), self.price, None
        with suppress(TimeUpError):
            solution = program.solve(limits, times, price=price, gap=_TIME_GAP, deadline=_soon())
        return tuple(best) if solution is None else solution.chosen


class PeakMoves(Moves):
    """Other limits on the noise ratio and on the time."""

    @property
    def neutral(self) -> dict[str, Any]:
        """The trial parameters that leave the program unchanged."""
        margins = {"noise margin": self.limits.noise, "time margin": self.limits.ms}
        return {name: 0.0 for name, limit in margins.items() if limit is not None}

    def propose(self, trial: Any, best: Sequence[int], generator: np.random.Generator) -> tuple[int, ...]:
        """Propose the fastest plan of the lowest peak within other limits."""
        limits, program = self.with_margin(trial), self.program
        if limits.ms is not None:
            margin = math.exp(trial.suggest_float("time margin", -TIME_MARGIN, TIME_MARGIN))
            limits = replace(limits, ms=limits.ms * margin)
        solution = None
        with suppress(TimeUpError):
            solution = program.smallest_peak(limits, gap=_GAP, deadline=_soon())
            if solution is not None:
                limits = replace(limits, peak=int(solution.cost))
                faster = program.solve(
                    limits, program.times, price=self.price, gap=_TIME_GAP, deadline=_soon()
                )
                solution = faster or solution
        return tuple(best) if solution is None else solution.chosen


class ErrorMoves(KindMoves):
    """Other errors of each kind of layer, or of a few units."""

    named, largest = "price", _PRICE

    @property
    def neutral(self) -> dict[str, Any]:
        """The trial parameters that leave the program unchanged."""
        return {"move": "prices", **super().neutral}

    @property
    def exchange(self) -> dict[str, Any]:
        """The trial parameter that exchanges units; empty where a single one has a choice."""
        return {"move": "exchange"} if len(self.free) > 1 else {}

    def fitted(
        self, plans: Sequence[Sequence[int]], measured: Floats, generator: np.random.Generator
    ) -> dict[str, Any]:
        """Return trial parameters with errors that explain the `measured` ones of `plans`."""
        rows = self._rows(self.program.noise, plans)
        spreads = np.full(rows.shape[1], _PRICE_SPREAD)
        factors = drawn_factors(rows, measured, _PRICE_ERROR * measured, spreads, generator)
        return {**self.neutral, **self._named(factors)}

    def propose(self, trial: Any, best: Sequence[int], generator: np.random.Generator) -> tuple[int, ...]:
        """Propose the plan of least error by other errors."""
        moves = ("prices", "exchange") if self.exchange else ("prices",)
        allowed = None
        if trial.suggest_categorical("move", moves) == "prices":
            factors = self._factors(trial)
        else:
            factors, allowed = self._exchanged(trial, best, generator)
        # The factors are of the sums; the interaction costs what it is.
        solution, errors = None, self.program.noise * (factors - 1.0)
        with suppress(TimeUpError):
            solution = self.program.solve(self.limits, errors, gap=_GAP, allowed=allowed, deadline=_soon())
        return tuple(best) if solution is None else solution.chosen

    def _exchanged(
        self, trial: Any, best: Sequence[int], generator: np.random.Generator
    ) -> tuple[Floats, NDArray[np.bool_]]:
        """Return a factor for every choice, and which are allowed: others than now for a few units only."""
        count = trial.suggest_int("exchange units", 2, min(16, len(self.free)))
        strength = trial.suggest_float("exchange strength", 0.2, 2.0)
        moved = generator.choice(self.free, size=count, replace=False)
        factors = np.ones(len(self.units))
        factors[moved] = np.exp(strength * generator.standard_normal(count))
        allowed = np.concatenate([self._allowed(number, best, moved) for number in range(len(self.units))])
        return np.repeat(factors, self.sizes), allowed

    def _allowed(self, number: int, best: Sequence[int], moved: Any) -> Any:
        """Mask of choices: the present one; all for a moved unit; all but the present one for the first."""
        present = np.arange(self.sizes[number]) == best[number]
        if number == moved[0]:
            return ~present
        return np.ones_like(present) if number in moved else present
