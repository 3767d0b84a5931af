"""The study of objective `memory`: a plan with a lower peak, within the measured noise ratio and slowdown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from mesa_tune.policy import Policy
from mesa_tune.search.plan import Measurement
from mesa_tune.search.study.local_search import Chosen, Finished, Meter, Scope
from mesa_tune.search.study.moves import TIME_MARGIN, PeakMoves
from mesa_tune.search.study.within_noise import FRESH_ROUNDS, ROUNDS, WithinNoise

TIME_AIM = 0.98
"""Calibrated trials aim at this share of the limit on the slowdown."""


class LowestPeak(WithinNoise):
    """Minimise the predicted peak over the exact solution's. `plain_ms`: of the profile's plain step."""

    def __init__(self, scope: Scope, meter: Meter, plain_ms: float) -> None:
        super().__init__(scope, meter, PeakMoves(scope.program, scope.limits))
        self.plain_ms = plain_ms
        self.slowdown = None if self.limits.ms is None else self.limits.ms / plain_ms

    def is_inside(self, trial: Finished) -> bool:
        """Return True for a trial within the noise ratio, and within the slowdown if there is a limit."""
        return super().is_inside(trial) and self._slower(trial.paces) <= 0

    def measured(self, chosen: Chosen, trials: Sequence[Finished]) -> Finished:
        """Measure errors, and times where the noise ratio is within its limit."""
        policy = self.policy_of(chosen)
        errors = self.screened(policy)
        timed = self.slowdown is not None and self.excess(self.ratio(errors)) <= 0
        paces = self.paces(policy, ROUNDS) if timed else []
        return Finished(chosen, errors, self._peak(chosen) / self._peak(self.solved), tuple(paces))

    def better(self, chosen: Chosen, found: Measurement, solved: Measurement) -> str:
        """Return the part of the peak that is won, if the step is not too slow; or that the solved one is."""
        gain, slower = 1 - self._peak(chosen) / self._peak(self.solved), ""
        if self.slowdown:
            policies = [Policy(()), self.policy_of(self.solved), self.policy_of(chosen)]
            rounds = self.meter.step_times(policies, FRESH_ROUNDS)
            before, after = (statistics.median(times[i] / times[0] for times in rounds) for i in (1, 2))
            if after > self.slowdown:
                return ""
            if before > self.slowdown:
                slower = f"slowdown {after:.2f} in place of {before:.2f} in fresh steps"
        return f"{gain:.1%} of the peak within the measured noise ratio" if gain > 0 else slower

    def calibrated(self, trials: Sequence[Finished]) -> dict[str, float]:
        """Return the margins at which the trials would have met the limits on noise ratio and slowdown."""
        margins = super().calibrated(trials)
        if not self.slowdown:
            return margins
        added = [
            (statistics.median(trial.paces) - 1) / predicted
            for trial in trials
            if trial.paces and (predicted := self.space.ms(trial.chosen) / self.plain_ms - 1) > 0
        ]
        factor = statistics.median(added) if added else 1.0
        aim = 1 + (TIME_AIM * self.slowdown - 1) / factor if factor > 0 else math.inf
        margin = math.log(aim / self.slowdown) if 0 < aim < math.inf else 0.0
        return {**margins, "time margin": min(TIME_MARGIN, max(-TIME_MARGIN, margin))}

    def constraints(self, trial: Finished) -> dict[str, float]:
        """Return how far the plan exceeds each limit, the measured noise ratio and slowdown included."""
        return {**super().constraints(trial), "slowdown": self._slower(trial.paces)}

    def status(self, trials: Sequence[Finished]) -> str:
        """Return the lowest peak so far beside the exact solution's."""
        return f"peak {self.best(trials).value:.1%} of the solved one"

    def _slower(self, paces: Sequence[float]) -> float:
        """Return how far the slowdown exceeds its limit, as a fraction of it; 0 where it is unknown."""
        return statistics.median(paces) / self.slowdown - 1 if paces and self.slowdown else 0.0

    def _peak(self, chosen: Chosen) -> int:
        return int(self.space.live(chosen).max())
