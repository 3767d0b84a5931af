"""The study: search for a policy near the exact solution whose measured joint error is lower.

The hard part is chance: the best of many noisy trials mostly looks better than it is. So all trials use the
same batches and rounding seeds, promising ones are measured on more of them, and the best trial must beat the
exact solution on fresh batches and seeds by more than two standard errors of the paired difference. An
interrupted study ends as an uninterrupted one: samplers are seeded by trial number, all state is stored.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from mesa_tune.policy import Policy
from mesa_tune.profiler.errors.joint_error import Objective, Pair
from mesa_tune.search.moves import Moves
from mesa_tune.search.plan import Measurement
from mesa_tune.search.problem import Limits
from mesa_tune.search.solver import Program, Solution
from mesa_tune.search.storage import open_study, storage_errors

# Pairs (draw of the batch, rounding seed). A trial is first measured on one seed per draw, then on all.
DRAWS = range(4)
SCREEN: tuple[Pair, ...] = tuple((draw, 0) for draw in DRAWS)
FULL: tuple[Pair, ...] = SCREEN + tuple((draw, seed) for draw in DRAWS for seed in (1, 2))
FRESH: tuple[Pair, ...] = tuple((draw, seed) for draw in range(1000, 1004) for seed in range(100, 104))
_STARTUP = 10

Chosen = tuple[int, ...]


@dataclass(frozen=True)
class StudySettings:
    """Length and storage of a study. `identity`: a hash, equal only for equal problems."""

    identity: str
    trials: int | None
    timeout: float | None
    seed: int = 0
    storage: str | Path | None = None
    labels: dict[str, Any] = field(default_factory=dict)
    progress: Callable[[str], None] | None = None


@dataclass(frozen=True)
class Outcome:
    """Result of a study: the chosen plan, its joint error on fresh batches, and the number of trials.

    `won`: the plan is not the exact solution. `asked`: the limit on trials, None without.
    """

    chosen: Chosen
    measured: Measurement
    trials: int
    won: bool
    asked: int | None = None


@dataclass(frozen=True)
class _Trial:
    """A finished trial: its plan, its errors at the first pairs of `FULL`, and the estimated mean of all."""

    number: int
    chosen: Chosen
    errors: tuple[float, ...]
    value: float

    @property
    def is_complete(self) -> bool:
        return len(self.errors) == len(FULL)


class LocalSearch:
    """Search around `solved` that measures joint errors."""

    def __init__(
        self,
        program: Program,
        solved: Solution,
        limits: Limits,
        objective: Objective,
        policy_of: Callable[[Chosen], Policy],
    ) -> None:
        self.space = program.space
        self.solved = solved
        self.objective = objective
        self.policy_of = policy_of
        # Never larger than the exact solution, in peak or in saved bytes.
        self.limits = replace(
            limits, peak=int(self.space.live(solved.chosen).max()), saved=self.space.saved(solved.chosen)
        )
        self.moves = Moves(program, self.limits)

    def run(self, settings: StudySettings) -> Outcome:
        """Run trials until their number or the time is used up, then confirm the best one.

        After Ctrl-C the same call continues the study. Raise RunError for a storage that cannot be used.
        """
        study = open_study(settings.storage, f"mesa-tune {settings.identity}", settings.labels)
        with storage_errors(settings.storage):
            if not study.get_trials(deepcopy=False):
                study.enqueue_trial(self.moves.neutral)
            trials = _finished(study)
            end = None if settings.timeout is None else time.monotonic() + settings.timeout
            while _has_budget(len(trials), settings.trials, end):
                self._run_trial(study, trials, settings.seed)
                trials = _finished(study)
                if settings.progress:
                    settings.progress(_status(trials, settings.trials))
        return replace(self._confirmed(trials), asked=settings.trials)

    def _run_trial(self, study: Any, trials: Sequence[_Trial], seed: int) -> None:
        study.sampler = _sampler(seed, len(trials))
        trial = study.ask()
        done = False
        try:
            chosen = self._chosen(trial, trials)
            errors, value = self._measured(chosen, trials)
            trial.set_user_attr("chosen", list(chosen))
            trial.set_user_attr("errors", list(errors))
            self._constrain(trial, chosen)
            study.tell(trial, value)
            done = True
        finally:
            if not done:
                study.tell(trial, state=_failed())

    def _chosen(self, trial: Any, trials: Sequence[_Trial]) -> Chosen:
        if not trials:
            self.moves.propose(trial, self.solved.chosen)
            return self.solved.chosen
        return self.moves.propose(trial, _best(trials).chosen)

    def _constrain(self, trial: Any, chosen: Chosen) -> None:
        """Set the constraints of every trial: Optuna counts a trial without constraints as feasible."""
        assert self.limits.peak is not None
        assert self.limits.saved is not None
        trial.set_constraint("peak", int(self.space.live(chosen).max()) / self.limits.peak - 1)
        trial.set_constraint("saved", self.space.saved(chosen) / max(1, self.limits.saved) - 1)

    def _measured(self, chosen: Chosen, trials: Sequence[_Trial]) -> tuple[tuple[float, ...], float]:
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

    def _confirmed(self, trials: Sequence[_Trial]) -> Outcome:
        """Return the best trial if it beats the exact solution on fresh pairs, else the exact solution."""
        solved = self.objective.errors(self.policy_of(self.solved.chosen), FRESH)
        best = _best(trials).chosen if trials else self.solved.chosen
        if best != self.solved.chosen:
            errors = self.objective.errors(self.policy_of(best), FRESH)
            measured = measurement(errors, solved)
            if measured.gain > 2 * measured.gain_error:
                return Outcome(best, measured, len(trials), True)
        return Outcome(self.solved.chosen, measurement(solved, solved), len(trials), False)


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


def _best(trials: Sequence[_Trial]) -> _Trial:
    """Return the trial with the lowest value among those measured at all pairs; of equal ones the first."""
    return min((trial for trial in trials if trial.is_complete), key=lambda trial: trial.value)


def _finished(study: Any) -> list[_Trial]:
    from optuna.trial import TrialState

    return [
        _Trial(number, tuple(trial.user_attrs["chosen"]), tuple(trial.user_attrs["errors"]), trial.value)
        for number, trial in enumerate(study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)))
    ]


def _has_budget(done: int, trials: int | None, end: float | None) -> bool:
    return (trials is None or done < trials) and (end is None or time.monotonic() < end)


def _status(trials: Sequence[_Trial], limit: int | None) -> str:
    total = f" of {limit}" if limit else ""
    best, solved = _best(trials).value, trials[0].value
    return f"trial {len(trials)}{total}: gradient error {best:.3g}, solved {solved:.3g}"


def _sampler(seed: int, number: int) -> Any:
    from optuna.samplers import TPESampler

    mixed = int(np.random.SeedSequence([seed, number]).generate_state(1)[0])
    return TPESampler(seed=mixed, n_startup_trials=_STARTUP)


def _failed() -> Any:
    from optuna.trial import TrialState

    return TrialState.FAIL
