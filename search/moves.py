"""What a trial of the study tries: other prices for kinds of layers, or exchanges around the best plan.

Single-layer errors leave out how layers' errors meet. Prices let a study say "what normalizations keep
costs more than it seems" and solve again; exchanges re-solve a few units under disturbed errors and leave
the rest. Whatever is tried keeps the limits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mesa_tune.search.solver import Program
from mesa_tune.search.space import Floats, Limits

# A trial's answer is measured, so its solution need not be proven to the last digit.
_GAP = 1e-3
_PRICE = 1.5
_THIRDS = ("early", "middle", "late")


class Moves:
    """Proposals for one program under `limits`."""

    def __init__(self, program: Program, limits: Limits) -> None:
        self.program = program
        self.limits = limits
        self.units = program.space.units
        self.sizes = [len(unit.choices) for unit in self.units]
        self.free = [number for number, size in enumerate(self.sizes) if size > 1]
        self.kinds = [self._kind(number) for number in range(len(self.units))]

    @property
    def neutral(self) -> dict[str, Any]:
        """The parameters under which the program is the one that was solved."""
        return {"move": "prices", **{f"price {kind}": 0.0 for kind in self._decided}}

    def propose(self, trial: Any, best: Sequence[int]) -> tuple[int, ...]:
        """One position a unit within the limits; `best`, the best plan so far, where there is no other."""
        moves = ("prices", "exchange") if len(self.free) > 1 else ("prices",)
        if trial.suggest_categorical("move", moves) == "prices":
            found = self.program.solve(self.limits, self._priced(trial), gap=_GAP)
        else:
            found = self._exchanged(trial, best)
        return tuple(best) if found is None else found.chosen

    def _priced(self, trial: Any) -> Floats:
        prices = {kind: trial.suggest_float(f"price {kind}", -_PRICE, _PRICE) for kind in self._decided}
        factors = [math.exp(prices.get(kind, 0.0)) for kind in self.kinds]
        return np.asarray(self.program.errors * np.repeat(factors, self.sizes))

    def _exchanged(self, trial: Any, best: Sequence[int]) -> Any:
        count = trial.suggest_int("exchange units", 2, min(16, len(self.free)))
        strength = trial.suggest_float("exchange strength", 0.2, 2.0)
        chance = np.random.default_rng(trial.suggest_int("exchange seed", 0, 2**31 - 1))
        moved = chance.choice(self.free, size=count, replace=False)
        factors = np.ones(len(self.units))
        factors[moved] = np.exp(strength * chance.standard_normal(count))
        allowed = np.concatenate([self._allowed(number, best, moved) for number in range(len(self.units))])
        return self.program.solve(
            self.limits, self.program.errors * np.repeat(factors, self.sizes), gap=_GAP, allowed=allowed
        )

    def _allowed(self, number: int, best: Sequence[int], moved: Any) -> Any:
        """Anything for a moved unit, and for the first of them anything else than now; the others stay."""
        here = np.arange(self.sizes[number]) == best[number]
        if number == moved[0]:
            return ~here
        return np.ones_like(here) if number in moved else here

    def _kind(self, number: int) -> str:
        return f"{self.units[number].tag} {_THIRDS[3 * number // len(self.units)]}"

    @property
    def _decided(self) -> list[str]:
        """The kinds of units that have a choice, in order."""
        return list(dict.fromkeys(self.kinds[number] for number in self.free))
