"""The study of objective `time`: a plan whose measured step is faster than the exact solution's.

The hard part: the exact solution is as near to the limit on the noise ratio as its prices say, and they are
off by some tenths. If errors combine to less than their sum, there is room that buys time; if they combine to
more, the plan is above the limit. So a trial solves again with another limit on the ratio (the second trial
with the one at which the first would have met it), and with other times for each kind of layer. A plan is in
only if its measured ratio is.
"""

from __future__ import annotations

import math
import statistics
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
from mesa_tune.search.study.moves import MARGIN, TimeMoves

ROUNDS, MORE_ROUNDS, FRESH_ROUNDS = 6, 12, 32
"""Rounds of timed steps: of every trial in the limits, of promising ones besides, and of the confirmation."""

AIM = 0.9
"""The second trial aims at this share of the limit on the noise ratio: the plan there is another one."""


class FastestStep(LocalSearch):
    """Minimise the step's time over the plain step's, within the limits.

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
        self.moves = TimeMoves(program, limits)

    def best(self, trials: Sequence[Finished]) -> Finished:
        """Return the fastest trial timed here within the noise ratio; without any, the exact solution."""
        timed = [trial for trial in trials if trial.paces and trial.is_valid_here]
        inside = [trial for trial in timed if self._excess(trial.errors) <= 0]
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

    def measured(self, chosen: Chosen, trials: Sequence[Finished]) -> Finished:
        """Measure errors, then times; the value of a plan without times is the predicted one."""
        policy = self.policy_of(chosen)
        errors = self.meter.errors(policy, SCREEN)
        if not trials or self._may_be_inside(errors):
            errors = [*errors, *self.meter.errors(policy, FULL[len(SCREEN) :])]
        if trials and (len(errors) < len(FULL) or self._excess(errors) > 0):
            predicted = self.space.ms(chosen) / self.space.ms(self.solved)
            return Finished(chosen, tuple(errors), predicted * trials[0].value)
        paces = self._paces(policy, ROUNDS)
        if not trials or self._is_promising(paces, trials):
            paces += self._paces(policy, MORE_ROUNDS)
        return Finished(chosen, tuple(errors), statistics.median(paces), tuple(paces))

    def confirmed(self, trials: Sequence[Finished]) -> Outcome:
        """Measure on fresh pairs and in fresh steps. Return the best trial if it is better there.

        Better is faster by more than two standard errors, or within the noise ratio where that one is not.
        """
        policies = [self.policy_of(self.solved)]
        before = self.meter.errors(policies[0], FRESH)
        solved = replace(measurement(before, before), noise_ratio=self._ratio(before))
        best = self.best(trials).chosen if trials else self.solved
        if best == self.solved:
            return Outcome(best, solved, len(trials))
        policies.append(self.policy_of(best))
        errors = self.meter.errors(policies[1], FRESH)
        found = replace(measurement(errors, before), noise_ratio=self._ratio(errors))
        gains = [1 - after / first for first, after in self.meter.step_times(policies, FRESH_ROUNDS)]
        gain, error = statistics.fmean(gains), standard_error(gains)
        if self._excess(errors) > 0:
            return Outcome(self.solved, solved, len(trials))
        if gain > 2 * error:
            won = f"{gain:.1%} ± {error:.1%} of the step's time in fresh steps"
            return Outcome(best, found, len(trials), won)
        if self._excess(before) > 0:
            won = f"noise ratio {found.noise_ratio:.2g} in place of {solved.noise_ratio:.2g} on fresh batches"
            return Outcome(best, found, len(trials), won)
        return Outcome(self.solved, solved, len(trials))

    def constraints(self, trial: Finished) -> dict[str, float]:
        """Return how far the plan exceeds each limit, the measured noise ratio included."""
        return {**super().constraints(trial), "noise": min(self._excess(trial.errors), 1e6)}

    def status(self, trials: Sequence[Finished]) -> str:
        """Return the fastest step so far beside the exact solution's."""
        return f"step {self.best(trials).value:.3f}x, solved {trials[0].value:.3f}x"

    def _paces(self, policy: Policy, rounds: int) -> list[float]:
        return [packed / plain for plain, packed in self.meter.step_times([Policy(()), policy], rounds)]

    def _is_promising(self, paces: Sequence[float], trials: Sequence[Finished]) -> bool:
        return statistics.median(paces) - standard_error(paces) < self.best(trials).value

    def _ratio(self, errors: Sequence[float]) -> float | None:
        return None if self.relative is None else statistics.fmean(errors) / self.relative

    def _excess(self, errors: Sequence[float]) -> float:
        """Return how far the noise ratio exceeds its limit, as a fraction of it."""
        ratio, limit = self._ratio(errors), self.limits.noise
        return -1.0 if ratio is None or limit is None else ratio / limit - 1

    def _may_be_inside(self, errors: Sequence[float]) -> bool:
        """Return False if the noise ratio exceeds its limit by more than a standard error."""
        lower = statistics.fmean(errors) - standard_error(errors)
        return lower < math.inf and self._excess([lower]) <= 0
