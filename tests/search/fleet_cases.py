"""Workers for the tests of studies: objectives that cost nothing, and child processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import optuna

from mesa_tune.errors import RunError
from mesa_tune.policy import Policy
from mesa_tune.profiler.errors.joint_error import GradientError, Pair
from mesa_tune.profiler.profile import Profile
from mesa_tune.search import Plan, search_policy
from mesa_tune.search.fleet.studies import Joined, Work, join_search
from mesa_tune.search.fleet.trials import FINISHED
from tests.search.test_search_study import BUDGET, Weighted
from tests.synthetic import COARSE, synthetic_profile

WEIGHTS = {"layernorm": 20.0}
PROFILE = synthetic_profile(3, grid=COARSE, seed=1)


class Slow(Weighted):
    """Takes `seconds` per call, without using the processor."""

    def __init__(self, seconds: float, profile: Profile = PROFILE) -> None:
        super().__init__(profile, WEIGHTS)
        self.seconds = seconds

    def errors(self, policy: Policy, pairs: Sequence[Pair]) -> list[GradientError]:
        time.sleep(self.seconds)
        return super().errors(policy, pairs)


class Killed(Weighted):
    """Kills its own process at its call number `call`, as `kill -9` does."""

    def __init__(self, call: int) -> None:
        super().__init__(PROFILE, WEIGHTS)
        self.left = call

    def errors(self, policy: Policy, pairs: Sequence[Pair]) -> list[GradientError]:
        self.left -= 1
        if not self.left:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().errors(policy, pairs)


def plan(trials: int, storage: str | Path | None, measure: Weighted | None = None, **more: Any) -> Plan:
    """Search in this process."""
    measure = measure or Weighted(PROFILE, WEIGHTS)
    return search_policy(PROFILE, BUDGET, measure=measure, trials=trials, storage=storage, **more)


def join(storage: str, measure: Weighted, trials: int | None = None, study: str = "mesa-tune") -> Joined:
    """Work on a study in this process."""
    return join_search(PROFILE, study, Work(storage, trials, None), lambda: measure)


def child(function: Callable[..., object], *arguments: Any) -> BaseProcess:
    """Start `function` in a process of its own. It ends with status 3, and its message, at a RunError."""
    process = multiprocessing.get_context("fork").Process(
        target=_run, args=(function, arguments), daemon=True
    )
    process.start()
    return process


def ended(process: BaseProcess) -> int | None:
    """Wait for the process, and return its status: minus a signal, or as `child` says."""
    process.join(120)
    return process.exitcode


def _run(function: Callable[..., object], arguments: Sequence[Any]) -> None:
    try:
        function(*arguments)
    except RunError as error:
        sys.stderr.write(f"{error}\n")
        sys.stderr.flush()
        os._exit(3)
    os._exit(0)


def wait_for(condition: Callable[[], object]) -> None:
    """Wait until the condition holds. Fail after a minute."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def trials_of(storage: Any) -> list[optuna.trial.FrozenTrial]:
    """Return the trials of the only study in Optuna's own storage."""
    [name] = optuna.get_all_study_names(storage)
    return list(optuna.load_study(study_name=name, storage=storage).trials)


def finished(trials: Sequence[optuna.trial.FrozenTrial]) -> list[optuna.trial.FrozenTrial]:
    """Return the finished ones of `trials`."""
    return [trial for trial in trials if trial.state.name in FINISHED]


def assert_none_lost_or_double(trials: Sequence[optuna.trial.FrozenTrial], count: int) -> None:
    """Assert that the study has `count` finished trials, one for each slot, and nothing that still runs."""
    assert sorted(trial.user_attrs["slot"] for trial in finished(trials)) == list(range(count))
    assert {trial.state.name for trial in trials} <= {*FINISHED, "FAIL"}
    for trial in finished(trials):
        assert "peak" in trial.constraints
        assert trial.user_attrs["hardware"]
