"""A worker of a study: it runs trials, and confirms the best of them.

The exact solution is the first trial. Where it was measured above a limit on noise ratio or slowdown, the
next ones move that limit by as much; then Optuna's TPE proposes. The best trial replaces the exact solution
only if it beats it in measurements that nothing else used, by more than two standard errors.
"""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mesa_tune.policy import Policy
from mesa_tune.search.objectives import to_same_result
from mesa_tune.search.plan import Measurement, TrialEntry
from mesa_tune.search.problem import Chosen
from mesa_tune.search.study.knobs import Knobs
from mesa_tune.search.study.trial import (
    ROUNDS,
    Goal,
    Measured,
    Meter,
    fresh,
    measurement,
    standard_error,
)

_CORRECTIONS = 4
_PATIENCE = 20
"""A study ends after so many trials without a gain."""
_STEPS = 35
"""Plain steps that a trial takes about as long as."""
_KNOWN = 0.02
"""Width of the interval of a step's time that is known."""
_NO_TIME = "time was up"
_WON = {"time": "step's time", "error": "noise ratio", "memory": "peak"}


@dataclass(frozen=True)
class Outcome:
    """Result of a study: the chosen plan, what was measured of it, and the trials.

    `measured`: None where there was no time for a trial. `won`: in words, how the plan is better than the
    exact solution; empty if it is the exact solution. `ended`: why there were no more trials, where there
    could have been.
    """

    chosen: Chosen
    measured: Measurement | None
    history: tuple[TrialEntry, ...]
    won: str = ""
    ended: str = ""


class Worker:
    """Runs trials of `study` around the plan `solved`.

    `policy_of`: the policy of a plan. `step`: seconds of a plain step. `seed`: of the sampler, None for
    another one in each process.
    """

    def __init__(
        self,
        study: Any,
        goal: Goal,
        knobs: Knobs,
        solved: Chosen,
        policy_of: Callable[[Chosen], Policy],
        meter: Meter,
        step: float,
        seed: int | None,
    ) -> None:
        from optuna.exceptions import ExperimentalWarning
        from optuna.samplers import TPESampler

        self.study, self.goal, self.knobs, self.solved = study, goal, knobs, solved
        self.policy_of, self.meter = policy_of, meter
        self.longest = _STEPS * step
        self.own, self.ended, self.end = 0, "", math.inf
        mixed = None if seed is None else seed + len(study.get_trials(deepcopy=False))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            # The first trials are given, and TPE starts right after them.
            study.sampler = TPESampler(n_startup_trials=1, multivariate=True, seed=mixed)

    def measure_solved(self, end: float) -> None:
        """Measure the exact solution, unless that is done or takes longer than until `end`."""
        self.end = end
        if not self.plans() and time.monotonic() + self.longest <= end:
            if not any(trial.state.name == "WAITING" for trial in self.study.get_trials(deepcopy=False)):
                self.study.enqueue_trial(self.knobs.neutral, user_attrs={"given": "solved"})
            self._optimize(1)

    def run(self, trials: int | None, end: float, progress: Callable[[str], None] | None = None) -> None:
        """Run trials until so many measured a plan, or there is nothing to win, or until `end`.

        Raise as the storage and the measurements do.
        """

        self.end = end

        def is_over() -> bool:
            plans = self.plans()
            if progress and plans:
                total = f" of {trials}" if trials else ""
                progress(f"trial {len(plans)}{total}: {self._status(plans)}")
            if trials is not None and len(plans) >= trials:
                return True
            self.ended = self._ended(plans)
            return bool(self.ended)

        if not is_over():
            self._optimize(None, lambda study, _: study.stop() if is_over() else None)

    def plans(self) -> list[Measured]:
        """Return what the finished trials measured, the exact solution first."""
        plans = [Measured.from_dict(trial.user_attrs) for trial in self.finished() if has_plan(trial)]
        first = next((number for number, plan in enumerate(plans) if plan.chosen == self.solved), None)
        return plans if first is None else [plans.pop(first), *plans]

    def finished(self) -> list[Any]:
        """Return the finished trials. Pruned ones had no plan, or one that is clearly no better."""
        from optuna.trial import TrialState

        states = (TrialState.COMPLETE, TrialState.PRUNED)
        return list(self.study.get_trials(deepcopy=False, states=states))

    def best(self, plans: Sequence[Measured]) -> Measured:
        """Return the plan of the lowest value within the limits; without any, the exact solution."""
        inside = [plan for plan in plans if self.goal.is_within(plan)]
        return min(inside or plans[:1], key=self.goal.value)

    def confirmed(self) -> Outcome:
        """Return the best plan if it beats the exact solution in fresh measurements, else this."""
        plans = self.plans()
        if not plans:
            return Outcome(self.solved, None, (), ended=self.ended)
        history, solved, best = tuple(map(self.goal.entry, plans)), plans[0], self.best(plans)
        if best.chosen != solved.chosen:
            solved, best = self._afresh((solved.chosen, best.chosen), len(plans))
            if won := self._won(solved, best):
                return Outcome(best.chosen, self._measurement(best, solved), history, won, self.ended)
        measured = self._measurement(solved, solved)
        return Outcome(solved.chosen, measured, history, ended=self.ended)

    def _measurement(self, plan: Measured, solved: Measured) -> Measurement:
        return measurement(plan.errors, solved.errors, self.goal.ratio(plan.errors))

    def _afresh(self, plans: Sequence[Chosen], trials: int) -> list[Measured]:
        """Measure plans on fresh batches, and steps of all in turn."""
        policies = [self.policy_of(chosen) for chosen in plans]
        errors = [tuple(self.meter.errors(policy, fresh(trials))) for policy in policies]
        times = self.meter.step_times([Policy(()), *policies], 2 * ROUNDS) if self.goal.is_timed else []
        return [
            Measured(chosen, own, tuple(row[number] / row[0] for row in times))
            for number, (chosen, own) in enumerate(zip(plans, errors, strict=True), 1)
        ]

    def _won(self, solved: Measured, best: Measured) -> str:
        """Return in words how `best` is better in fresh measurements; empty if it is not."""
        goal, exceeded = self.goal, self.goal.exceeded(solved)
        if goal.exceeded(best):
            return ""
        gains = self._gains(solved, best)
        gain, error = statistics.fmean(gains), standard_error(gains)
        if gain > 2 * error:
            return f"{gain:.1%} ± {error:.1%} of the {_WON[goal.objective]} in fresh measurements"
        return f"by {' and '.join(exceeded)}, which the solved plan exceeds" if exceeded else ""

    def _gains(self, solved: Measured, best: Measured) -> list[float]:
        """Return how much lower the best plan's value is, as a fraction, in each fresh measurement."""
        goal = self.goal
        if goal.objective == "time":
            ratios = [goal.ratio(plan.errors) or 0.0 for plan in (solved, best)]
            pairs = [
                (to_same_result(before, ratios[0]), to_same_result(after, ratios[1]))
                for before, after in zip(solved.paces, best.paces, strict=True)
            ]
        elif goal.objective == "error":
            pairs = [(old.ratio, new.ratio) for old, new in zip(solved.errors, best.errors, strict=True)]
        else:
            pairs = [(goal.value(solved), goal.value(best))] * 2
        return [1 - after / before for before, after in pairs]

    def _optimize(self, count: int | None, callback: Callable[..., None] | None = None) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="optuna")
            self.study.optimize(self._objective, count, callbacks=[callback] if callback else None)

    def _objective(self, trial: Any) -> float:
        from optuna import TrialPruned

        plans, setting, given = self.plans(), self.knobs.asked(trial), trial.user_attrs.get("given")
        chosen = self.solved if given == "solved" else self.knobs.solved(setting)
        known = next((plan for plan in plans if plan.chosen == chosen), None)
        plan = known if chosen is None or known else self._measured(chosen, plans)
        if plan is None:
            raise TrialPruned
        for name, values in plan.to_dict().items():
            trial.set_user_attr(name, values)
        if given:
            self._correct(trial.params, plan)
        self.own += 1
        # Last, and in every trial: one that is repeated has those of the lost one.
        for name, excess in self.goal.excesses(plan).items():
            trial.set_constraint(name, excess)
        if plan.is_whole:
            return self.goal.value(plan)
        trial.report(self.goal.value(plan), step=len(plan.errors))
        raise TrialPruned

    def _measured(self, chosen: Chosen, plans: Sequence[Measured]) -> Measured | None:
        """Measure a plan that none of `plans` is; None if its traced step takes too much, or time was up."""
        began, policy = time.monotonic(), self.policy_of(chosen)
        if chosen != self.solved and not self.goal.fits(policy, self.meter):
            return None
        best = self.best(plans) if plans else None
        plan = self.goal.measured(chosen, policy, self.meter, best, self.end)
        self.longest = math.inf if plan is None else time.monotonic() - began
        return plan

    def _correct(self, params: dict[str, Any], plan: Measured) -> None:
        """Let a next trial move the limits that a given plan exceeds."""
        done = sum("given" in trial.user_attrs for trial in self.study.get_trials(deepcopy=False))
        moved = self.knobs.corrected(params, plan)
        if moved and done <= _CORRECTIONS:
            self.study.enqueue_trial(moved, user_attrs={"given": "corrected"})

    def _ended(self, plans: Sequence[Measured]) -> str:
        """Return why there is nothing more to win, or no time to win and confirm it; empty if there is."""
        if not plans:
            return _NO_TIME
        best = self.best(plans)
        more = 1 if best.chosen == self.solved else 3
        if time.monotonic() + more * self.longest > self.end:
            return _NO_TIME
        if self.goal.objective == "time" and self.goal.is_within(best):
            error = standard_error(best.paces)
            if 4 * error <= _KNOWN and abs(statistics.median(best.paces) - 1) <= 2 * error:
                return "its step is as fast as plain's"
        without = len(self.finished()) - len(plans)  # above a limit that it moved
        if len(plans) - 1 - plans.index(best) + without >= _PATIENCE:
            return f"{_PATIENCE} in turn gained nothing"
        return ""

    def _status(self, plans: Sequence[Measured]) -> str:
        values = [self.goal.value(plan) for plan in (self.best(plans), plans[0])]
        if self.goal.objective == "memory":
            return f"peak {values[0] / values[1]:.1%} of the solved one"
        if self.goal.objective == "error":
            return f"noise ratio {values[0]:.3g}, solved {values[1]:.3g}"
        return f"time {values[0]:.3f}x, solved {values[1]:.3f}x"


def has_plan(trial: Any) -> bool:
    """Return True for a trial that has measured a plan."""
    return trial.state.is_finished() and "paces" in trial.user_attrs
