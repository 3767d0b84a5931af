"""The study of objective `error`: a plan whose measured joint error is lower than the exact solution's."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mesa_tune.profiler.errors.joint_error import GradientError
from mesa_tune.search.plan import Measurement
from mesa_tune.search.study.local_search import (
    FULL,
    SCREEN,
    Chosen,
    Finished,
    LocalSearch,
    Meter,
    Scope,
    standard_error,
)
from mesa_tune.search.study.moves import ErrorMoves

_SAMPLED = 6
"""Trials that explore before errors are fitted to them."""


class LeastError(LocalSearch):
    """Minimise the mean joint error; a trial is never larger than the exact solution."""

    def __init__(self, scope: Scope, meter: Meter) -> None:
        space, solved = scope.program.space, scope.solved
        limits = replace(scope.limits, peak=int(space.live(solved).max()), saved=space.saved(solved))
        self.errors = ErrorMoves(scope.program, limits)
        super().__init__(replace(scope, limits=limits), meter, self.errors)

    def best(self, trials: Sequence[Finished]) -> Finished:
        """Return the trial with the lowest value among those measured at all pairs."""
        complete = (trial for trial in trials if trial.is_whole)
        return min(complete, key=lambda trial: trial.value)

    def fixed(self, trials: Sequence[Finished], slot: int) -> Mapping[str, Any]:
        """Return neutral parameters for the exact solution, then in turn: fitted, exchange, fitted, none."""
        known = [trial for trial in trials if 0 < trial.value < math.inf]
        if not trials:
            return self.moves.neutral
        if slot < _SAMPLED or slot % 2 or not known:
            return self.errors.exchange if slot % 4 == 1 else {}
        measured = np.array([trial.value for trial in known])
        generator = np.random.default_rng([self.seed, slot])
        return self.errors.fitted([trial.chosen for trial in known], measured, generator)

    def measured(self, chosen: Chosen, trials: Sequence[Finished]) -> Finished:
        """Measure errors; the value is their mean over all pairs, scaled from the exact solution's."""
        policy = self.policy_of(chosen)
        if not trials:
            errors = self.meter.errors(policy, FULL)
            return Finished(chosen, tuple(errors), statistics.fmean(error.ratio for error in errors))
        errors = self.meter.errors(policy, SCREEN)
        if _promising(errors, self.best(trials).errors):
            errors = [*errors, *self.meter.errors(policy, FULL[len(SCREEN) :])]
        first = trials[0]
        sums = [sum(error.ratio for error in each) for each in (errors, first.errors[: len(errors)])]
        value = first.value * sums[0] / sums[1]
        return Finished(chosen, tuple(errors), value)

    def gain(self, chosen: Chosen, found: Measurement, solved: Measurement) -> str:
        """Return the part of the error that is won, if it is more than two standard errors."""
        if found.gain <= 2 * found.gain_error:
            return ""
        gain, error = found.gain / found.solved, found.gain_error / found.solved
        return f"{gain:.1%} ± {error:.1%} of the noise ratio on fresh batches"

    def status(self, trials: Sequence[Finished]) -> str:
        """Return the lowest error so far beside the exact solution's."""
        return f"noise ratio {self.best(trials).value:.3g}, solved {trials[0].value:.3g}"


def _promising(errors: Sequence[GradientError], best: Sequence[GradientError]) -> bool:
    """Return False if the trial is worse than the best by more than a standard error of the difference."""
    pairs = zip(best[: len(errors)], errors, strict=True)
    gains = [before.ratio - after.ratio for before, after in pairs]
    return bool(np.isfinite(gains).all()) and statistics.fmean(gains) > -standard_error(gains)
