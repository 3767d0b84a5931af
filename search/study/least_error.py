"""The study of objective `error`: a plan whose measured joint error is lower than the exact solution's."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

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
from mesa_tune.search.study.moves import ErrorMoves


class LeastError(LocalSearch):
    """Minimise the mean joint error; a trial is never larger than the exact solution."""

    def __init__(
        self,
        program: Program,
        solved: Chosen,
        limits: Limits,
        meter: Meter,
        policy_of: Callable[[Chosen], Policy],
        seed: int = 0,
    ) -> None:
        super().__init__(solved, policy_of, seed)
        self.space, self.meter = program.space, meter
        self.limits = replace(limits, peak=int(self.space.live(solved).max()), saved=self.space.saved(solved))
        self.moves = ErrorMoves(program, self.limits)

    def best(self, trials: Sequence[Finished]) -> Finished:
        """Return the trial with the lowest value among those measured at all pairs."""
        complete = (trial for trial in trials if len(trial.errors) == len(FULL))
        return min(complete, key=lambda trial: trial.value)

    def fixed(self, trials: Sequence[Finished], slot: int) -> Mapping[str, Any]:
        """Return the neutral parameters for the exact solution."""
        return {} if trials else self.moves.neutral

    def measured(self, chosen: Chosen, trials: Sequence[Finished]) -> Finished:
        """Measure errors; the value is their mean over all pairs, scaled from the exact solution's."""
        policy = self.policy_of(chosen)
        if not trials:
            errors = self.meter.errors(policy, FULL)
            return Finished(chosen, tuple(errors), statistics.fmean(errors))
        errors = self.meter.errors(policy, SCREEN)
        if _promising(errors, self.best(trials).errors):
            errors = [*errors, *self.meter.errors(policy, FULL[len(SCREEN) :])]
        first = trials[0]
        value = first.value * sum(errors) / sum(first.errors[: len(errors)])
        return Finished(chosen, tuple(errors), value)

    def confirmed(self, trials: Sequence[Finished]) -> Outcome:
        """Measure on fresh pairs. Return the best trial if it beats the exact solution there, else this."""
        solved = self.meter.errors(self.policy_of(self.solved), FRESH)
        best = self.best(trials).chosen if trials else self.solved
        if best != self.solved:
            found = measurement(self.meter.errors(self.policy_of(best), FRESH), solved)
            if found.gain > 2 * found.gain_error:
                gain, error = found.gain / found.solved, found.gain_error / found.solved
                won = f"{gain:.1%} ± {error:.1%} of gradient error on fresh batches"
                return Outcome(best, found, len(trials), won)
        return Outcome(self.solved, measurement(solved, solved), len(trials))

    def status(self, trials: Sequence[Finished]) -> str:
        """Return the lowest error so far beside the exact solution's."""
        return f"gradient error {self.best(trials).value:.3g}, solved {trials[0].value:.3g}"


def _promising(errors: Sequence[float], best: Sequence[float]) -> bool:
    """Return False if the trial is worse than the best by more than a standard error of the difference."""
    gains = [before - after for before, after in zip(best[: len(errors)], errors, strict=True)]
    return bool(np.isfinite(errors).all()) and statistics.fmean(gains) > -standard_error(gains)
