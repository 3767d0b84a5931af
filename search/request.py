"""What is asked of a search: its arguments, checked, and in bytes and milliseconds."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from mesa_tune.errors import BudgetError
from mesa_tune.profiler.profile import Profile
from mesa_tune.search.objectives import MAX_NOISE_RATIO, check_objective
from mesa_tune.search.plan import Baseline
from mesa_tune.search.problem import Limits
from mesa_tune.search.restrictions import Pins, Restrictions
from mesa_tune.units import Budget, parse_bytes


@dataclass(frozen=True)
class Request:
    """Arguments of the search, in bytes and milliseconds. `requested`: the budget as the user wrote it.

    `limits`: without those on noise ratio and bias.
    """

    profile: Profile
    batch_size: int
    budget: int | None
    baseline: Baseline
    limits: Limits
    pins: Pins
    restrictions: Restrictions
    objective: str
    max_noise_ratio: float
    seed: int
    requested: Budget | None

    @property
    def identity(self) -> str:
        """JSON, equal for equal requests."""
        asked = (self.objective, str(self.max_noise_ratio), self.restrictions.to_dict())
        parts = [self.batch_size, vars(self.limits), self._pins, self.seed, *asked]
        return json.dumps(parts, sort_keys=True)

    @property
    def _pins(self) -> dict[str, Any]:
        return {glob: settings.to_dict() for glob, settings in self.pins.items()}

    def again(self, peak: int) -> dict[str, Any]:
        """Return `Plan.request`; `peak`: of the plan, the budget where none was given."""
        ms, ratio = self.limits.ms, self.max_noise_ratio
        return {
            "budget": peak if self.limits.peak is None else self.limits.peak,
            "batch_size": self.batch_size,
            "max_saved": self.limits.saved,
            "max_slowdown": None if ms is None else ms / self.profile.plain_ms(self.batch_size),
            "max_noise_ratio": None if math.isinf(ratio) else ratio,
            "objective": "auto" if self.objective == "memory" else self.objective,
            "pins": self._pins,
            **self.restrictions.to_dict(),
            "seed": self.seed,
        }


def check_request(
    budget: int | str | None,
    *,
    trials: int | None = None,
    timeout: float | None = None,
    batch_size: int | None = None,
    max_batch: bool = False,
    max_saved: int | str | None = None,
    max_slowdown: float | None = None,
    max_noise_ratio: float = MAX_NOISE_RATIO,
    objective: str = "auto",
    forbid: Iterable[str] | None = None,
    only: Iterable[str] | None = None,
    **_: object,
) -> None:
    """Raise what `search_policy` raises for arguments that are wrong for every profile."""
    check_objective(objective, budget)
    _require_positive("batch size", batch_size, whole=True)
    if max_batch and (budget is None or batch_size is not None):
        raise BudgetError("max-batch: needs a budget and no batch size\nit finds the largest that fits")
    if trials is not None and trials < 0:
        raise BudgetError(f"trials {trials}: must be 0 or more\n0 solves from the profile alone")
    for name, value in (("timeout", timeout), ("max-slowdown", max_slowdown)):
        _require_positive(name, value)
    _require_positive("max-noise-ratio", max_noise_ratio, finite=False)
    for amount, name in ((budget, "budget"), (max_saved, "max-saved")):
        if amount is not None:
            parse_bytes(amount, name)
    Restrictions.of(forbid, only)


def _require_positive(name: str, value: float | None, *, whole: bool = False, finite: bool = True) -> None:
    if value is None or (math.isinf(value) and value > 0 and not finite):
        return
    if not (math.isfinite(value) and value > 0 and (not whole or value == int(value))):
        kind = "an integer of at least 1" if whole else "above zero"
        raise BudgetError(
            f"{name} {value!r}: must be {kind}\ngive such a number, or leave it out for the default"
        )
