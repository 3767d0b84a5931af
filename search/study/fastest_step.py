"""The study of objective `time`: a plan whose measured step is faster than the exact solution's."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mesa_tune.search.objectives import to_same_result
from mesa_tune.search.plan import Measurement
from mesa_tune.search.study.local_search import Chosen, Finished, Meter, Scope, standard_error
from mesa_tune.search.study.moves import TimeMoves
from mesa_tune.search.study.within_noise import FRESH_ROUNDS, MORE_ROUNDS, ROUNDS, WithinNoise


class FastestStep(WithinNoise):
    """Minimise the time to the same result over the plain step's."""

    def __init__(self, scope: Scope, meter: Meter) -> None:
        self.times = TimeMoves(scope.program, scope.limits)
        super().__init__(scope, meter, self.times)

    def fixed(self, trials: Sequence[Finished], slot: int) -> Mapping[str, Any]:
        """Return at every other slot the times that explain what was measured so far."""
        timed = [trial for trial in trials if trial.paces and trial.is_valid_here]
        if slot < 2 or slot % 2 or not timed:
            return super().fixed(trials, slot)
        paces = np.array([statistics.median(trial.paces) for trial in timed])
        errors = np.array([standard_error(trial.paces) for trial in timed])
        generator = np.random.default_rng([self.seed, slot])
        fitted = self.times.fitted([trial.chosen for trial in timed], paces, errors, generator)
        return {**fitted, **self.calibrated(trials)}

    def is_inside(self, trial: Finished) -> bool:
        """Return True for a timed trial within the noise ratio."""
        return bool(trial.paces) and super().is_inside(trial)

    def measured(self, chosen: Chosen, trials: Sequence[Finished]) -> Finished:
        """Measure errors, then times; the value of a plan above the noise ratio is the predicted one."""
        policy = self.policy_of(chosen)
        errors = self.screened(policy)
        if trials and self.excess(self.ratio(errors)) > 0:
            predicted = self._predicted(chosen) / self._predicted(self.solved)
            return Finished(chosen, errors, predicted * trials[0].value)
        paces = self.paces(policy, ROUNDS)
        if not trials or statistics.median(paces) - standard_error(paces) < self.best(trials).value:
            paces += self.paces(policy, MORE_ROUNDS)
        value = to_same_result(statistics.median(paces), self.ratio(errors) or 0.0)
        return Finished(chosen, errors, value, tuple(paces))

    def _predicted(self, chosen: Chosen) -> float:
        return to_same_result(self.space.ms(chosen), self.space.noise(chosen) if self.is_known else 0.0)

    def better(self, chosen: Chosen, found: Measurement, solved: Measurement) -> str:
        """Return the part of the time that is won, if it is more than two standard errors."""
        policies = [self.policy_of(self.solved), self.policy_of(chosen)]
        noise = [to_same_result(1.0, measured.noise_ratio or 0.0) for measured in (solved, found)]
        times = self.meter.step_times(policies, FRESH_ROUNDS)
        gains = [1 - (after * noise[1]) / (before * noise[0]) for before, after in times]
        gain, error = statistics.fmean(gains), standard_error(gains)
        return f"{gain:.1%} ± {error:.1%} of the step's time in fresh steps" if gain > 2 * error else ""

    def status(self, trials: Sequence[Finished]) -> str:
        """Return the least time so far beside the exact solution's."""
        return f"time {self.best(trials).value:.3f}x, solved {trials[0].value:.3f}x"
