"""Workers of studies for tests: searches whose measurements cost nothing, and child processes."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import optuna

from mesa_tune.errors import RunError
from mesa_tune.search import Plan, search_policy
from mesa_tune.search.study.study import Joined, Work, join_search
from tests.search.meters import Weighted
from tests.synthetic import COARSE, synthetic_profile

BUDGET = "34%"
PROFILE = synthetic_profile(3, grid=COARSE, seed=1)
WEIGHTS = {"layernorm": 20.0}


def plan(trials: int, storage: str | Path | None, measure: Weighted | None = None, **more: Any) -> Plan:
    """Search in this process."""
    measure = measure or Weighted(PROFILE, WEIGHTS)
    return search_policy(PROFILE, BUDGET, measure=measure, trials=trials, storage=storage, **more)


def join(storage: str, measure: Weighted, trials: int | None = None, study: str = "mesa-tune") -> Joined:
    """Work on a study in this process."""
    return join_search(PROFILE, study, Work(storage, trials, None), lambda _: measure)


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


def done(storage: Any) -> list[optuna.trial.FrozenTrial]:
    """Return the trials of the only study in Optuna's own storage that measured a plan; none without one."""
    names = optuna.get_all_study_names(storage)
    trials = optuna.load_study(study_name=names[0], storage=storage).trials if names else []
    return [trial for trial in trials if trial.state.is_finished() and "paces" in trial.user_attrs]


def assert_none_is_repeated(trials: Sequence[optuna.trial.FrozenTrial]) -> None:
    """Assert that no two trials have the same parameters, and that each has its constraints."""
    assert len({str(trial.params) for trial in trials}) == len(trials)
    assert all("peak" in trial.constraints for trial in trials if "chosen" in trial.user_attrs)
