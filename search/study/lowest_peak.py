"""The study of objective `memory`: a plan with a lower peak, within the measured noise ratio and slowdown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from mesa_tune.search.study.local_search import Chosen, Finished, Meter, Scope
from mesa_tune.search.study.moves import PeakMoves
from mesa_tune.search.study.within_noise import FRESH_ROUNDS, ROUNDS, WithinNoise


class LowestPeak(WithinNoise):
    """Minimise the predicted peak over the exact solution's. `plain_ms`: of the profile's plain step."""

    def __init__(self, scope: Scope, meter: Meter, relative: float | None, plain_ms: float) -> None:
        super().__init__(scope, meter, PeakMoves(scope.program, scope.limits), relative)
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

    def better(self, chosen: Chosen) -> str:
        """Return the part of the peak that is won, if the step is not too slow."""
        gain = 1 - self._peak(chosen) / self._peak(self.solved)
        if gain <= 0:
            return ""
        if self.slowdown and self._slower(self.paces(self.policy_of(chosen), FRESH_ROUNDS)) > 0:
            return ""
        return f"{gain:.1%} of the peak within the measured noise ratio"

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
