"""The study: search for a policy near the exact solution whose measured joint error is lower.

The hard part is chance: the best of many noisy trials mostly looks better than it is. So all trials use the
same batches and rounding seeds, promising ones are measured on more of them, and the best trial must beat the
exact solution on fresh batches and seeds by more than two standard errors of the paired difference. An
interrupted study ends as an uninterrupted one: samplers are seeded by the trial's slot, all state is stored.
Several workers may take part (`mesa_tune.search.fleet`); the exact solution is always the first trial.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mesa_tune.policy import Policy
from mesa_tune.profiler.errors.joint_error import Objective, Pair
from mesa_tune.search.fleet.trials import Standing, Trials
from mesa_tune.search.moves import Moves
from mesa_tune.search.plan import Measurement
from mesa_tune.search.problem import Limits
from mesa_tune.search.solver import Program

# Pairs (draw of the batch, rounding seed). A trial is first measured on one seed per draw, then on all.
DRAWS = range(4)
SCREEN: tuple[Pair, ...] = tuple((draw, 0) for draw in DRAWS)
FULL: tuple[Pair, ...] = SCREEN + tuple((draw, seed) for draw in DRAWS for seed in (1, 2))
FRESH: tuple[Pair, ...] = tuple((draw, seed) for draw in range(1000, 1004) for seed in range(100, 104))
_PAUSE = 0.5

Chosen = tuple[int, ...]


@dataclass(frozen=True)
class Length:
    """Length of a study: `trials` of all workers together, and the time (`time.time`) at which it ends."""

    trials: int | None = None
    end: float | None = None

    @staticmethod
    def of(trials: int | None, timeout: float | None) -> Length:
        """Return the length of a study that begins now and takes `timeout` seconds."""
        return Length(trials, None if timeout is None else time.time() + timeout)

    def is_reached(self, done: int) -> bool:
        """Return True after `done` trials, or if the time is up."""
        return (self.trials is not None and done >= self.trials) or (
            self.end is not None and time.time() >= self.end
        )


@dataclass(frozen=True)
class Outcome:
    """Result of a study: the chosen plan, its joint error on fresh batches, and the number of trials.

    `won`: the plan is not the exact solution.
    """

    chosen: Chosen
    measured: Measurement
    trials: int
    won: bool


@dataclass(frozen=True)
class Finished:
    """A finished trial: its plan, its errors at the first pairs of `FULL`, and the estimated mean of all."""

    chosen: Chosen
    errors: tuple[float, ...]
    value: float

    @property
    def is_complete(self) -> bool:
        return len(self.errors) == len(FULL)


class LocalSearch:
    """Search around the exact solution `solved` that measures joint errors. `seed`: of all samplers."""

    def __init__(
        self,
        program: Program,
        solved: Chosen,
        limits: Limits,
        objective: Objective,
        policy_of: Callable[[Chosen], Policy],
        seed: int = 0,
    ) -> None:
        self.space = program.space
        self.solved = solved
        self.objective = objective
        self.policy_of = policy_of
        self.seed = seed
        # Never larger than the exact solution, in peak or in saved bytes.
        self.limits = replace(limits, peak=int(self.space.live(solved).max()), saved=self.space.saved(solved))
        self.moves = Moves(program, self.limits)
        self._known: dict[int, Finished] = {}
        self._distributions: dict[Any, Any] = {}

    def explore(
        self, all_trials: Trials, length: Length, progress: Callable[[str], None] | None = None
    ) -> None:
        """Run trials until the study has its length. Raise as the storage and the objective do."""
        while True:
            standing = all_trials.standing()
            trials = self._read(standing)
            if progress and trials:
                progress(_status(trials, length.trials))
            if length.is_reached(len(trials)):
                return
            first_is_missing = not trials and standing.running
            if first_is_missing or (length.trials is not None and standing.taken >= length.trials):
                time.sleep(_PAUSE)  # other workers are measuring what is needed next
                continue
            self._run_trial(all_trials, standing, trials, length.trials)

    def finished(self, all_trials: Trials) -> list[Finished]:
        """Return the finished trials, the exact solution first."""
        return self._read(all_trials.standing())

    def _read(self, standing: Standing) -> list[Finished]:
        for trial in standing.finished:
            if trial.number not in self._known:
                # Optuna caches each trial with distributions of its own, which are half of its memory.
                trial.distributions = {
                    name: self._distributions.setdefault(distribution, distribution)
                    for name, distribution in trial.distributions.items()
                }
                attributes = trial.user_attrs
                for name in ("chosen", "errors"):
                    attributes[name] = tuple(attributes[name])
                self._known[trial.number] = Finished(attributes["chosen"], attributes["errors"], trial.value)
        return [self._known[trial.number] for trial in standing.finished]

    def _run_trial(
        self, all_trials: Trials, standing: Standing, trials: Sequence[Finished], limit: int | None
    ) -> None:
        from mesa_tune.search.fleet.sampler import sampler_of

        asked = all_trials.ask(limit)
        if asked is None:
            return
        trial, slot = asked
        if not trials and slot:  # two workers asked for the first trial at once
            all_trials.fail(trial.number)
            return
        history = [*standing.finished, *standing.running]
        fixed = {} if trials else self.moves.neutral
        all_trials.study.sampler = sampler_of(self.seed, slot, history, fixed)
        try:
            with all_trials.beating(trial):
                chosen = self._chosen(trial, trials)
                errors, value = self._measured(chosen, trials)
            trial.set_user_attr("chosen", list(chosen))
            trial.set_user_attr("errors", list(errors))
            self._constrain(trial, chosen)
        except BaseException:
            all_trials.fail(trial.number)
            raise
        all_trials.complete(trial, value)

    def _chosen(self, trial: Any, trials: Sequence[Finished]) -> Chosen:
        if not trials:
            self.moves.propose(trial, self.solved)
            return self.solved
        return self.moves.propose(trial, _best(trials).chosen)

    def _constrain(self, trial: Any, chosen: Chosen) -> None:
        """Set the constraints of every trial: Optuna counts a trial without constraints as feasible."""
        assert self.limits.peak is not None
        assert self.limits.saved is not None
        trial.set_constraint("peak", int(self.space.live(chosen).max()) / self.limits.peak - 1)
        trial.set_constraint("saved", self.space.saved(chosen) / max(1, self.limits.saved) - 1)

    def _measured(self, chosen: Chosen, trials: Sequence[Finished]) -> tuple[tuple[float, ...], float]:
        """Return errors at the measured pairs, and the mean over all, scaled from the exact solution's."""
        equal = next((trial for trial in trials if trial.chosen == chosen), None)
        if equal is not None:
            return equal.errors, equal.value
        policy = self.policy_of(chosen)
        if not trials:
            errors = self.objective.errors(policy, FULL)
            return tuple(errors), statistics.fmean(errors)
        errors = self.objective.errors(policy, SCREEN)
        if _promising(errors, _best(trials).errors):
            errors = [*errors, *self.objective.errors(policy, FULL[len(SCREEN) :])]
        first = trials[0]
        return tuple(errors), first.value * sum(errors) / sum(first.errors[: len(errors)])

    def confirmed(self, trials: Sequence[Finished]) -> Outcome:
        """Measure on fresh pairs. Return the best trial if it beats the exact solution there, else this."""
        solved = self.objective.errors(self.policy_of(self.solved), FRESH)
        best = _best(trials).chosen if trials else self.solved
        if best != self.solved:
            errors = self.objective.errors(self.policy_of(best), FRESH)
            measured = measurement(errors, solved)
            if measured.gain > 2 * measured.gain_error:
                return Outcome(best, measured, len(trials), True)
        return Outcome(self.solved, measurement(solved, solved), len(trials), False)


def measurement(errors: Sequence[float], solved: Sequence[float]) -> Measurement:
    """Return the means of errors at the same pairs, and the paired difference with its standard error."""
    gains = [before - after for before, after in zip(solved, errors, strict=True)]
    return Measurement(
        gradient_error=statistics.fmean(errors),
        standard_error=_standard_error(errors),
        solved=statistics.fmean(solved),
        gain=statistics.fmean(gains),
        gain_error=_standard_error(gains),
        pairs=len(errors),
    )


def _standard_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values))


def _promising(errors: Sequence[float], best: Sequence[float]) -> bool:
    """Return False if the trial is worse than the best by more than a standard error of the difference."""
    gains = [before - after for before, after in zip(best[: len(errors)], errors, strict=True)]
    return bool(np.isfinite(errors).all()) and statistics.fmean(gains) > -_standard_error(gains)


def _best(trials: Sequence[Finished]) -> Finished:
    """Return the trial with the lowest value among those measured at all pairs; of equal ones the first."""
    return min((trial for trial in trials if trial.is_complete), key=lambda trial: trial.value)


def _status(trials: Sequence[Finished], limit: int | None) -> str:
    total = f" of {limit}" if limit else ""
    best, solved = _best(trials).value, trials[0].value
    return f"trial {len(trials)}{total}: gradient error {best:.3g}, solved {solved:.3g}"
