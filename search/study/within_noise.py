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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mesa_tune.policy import Policy
from mesa_tune.search.problem import Limits
from mesa_tune.search.solver import Program
from mesa_tune.search.study.local_search import (
    FRESH,
    FULL,
    SCREEN,
    Chosen,
    Finished,
    LocalSearch,
    Meter,
    Outcome,
    measurement,
    standard_error,
)
from mesa_tune.search.study.moves import MARGIN

ROUNDS, MORE_ROUNDS, FRESH_ROUNDS = 6, 12, 32
"""Rounds of timed steps: of every trial in the limits, of promising ones besides, and of the confirmation."""

AIM = 0.9
"""The second trial aims at this share of the limit on the noise ratio: the plan there is another one."""


class WithinNoise(LocalSearch):
    """Search for a better plan whose measured noise ratio is within the limit.

    `relative`: the noise of the batches over mean ‖g‖², which joint errors relate to; None if unknown, and
    then `limits` has no noise ratio.
    """

    def __init__(
        self,
        program: Program,
        solved: Chosen,
        limits: Limits,
        meter: Meter,
        policy_of: Callable[[Chosen], Policy],
        relative: float | None,
        seed: int = 0,
    ) -> None:
        super().__init__(solved, policy_of, seed)
        self.space, self.limits, self.meter, self.relative = program.space, limits, meter, relative

    @abstractmethod
    def gain(self, chosen: Chosen) -> str:
        """Return in words how a plan is better than the exact solution in fresh steps; empty if not."""

    def is_inside(self, trial: Finished) -> bool:
        """Return True if what was measured is within the limits."""
        return self._excess(trial.errors) <= 0

    def best(self, trials: Sequence[Finished]) -> Finished:
        """Return the trial of the lowest value within the limits; without any, the exact solution."""
        inside = [trial for trial in trials if trial.is_valid_here and self.is_inside(trial)]
        return min(inside or trials[:1], key=lambda trial: trial.value)

    def fixed(self, trials: Sequence[Finished], slot: int) -> Mapping[str, Any]:
        """Return the neutral parameters for the exact solution, for the second trial with another margin."""
        if trials and slot != 1:
            return {}
        neutral = self.moves.neutral
        if trials and self.limits.noise is not None:
            ratio, predicted = self._ratio(trials[0].errors), self.space.noise(self.solved)
            if ratio and math.isfinite(ratio) and predicted > 0:
                neutral["noise margin"] = min(MARGIN, max(-MARGIN, math.log(AIM * predicted / ratio)))
        return neutral

    def confirmed(self, trials: Sequence[Finished]) -> Outcome:
        """Measure on fresh pairs and in fresh steps. Return the best trial if it is better there.

        It is also better if it is within the noise ratio and the exact solution is not.
        """
        before = self.meter.errors(self.policy_of(self.solved), FRESH)
        solved = replace(measurement(before, before), noise_ratio=self._ratio(before))
        best = self.best(trials).chosen if trials else self.solved
        if best != self.solved:
            errors = self.meter.errors(self.policy_of(best), FRESH)
            found = replace(measurement(errors, before), noise_ratio=self._ratio(errors))
            if self._excess(errors) <= 0:
                won = self.gain(best)
                if not won and self._excess(before) > 0:
                    ratios = f"{found.noise_ratio:.2g} in place of {solved.noise_ratio:.2g}"
                    won = f"noise ratio {ratios} on fresh batches"
                if won:
                    return Outcome(best, found, len(trials), won)
        return Outcome(self.solved, solved, len(trials))

    def constraints(self, trial: Finished) -> dict[str, float]:
        """Return how far the plan exceeds each limit, the measured noise ratio included."""
        return {**super().constraints(trial), "noise": min(self._excess(trial.errors), 1e6)}

    def screened(self, policy: Policy) -> tuple[float, ...]:
        """Return errors at all pairs; at the first ones if the noise ratio is clearly above its limit."""
        errors = self.meter.errors(policy, SCREEN)
        lower = statistics.fmean(errors) - standard_error(errors)
        if lower < math.inf and self._excess([lower]) <= 0:
            errors = [*errors, *self.meter.errors(policy, FULL[len(SCREEN) :])]
        return tuple(errors)

    def paces(self, policy: Policy, rounds: int) -> list[float]:
        """Return times of steps over those of plain steps."""
        return [packed / plain for plain, packed in self.meter.step_times([Policy(()), policy], rounds)]

    def _ratio(self, errors: Sequence[float]) -> float | None:
        return None if self.relative is None else statistics.fmean(errors) / self.relative

    def _excess(self, errors: Sequence[float]) -> float:
        """Return how far the noise ratio exceeds its limit, as a fraction of it."""
        ratio, limit = self._ratio(errors), self.limits.noise
        return -1.0 if ratio is None or limit is None else ratio / limit - 1
