"""What a trial measures of a plan, and what of it the study minimises.

The hard part is chance: the best of many noisy trials mostly looks better than it is. So all trials use the
same batches and rounding seeds, and the best one must win again in measurements that nothing else used.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mesa_tune.policy import Policy
from mesa_tune.profiles.own_noise import GradientError, Pair
from mesa_tune.search.objectives import to_same_result
from mesa_tune.search.plan import Measurement, TrialEntry
from mesa_tune.search.problem import Chosen, Limits, Space

# Each batch comes once: errors differ far more from batch to batch than from seed to seed.
FULL: tuple[Pair, ...] = tuple((draw, 0) for draw in range(8))
SCREEN = FULL[:4]
ROUNDS = 6
"""Rounds of timed steps in a trial: a plain one and one under the plan, in turn."""
_TIMED_AS_PAIRS = 8
"""They take about as long as the errors at so many pairs, of an exact and a compressed gradient."""
_FIRST_FRESH = 1_000_000


def fresh(trials: int) -> tuple[Pair, ...]:
    """Return the pairs that confirm the best of so many trials: no trial has them."""
    first = _FIRST_FRESH + len(FULL) * trials
    return tuple((draw, 100) for draw in range(first, first + len(FULL)))


class Meter(Protocol):
    """What a study measures."""

    def errors(self, policy: Policy, pairs: Sequence[Pair]) -> list[GradientError]:
        """Return the error of `policy` at each pair, infinite for a gradient with NaN; deterministic."""
        ...

    def step_times(self, policies: Sequence[Policy], rounds: int) -> list[list[float]]:
        """Return milliseconds of whole steps taken in turn: for each round, one under each policy."""
        ...

    def peak(self, policy: Policy) -> int | None:
        """Return the peak of a step traced under `policy`; None where it is unknown."""
        ...


@dataclass(frozen=True)
class Measured:
    """A plan, its errors at the first pairs of `FULL`, and times of its steps over those of plain steps."""

    chosen: Chosen
    errors: tuple[GradientError, ...]
    paces: tuple[float, ...] = ()

    @property
    def is_whole(self) -> bool:
        """True if errors were measured at all pairs; if not, the first were clearly too large."""
        return len(self.errors) == len(FULL)

    @property
    def pace(self) -> float | None:
        """Step time over plain's; None where it was not measured."""
        return statistics.median(self.paces) if self.paces else None

    def to_dict(self) -> dict[str, Any]:
        """Return lists, for the attributes of a trial."""
        return {name: list(value) for name, value in vars(self).items()}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Measured:
        """Return what `to_dict` wrote; other attributes are ignored."""
        errors = tuple(GradientError(*pair) for pair in values["errors"])
        return Measured(tuple(values["chosen"]), errors, tuple(values["paces"]))


@dataclass(frozen=True)
class Goal:
    """What is the least, `objective`, and within which `limits`, those on time at `plain_ms` of a plain step.

    `is_known`: whether the batches have noise.
    """

    objective: str
    space: Space
    limits: Limits
    plain_ms: float
    is_known: bool = True

    @property
    def is_timed(self) -> bool:
        """True if steps are timed."""
        return self.objective == "time" or self.limits.ms is not None

    @property
    def slowdown(self) -> float | None:
        """The limit on a step's time over plain's."""
        return None if self.limits.ms is None else self.limits.ms / self.plain_ms

    def ratio(self, errors: Sequence[GradientError]) -> float | None:
        """Return the noise ratio that errors show, None if it is unknown."""
        return statistics.fmean(error.ratio for error in errors) if self.is_known else None

    def peak(self, plan: Measured) -> int:
        """Return the peak bytes by the space."""
        return int(self.space.live(plan.chosen).max())

    def value(self, plan: Measured) -> float:
        """Return what the study minimises: time to the same result over plain's, noise ratio, or peak bytes.

        The time of a plan that was not timed is the predicted one.
        """
        if self.objective == "memory":
            return float(self.peak(plan))
        if self.objective == "error":
            return statistics.fmean(error.ratio for error in plan.errors)
        pace = self.space.ms(plan.chosen) / self.plain_ms if plan.pace is None else plan.pace
        return to_same_result(pace, self.ratio(plan.errors) or 0.0)

    def excesses(self, plan: Measured) -> dict[str, float]:
        """Return how far the plan exceeds each limit, as fractions of it; at most 0 within."""
        limits, space = self.limits, self.space
        pairs = {
            "peak": (self.peak(plan), limits.peak),
            "saved": (space.saved(plan.chosen), limits.saved),
            "noise": (self.ratio(plan.errors), limits.noise),
            "slowdown": (plan.pace, self.slowdown),
        }
        return {
            name: 0.0 if value is None else min(value / max(limit, 1e-12) - 1, 1e6)
            for name, (value, limit) in pairs.items()
            if limit is not None
        }

    def exceeded(self, plan: Measured) -> list[str]:
        """Return the limits that the plan exceeds, as far as it was measured."""
        return [name for name, excess in self.excesses(plan).items() if excess > 0]

    def is_within(self, plan: Measured) -> bool:
        """Return True for a plan that was measured to the end, and is within all limits."""
        timed = bool(plan.paces) or not self.is_timed
        return plan.is_whole and timed and not self.exceeded(plan)

    def fits(self, policy: Policy, meter: Meter) -> bool:
        """Return False for a plan whose traced step takes more than the limit on the peak."""
        peak = None if self.limits.peak is None else meter.peak(policy)
        return peak is None or self.limits.peak is None or peak <= self.limits.peak

    def may_win(self, errors: Sequence[GradientError], best: Measured) -> bool:
        """Return False if the first errors are too large by more than their standard error."""
        ratios = [error.ratio for error in errors]
        if not all(map(math.isfinite, ratios)):
            return False
        if self.objective == "error":
            pairs = zip(best.errors, ratios, strict=False)
            ratios = [ratio - before.ratio for before, ratio in pairs]
        limit = 0.0 if self.objective == "error" else self.limits.noise if self.is_known else None
        return limit is None or statistics.fmean(ratios) - standard_error(ratios) <= limit

    def measured(
        self, chosen: Chosen, policy: Policy, meter: Meter, best: Measured | None, end: float = math.inf
    ) -> Measured | None:
        """Measure a plan as far as it may be better than `best`; without it, whole.

        Return None as soon as the steps taken show that it takes longer than until `end`.
        """
        began, errors = time.monotonic(), list[GradientError]()
        for pair in FULL:
            errors += meter.errors(policy, [pair])
            now = time.monotonic()
            left = len(FULL) - len(errors) + (_TIMED_AS_PAIRS if self.is_timed else 0)
            if now + left * (now - began) / len(errors) > end:
                return None
            if len(errors) == len(SCREEN) and best is not None and not self.may_win(errors, best):
                break
        plan = Measured(chosen, tuple(errors))
        if not self.is_timed or not plan.is_whole:
            return plan
        if best is not None and "noise" in self.exceeded(plan):
            return plan
        times = meter.step_times([Policy(()), policy], ROUNDS)
        return Measured(chosen, plan.errors, tuple(packed / plain for plain, packed in times))

    def entry(self, plan: Measured) -> TrialEntry:
        """Return what is reported of a trial."""
        return TrialEntry(
            value=_finite(self.value(plan)),
            peak_bytes=self.peak(plan),
            gradient_error=_finite(statistics.fmean(error.error for error in plan.errors)),
            noise_ratio=_finite(self.ratio(plan.errors)),
            is_within=not self.exceeded(plan),
            is_whole=plan.is_whole,
        )


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


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean of at least two values."""
    return statistics.stdev(values) / math.sqrt(len(values))


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
