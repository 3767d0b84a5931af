"""What the studies of objectives `time` and `memory` share: the noise ratio is measured.

The hard part: the exact solution is as near to the limit on the noise ratio as its prices say, and they are
off by some tenths. If errors combine to less than their sum, there is room that buys time or memory; if they
combine to more, the plan is above the limit. So a trial solves again with another limit on the ratio, the
second trial with the one at which the first would have met it. A plan is in only if its measured ratio is.
"""

from __future__ import annotations

import math
import statistics
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from mesa_tune.policy import Policy
from mesa_tune.profiler.errors.joint_error import GradientError
from mesa_tune.search.plan import Measurement
from mesa_tune.search.study.local_search import (
    FULL,
    SCREEN,
    Chosen,
    Finished,
    LocalSearch,
    standard_error,
)
from mesa_tune.search.study.moves import MARGIN

ROUNDS, MORE_ROUNDS, FRESH_ROUNDS = 6, 12, 32
"""Rounds of timed steps: of every trial in the limits, of promising ones besides, and of the confirmation."""

AIM = 0.9
"""Calibrated trials aim at this share of the limit on the noise ratio."""

CANDIDATES = 4
"""At most as many plans are measured afresh, each at a ratio below `AIM` times that of the one before."""


class WithinNoise(LocalSearch):
    """Search for a better plan whose measured noise ratio is within the limit."""

    @abstractmethod
    def better(self, chosen: Chosen, found: Measurement, solved: Measurement) -> str:
        """Return in words how a plan is better than the exact solution in fresh steps; empty if not."""

    def excess(self, ratio: float | None) -> float:
        """Return how far a noise ratio exceeds its limit, as a fraction of it."""
        limit = self.limits.noise
        return -1.0 if ratio is None or limit is None else ratio / limit - 1

    def is_inside(self, trial: Finished) -> bool:
        """Return True if what was measured is within the limits."""
        return self.excess(self.ratio(trial.errors)) <= 0

    def best(self, trials: Sequence[Finished]) -> Finished:
        """Return the trial of the lowest value within the limits; without any, the exact solution."""
        return min(self._inside(trials) or trials[:1], key=lambda trial: trial.value)

    def _inside(self, trials: Sequence[Finished]) -> list[Finished]:
        return [trial for trial in trials if trial.is_valid_here and self.is_inside(trial)]

    def candidates(self, trials: Sequence[Finished], solved: Measurement) -> list[Chosen]:
        """Return the best; if the exact solution exceeds the ratio, then also some of smaller ratios."""
        chosen = super().candidates(trials, solved)
        if self.excess(solved.noise_ratio) <= 0:
            return chosen
        ceiling = math.inf
        for trial in sorted(self._inside(trials), key=lambda trial: trial.value):
            ratio = self.ratio(trial.errors)
            if ratio is not None and ratio < AIM * ceiling:
                chosen, ceiling = [*chosen, trial.chosen], ratio
        return list(dict.fromkeys(chosen))[:CANDIDATES]

    def fixed(self, trials: Sequence[Finished], slot: int) -> Mapping[str, Any]:
        """Return the neutral parameters for the exact solution, for the second trial with another margin."""
        if trials and slot != 1:
            return {}
        return {**self.moves.neutral, **self.calibrated(trials)}

    def calibrated(self, trials: Sequence[Finished]) -> dict[str, float]:
        """Return the margin at which the trials, by their median, would have met the limit on the ratio."""
        if self.limits.noise is None:
            return {}
        pairs = [(self.space.noise(trial.chosen), self.ratio(trial.errors)) for trial in trials]
        known = [
            predicted / ratio for predicted, ratio in pairs if predicted > 0 and ratio and ratio < math.inf
        ]
        margin = math.log(AIM * statistics.median(known)) if known else 0.0
        return {"noise margin": min(MARGIN, max(-MARGIN, margin))}

    def gain(self, chosen: Chosen, found: Measurement, solved: Measurement) -> str:
        """Return how a plan within the noise ratio is better; it is if the exact solution is not within."""
        if self.excess(found.noise_ratio) > 0:
            return ""
        won = self.better(chosen, found, solved)
        if not won and self.excess(solved.noise_ratio) > 0:
            ratios = f"{found.noise_ratio:.2g} in place of {solved.noise_ratio:.2g}"
            return f"noise ratio {ratios} on fresh batches"
        return won

    def constraints(self, trial: Finished) -> dict[str, float]:
        """Return how far the plan exceeds each limit, the measured noise ratio included."""
        return {**super().constraints(trial), "noise": min(self.excess(self.ratio(trial.errors)), 1e6)}

    def screened(self, policy: Policy) -> tuple[GradientError, ...]:
        """Return errors at all pairs; at the first ones if the noise ratio is clearly above its limit."""
        errors = self.meter.errors(policy, SCREEN)
        if self._may_be_inside(errors):
            errors = [*errors, *self.meter.errors(policy, FULL[len(SCREEN) :])]
        return tuple(errors)

    def _may_be_inside(self, errors: Sequence[GradientError]) -> bool:
        """Return False if the first errors are above the limit by more than a standard error."""
        ratios = [error.ratio for error in errors]
        if not all(map(math.isfinite, ratios)):
            return False
        if not self.is_known:
            return True
        return self.excess(statistics.fmean(ratios) - standard_error(ratios)) <= 0

    def paces(self, policy: Policy, rounds: int) -> list[float]:
        """Return times of steps over those of plain steps."""
        return [packed / plain for plain, packed in self.meter.step_times([Policy(()), policy], rounds)]
