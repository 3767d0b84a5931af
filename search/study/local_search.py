"""A study around the exact solution: trials propose plans and measure them, and the best must be confirmed.

The hard part is chance: the best of many noisy trials mostly looks better than it is. So all trials use the
same batches and rounding seeds, promising ones are measured further, and the best trial must beat the exact
solution in fresh measurements by more than two standard errors of the paired difference. An interrupted
study ends as an uninterrupted one: samplers are seeded by the trial's slot, all state is stored. Several
workers may take part (`mesa_tune.search.fleet`); the exact solution is always the first trial.
"""

from __future__ import annotations

import math
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mesa_tune.policy import Policy
from mesa_tune.profiler.errors.joint_error import GradientError, Pair
from mesa_tune.runs.provenance import hardware
from mesa_tune.search.fleet.trials import Standing, Trials
from mesa_tune.search.plan import Measurement, TrialEntry
from mesa_tune.search.problem import Limits
from mesa_tune.search.solver import Program
from mesa_tune.search.study.moves import Moves

# Pairs (draw of the batch, rounding seed). A trial is first measured on some, then on all. Each batch comes
# once: errors differ far more from batch to batch than from seed to seed.
FULL: tuple[Pair, ...] = tuple((draw, 0) for draw in range(8))
SCREEN = FULL[:4]
_FRESH, _LOOKS, _FIRST_FRESH = 16, 8, 1_000_000
_PAUSE = 0.5
_PROPOSING = 1
"""Tells the random numbers of a slot's proposal from others of the same slot."""

Chosen = tuple[int, ...]


def fresh(trials: int, look: int = 0) -> tuple[Pair, ...]:
    """Return pairs for one look at the result of so many trials; no other look, and no trial, has them."""
    first = _FIRST_FRESH + _FRESH * (_LOOKS * trials + look)
    return tuple([(draw, 100) for draw in range(first, first + _FRESH)])


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
    """Result of a study: the chosen plan, what was measured afresh, and the trials.

    `won`: in words, how the plan is better than the exact solution; empty if it is the exact solution.
    """

    chosen: Chosen
    measured: Measurement
    history: tuple[TrialEntry, ...]
    won: str = ""

    @property
    def trials(self) -> int:
        """Number of trials."""
        return len(self.history)


@dataclass(frozen=True)
class Finished:
    """A finished trial: its plan, its errors at the first pairs of `FULL`, and the value to minimise.

    `paces`: times of steps over those of plain steps taken in turn, on `hardware`; none where no time was
    measured.
    """

    chosen: Chosen
    errors: tuple[GradientError, ...]
    value: float
    paces: tuple[float, ...] = ()
    hardware: str = ""

    @property
    def is_whole(self) -> bool:
        """Return True if errors were measured at all pairs; if not, the first were clearly too large."""
        return len(self.errors) == len(FULL)

    @property
    def is_valid_here(self) -> bool:
        """Return True if the hardware of this process takes the same times."""
        return not self.paces or self.hardware == hardware()


class Meter(Protocol):
    """What a study measures."""

    def errors(self, policy: Policy, pairs: Sequence[Pair]) -> list[GradientError]:
        """Return the error of `policy` at each pair, infinite for a gradient with NaN; deterministic."""
        ...

    def step_times(self, policies: Sequence[Policy], rounds: int) -> list[list[float]]:
        """Return milliseconds of whole steps taken in turn: for each round, one under each policy."""
        ...


@dataclass(frozen=True)
class Scope:
    """What is searched: plans of `program` around its exact solution `solved`, within `limits`.

    `policy_of`: the policy of a plan. `seed`: of all samplers. `is_known`: whether the batches have noise.
    """

    program: Program
    solved: Chosen
    limits: Limits
    policy_of: Callable[[Chosen], Policy]
    seed: int
    is_known: bool = True


class LocalSearch(ABC):
    """Search around the exact solution. `moves`: how trials propose plans."""

    def __init__(self, scope: Scope, meter: Meter, moves: Moves) -> None:
        self.space = scope.program.space
        self.solved = scope.solved
        self.limits = scope.limits
        self.policy_of = scope.policy_of
        self.seed = scope.seed
        self.is_known = scope.is_known
        self.meter = meter
        self.moves = moves
        self._known: dict[int, Finished] = {}
        self._distributions: dict[Any, Any] = {}

    @abstractmethod
    def gain(self, chosen: Chosen, found: Measurement, solved: Measurement) -> str:
        """Return in words how a plan is better than the exact solution, empty if it is not.

        `found` and `solved` are fresh measurements of both.
        """

    @abstractmethod
    def best(self, trials: Sequence[Finished]) -> Finished:
        """Return the best of at least one trial; of equal ones the first."""

    @abstractmethod
    def fixed(self, trials: Sequence[Finished], slot: int) -> Mapping[str, Any]:
        """Return the parameters of the trial at `slot` that are not sampled."""

    @abstractmethod
    def measured(self, chosen: Chosen, trials: Sequence[Finished]) -> Finished:
        """Measure a plan that none of `trials` has; without trials, it is the exact solution."""

    @abstractmethod
    def status(self, trials: Sequence[Finished]) -> str:
        """Return the best trial so far in words."""

    def is_inside(self, trial: Finished) -> bool:
        """Return True if what was measured is within the limits."""
        return True

    def ratio(self, errors: Sequence[GradientError]) -> float | None:
        """Return the noise ratio that errors show, None if it is unknown."""
        return statistics.fmean(error.ratio for error in errors) if self.is_known else None

    def candidates(self, trials: Sequence[Finished], solved: Measurement) -> list[Chosen]:
        """Return the plans to confirm, in order; `solved` is a fresh measurement of the exact solution."""
        return [self.best(trials).chosen] if trials else []

    def confirmed(self, trials: Sequence[Finished]) -> Outcome:
        """Measure afresh. Return the first candidate that beats the exact solution there, else this."""
        solved, history = self._afresh(self.solved, fresh(len(trials))), self._history(trials)
        for look, chosen in enumerate(self.candidates(trials, solved), 1):
            if chosen != self.solved:
                found = self._afresh(chosen, fresh(len(trials), look))
                won = self.gain(chosen, found, solved)
                if won:
                    return Outcome(chosen, found, history, won)
        return Outcome(self.solved, solved, history)

    def _afresh(self, chosen: Chosen, pairs: Sequence[Pair]) -> Measurement:
        """Measure a plan and the exact solution at the same pairs."""
        before = errors = self.meter.errors(self.policy_of(self.solved), pairs)
        if chosen != self.solved:
            errors = self.meter.errors(self.policy_of(chosen), pairs)
        return measurement(errors, before, self.ratio(errors))

    def _history(self, trials: Sequence[Finished]) -> tuple[TrialEntry, ...]:
        return tuple(
            TrialEntry(
                value=_finite(trial.value),
                peak_bytes=int(self.space.live(trial.chosen).max()),
                gradient_error=_finite(statistics.fmean(error.error for error in trial.errors)),
                noise_ratio=_finite(self.ratio(trial.errors)),
                is_within=self.is_inside(trial),
                is_whole=trial.is_whole,
            )
            for trial in trials
        )

    def constraints(self, trial: Finished) -> dict[str, float]:
        """Return how far the plan exceeds each limit, as fractions of it; at most 0 within."""
        constraints = {}
        if self.limits.peak is not None:
            constraints["peak"] = int(self.space.live(trial.chosen).max()) / self.limits.peak - 1
        if self.limits.saved is not None:
            constraints["saved"] = self.space.saved(trial.chosen) / max(1, self.limits.saved) - 1
        return constraints

    def explore(
        self, all_trials: Trials, length: Length, progress: Callable[[str], None] | None = None
    ) -> None:
        """Run trials until the study has its length. Raise as the storage and the measurements do."""
        while True:
            standing = all_trials.standing()
            trials = self._read(standing)
            if progress and trials:
                total = f" of {length.trials}" if length.trials else ""
                progress(f"trial {len(trials)}{total}: {self.status(trials)}")
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
                for name in ("chosen", "paces"):
                    attributes[name] = tuple(attributes[name])
                attributes["errors"] = tuple(GradientError(*pair) for pair in attributes["errors"])
                chosen, errors, paces = (attributes[name] for name in ("chosen", "errors", "paces"))
                self._known[trial.number] = Finished(
                    chosen, errors, trial.value, paces, attributes["hardware"]
                )
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
        all_trials.study.sampler = sampler_of(self.seed, slot, history, self.fixed(trials, slot))
        try:
            with all_trials.beating(trial):
                generator = np.random.default_rng([self.seed, slot, _PROPOSING])
                chosen = self._proposed(trial, trials, generator)
                same = (one for one in trials if one.chosen == chosen and one.is_valid_here)
                finished = next(same, None) or self.measured(chosen, trials)
            for name in ("chosen", "errors", "paces"):
                trial.set_user_attr(name, list(getattr(finished, name)))
            # Of every trial: Optuna counts a trial without constraints as feasible.
            for name, value in self.constraints(finished).items():
                trial.set_constraint(name, value)
            trial.report(finished.value, step=len(finished.errors))
        except BaseException:
            all_trials.fail(trial.number)
            raise
        all_trials.finish(trial, finished.value, pruned=not finished.is_whole)

    def _proposed(self, trial: Any, trials: Sequence[Finished], generator: np.random.Generator) -> Chosen:
        if not trials:
            self.moves.propose(trial, self.solved, generator)
            return self.solved
        return self.moves.propose(trial, self.best(trials).chosen, generator)


def measurement(
    errors: Sequence[GradientError], solved: Sequence[GradientError], noise_ratio: float | None = None
) -> Measurement:
    """Return the means of errors at the same pairs, and the paired difference with its standard error."""
    gains = [before.ratio - after.ratio for before, after in zip(solved, errors, strict=True)]
    return Measurement(
        gradient_error=statistics.fmean(error.error for error in errors),
        standard_error=standard_error([error.error for error in errors]),
        solved=statistics.fmean(error.ratio for error in solved),
        gain=statistics.fmean(gains),
        gain_error=standard_error(gains),
        pairs=len(errors),
        noise_ratio=noise_ratio,
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean of at least two values."""
    return statistics.stdev(values) / math.sqrt(len(values))
