"""Moves of the study: how a trial proposes another plan.

The hard part: errors of single layers do not tell how the errors of several layers combine. A move either
multiplies the errors of each kind of layer by a price and solves again, or solves again for a few units with
randomly scaled errors while the other units stay. Every proposal is within the limits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mesa_tune.search.problem import Floats, Limits
from mesa_tune.search.solver import Program

# A proposal is measured anyway, so its solution needs no tight proof.
_GAP = 1e-3
_PRICE = 1.5
_THIRDS = ("early", "middle", "late")


class Moves:
    """Moves for one program under `limits`."""

    def __init__(self, program: Program, limits: Limits) -> None:
        self.program = program
        self.limits = limits
        self.units = program.space.decisions
        self.sizes = [len(unit.choices) for unit in self.units]
        # A module has no choice as a further one.
        fixed = {number for number, size in enumerate(self.sizes[: len(program.space.units)]) if size == 1}
        self.free = [number for number in range(len(self.units)) if number not in fixed]
        self.kinds = [self._kind(number) for number in range(len(self.units))]

    @property
    def neutral(self) -> dict[str, Any]:
        """The trial parameters that leave the program unchanged."""
        return {"move": "prices", **{f"price {kind}": 0.0 for kind in self._decided}}

    def propose(self, trial: Any, best: Sequence[int]) -> tuple[int, ...]:
        """Propose a plan within the limits, or return `best`, the best plan so far, if there is no other."""
        moves = ("prices", "exchange") if len(self.free) > 1 else ("prices",)
        if trial.suggest_categorical("move", moves) == "prices":
            solution = self.program.solve(self.limits, self._priced(trial), gap=_GAP)
        else:
            solution = self._exchanged(trial, best)
        return tuple(best) if solution is None else solution.chosen

    def _priced(self, trial: Any) -> Floats:
        prices = {kind: trial.suggest_float(f"price {kind}", -_PRICE, _PRICE) for kind in self._decided}
        factors = [math.exp(prices.get(kind, 0.0)) for kind in self.kinds]
        return np.asarray(self.program.errors * np.repeat(factors, self.sizes))

    def _exchanged(self, trial: Any, best: Sequence[int]) -> Any:
        count = trial.suggest_int("exchange units", 2, min(16, len(self.free)))
        strength = trial.suggest_float("exchange strength", 0.2, 2.0)
        generator = np.random.default_rng(trial.suggest_int("exchange seed", 0, 2**31 - 1))
        moved = generator.choice(self.free, size=count, replace=False)
        factors = np.ones(len(self.units))
        factors[moved] = np.exp(strength * generator.standard_normal(count))
        allowed = np.concatenate([self._allowed(number, best, moved) for number in range(len(self.units))])
        return self.program.solve(
            self.limits, self.program.errors * np.repeat(factors, self.sizes), gap=_GAP, allowed=allowed
        )

    def _allowed(self, number: int, best: Sequence[int], moved: Any) -> Any:
        """Mask of choices: the present one; all for a moved unit; all but the present one for the first."""
        present = np.arange(self.sizes[number]) == best[number]
        if number == moved[0]:
            return ~present
        return np.ones_like(present) if number in moved else present

    def _kind(self, number: int) -> str:
        return f"{self.units[number].tag} {_THIRDS[3 * number // len(self.units)]}"

    @property
    def _decided(self) -> list[str]:
        """The kinds of units that have a choice, in order."""
        return list(dict.fromkeys(self.kinds[number] for number in self.free))
