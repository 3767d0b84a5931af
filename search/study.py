"""The study: does anything near the exact solution do better when the whole gradient is measured?

What is hard is luck. Of many noisy trials the best is always better than the rest, and mostly by chance. So
all trials meet the same batches and rounding seeds, promising ones are measured longer, and the winner must
beat the exact solution on batches and seeds that nothing was chosen on, by more than two standard errors of
the paired difference. Each trial's sampler is seeded by its number and all state is in the storage, so that
a study that was interrupted ends as if it had not been.
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
from mesa_tune.profiler.joint_error import Objective, Pair
from mesa_tune.search.moves import Moves
from mesa_tune.search.plan import Measurement
from mesa_tune.search.solver import Program, Solution
from mesa_tune.search.space import Limits
from mesa_tune.search.storage import explaining, open_study

# Pairs (draw of the batch, rounding seed). A trial is screened on one seed a draw, then measured on all.
DRAWS = range(4)
SCREEN: tuple[Pair, ...] = tuple((draw, 0) for draw in DRAWS)
FULL: tuple[Pair, ...] = SCREEN + tuple((draw, seed) for draw in DRAWS for seed in (1, 2))
FRESH: tuple[Pair, ...] = tuple((draw, seed) for draw in range(1000, 1004) for seed in range(100, 104))
_STARTUP = 10

Chosen = tuple[int, ...]


@dataclass(frozen=True)
class Request:
    """How long to try, and where the study lives. `identity`: equal for equal problems alone."""

    identity: str
    trials: int | None
    timeout: float | None
    seed: int = 0
    storage: str | Path | None = None
    labels: dict[str, Any] = field(default_factory=dict)
    progress: Callable[[str], None] | None = None


@dataclass(frozen=True)
class Outcome:
    """The plan to take, its joint error on fresh batches, and what the study was.

    `asked`: the trials that were to be, None for as many as there is time for.
    """

    chosen: Chosen
    measured: Measurement
    trials: int
    won: bool
    asked: int | None = None


@dataclass(frozen=True)
class _Tried:
    """A finished trial: its choice, its errors at the first pairs of `FULL`, and their estimate for all."""

    number: int
    chosen: Chosen
    errors: tuple[float, ...]
    value: float

    @property
    def whole(self) -> bool:
        return len(self.errors) == len(FULL)


class Improvement:
    """A search around `solved` that measures joint errors; see the module."""

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
        self.limits = Limits(
            int(self.space.live(solved.chosen).max()), self.space.saved(solved.chosen), limits.ms
        )
        self.moves = Moves(program, self.limits)

    def run(self, request: Request) -> Outcome:
        """Try until the trials or the time are used up, then confirm. After Ctrl-C it goes on later.

        RunError for a storage that cannot be used.
        """
        study = open_study(request.storage, f"mesa-tune {request.identity}", request.labels)
        with explaining(request.storage):
            if not study.get_trials(deepcopy=False):
                study.enqueue_trial(self.moves.neutral)
            tried = _finished(study)
            end = None if request.timeout is None else time.monotonic() + request.timeout
            while _goes_on(len(tried), request.trials, end):
                self._try(study, tried, request.seed)
                tried = _finished(study)
                if request.progress:
                    request.progress(_status(tried, request.trials))
        return replace(self._confirmed(tried), asked=request.trials)

    def _try(self, study: Any, tried: Sequence[_Tried], seed: int) -> None:
        study.sampler = _sampler(seed, len(tried))
        trial = study.ask()
        done = False
        try:
            chosen = self._chosen(trial, tried)
            errors, value = self._measured(chosen, tried)
            trial.set_user_attr("chosen", list(chosen))
            trial.set_user_attr("errors", list(errors))
            self._constrain(trial, chosen)
            study.tell(trial, value)
            done = True
        finally:
            if not done:
                study.tell(trial, state=_failed())

    def _chosen(self, trial: Any, tried: Sequence[_Tried]) -> Chosen:
        if not tried:
            self.moves.propose(trial, self.solved.chosen)
            return self.solved.chosen
        return self.moves.propose(trial, _best(tried).chosen)

    def _constrain(self, trial: Any, chosen: Chosen) -> None:
        """Optuna counts a trial without constraints as feasible, so they are always set."""
        assert self.limits.peak is not None
        assert self.limits.saved is not None
        trial.set_constraint("peak", int(self.space.live(chosen).max()) / self.limits.peak - 1)
        trial.set_constraint("saved", self.space.saved(chosen) / max(1, self.limits.saved) - 1)

    def _measured(self, chosen: Chosen, tried: Sequence[_Tried]) -> tuple[tuple[float, ...], float]:
        """Errors at the pairs, and the estimated mean over all, by way of the exact solution's."""
        known = next((one for one in tried if one.chosen == chosen), None)
        if known is not None:
            return known.errors, known.value
        policy = self.policy_of(chosen)
        if not tried:
            errors = self.objective.errors(policy, FULL)
            return tuple(errors), statistics.fmean(errors)
        errors = self.objective.errors(policy, SCREEN)
        if _promising(errors, _best(tried).errors):
            errors = [*errors, *self.objective.errors(policy, FULL[len(SCREEN) :])]
        base = tried[0]
        return tuple(errors), base.value * sum(errors) / sum(base.errors[: len(errors)])

    def _confirmed(self, tried: Sequence[_Tried]) -> Outcome:
        """The best trial if it beats the exact solution on fresh pairs, else the exact solution."""
        solved = self.objective.errors(self.policy_of(self.solved.chosen), FRESH)
        best = _best(tried).chosen if tried else self.solved.chosen
        if best != self.solved.chosen:
            errors = self.objective.errors(self.policy_of(best), FRESH)
            measured = measurement(errors, solved)
            if measured.gain > 2 * measured.gain_error:
                return Outcome(best, measured, len(tried), True)
        return Outcome(self.solved.chosen, measurement(solved, solved), len(tried), False)


def measurement(errors: Sequence[float], solved: Sequence[float]) -> Measurement:
    """What errors at the same pairs say: means, and the paired difference with its standard error."""
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
    """True unless the trial is worse than the best one by more than a standard error of their difference."""
    gains = [before - after for before, after in zip(best[: len(errors)], errors, strict=True)]
    return bool(np.isfinite(errors).all()) and statistics.fmean(gains) > -_standard_error(gains)


def _best(tried: Sequence[_Tried]) -> _Tried:
    """The lowest estimate among trials measured at all pairs; of equal ones the first."""
    return min((one for one in tried if one.whole), key=lambda one: one.value)


def _finished(study: Any) -> list[_Tried]:
    from optuna.trial import TrialState

    return [
        _Tried(number, tuple(trial.user_attrs["chosen"]), tuple(trial.user_attrs["errors"]), trial.value)
        for number, trial in enumerate(study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)))
    ]


def _goes_on(done: int, trials: int | None, end: float | None) -> bool:
    return (trials is None or done < trials) and (end is None or time.monotonic() < end)


def _status(tried: Sequence[_Tried], trials: int | None) -> str:
    total = f" of {trials}" if trials else ""
    return f"trial {len(tried)}{total}: gradient error {_best(tried).value:.3g}, solved {tried[0].value:.3g}"


def _sampler(seed: int, number: int) -> Any:
    from optuna.samplers import TPESampler

    mixed = int(np.random.SeedSequence([seed, number]).generate_state(1)[0])
    return TPESampler(seed=mixed, n_startup_trials=_STARTUP)


def _failed() -> Any:
    from optuna.trial import TrialState

    return TrialState.FAIL
