"""Operations on a database server that is away are repeated, and only those."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.trial import TrialState
from sqlalchemy.exc import OperationalError, PendingRollbackError, ProgrammingError

from mesa_tune.search.fleet import patience
from mesa_tune.search.fleet.patience import PatientStorage, is_passing

pytestmark = pytest.mark.slow("leaving")


class DriverError(Exception):
    """What a driver raises: `sqlstate` is PostgreSQL's code of the error, None without an answer."""

    def __init__(self, sqlstate: str | None = None) -> None:
        self.sqlstate = sqlstate
        super().__init__("of the driver")


def lost(sqlstate: str | None = None) -> OperationalError:
    return OperationalError("SELECT 1", {}, DriverError(sqlstate))


@pytest.fixture(name="clock")
def _clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that were slept."""
    slept = [0.0]

    def sleep(seconds: float) -> None:
        slept[0] += seconds

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "monotonic", lambda: slept[0])
    return slept


@pytest.fixture(name="storage")
def _storage(tmp_path: Path) -> PatientStorage:
    return PatientStorage(optuna.storages.RDBStorage(f"sqlite:///{tmp_path / 'study.db'}"))


def failing(method: Callable[..., Any], times: int, *, after: bool) -> Callable[..., Any]:
    """Return the method, whose first calls fail: before, or after it has done its work."""
    left = [times]

    def call(*arguments: Any, **more: Any) -> Any:
        result = method(*arguments, **more) if after or not left[0] else None
        if left[0]:
            left[0] -= 1
            raise lost("57P01")
        return result

    return call


@pytest.mark.parametrize("state", [None, "08006", "57P01", "57P03", "53300", "40P01"])
def test_a_server_that_is_away_passes(state: str | None) -> None:
    assert is_passing(lost(state))


@pytest.mark.parametrize("state", ["53100", "28P01", "42P01", "22001"])
def test_a_full_disk_or_a_wrong_password_does_not(state: str) -> None:
    assert not is_passing(lost(state))
    assert not is_passing(ProgrammingError("SELECT 1", {}, DriverError()))
    assert not is_passing(ValueError())


def test_the_cause_of_optunas_error_counts() -> None:
    error = StorageInternalError("in the commit")
    assert not is_passing(error)
    for cause in (lost(), PendingRollbackError("after a lost connection")):
        error.__cause__ = cause
        assert is_passing(error)


@pytest.mark.parametrize("name", ["set_trial_user_attr", "set_trial_state_values"])
@pytest.mark.parametrize("after", [False, True], ids=["before it was stored", "after it was stored"])
def test_an_operation_is_repeated(
    name: str, after: bool, storage: PatientStorage, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    study = optuna.create_study(storage=storage)
    trial = study.ask()
    monkeypatch.setattr(storage._backend, name, failing(getattr(storage._backend, name), 1, after=after))
    trial.set_user_attr("errors", [1.0])
    study.tell(trial, 2.0)
    [stored] = study.trials
    assert (stored.state, stored.value, stored.user_attrs) == (TrialState.COMPLETE, 2.0, {"errors": [1.0]})
    assert 0 < clock[0] < 1


def test_a_trial_that_others_finished_is_not_taken_for_ours(
    storage: PatientStorage, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    study = optuna.create_study(storage=storage)
    trial = study.ask()
    study.tell(trial, state=TrialState.FAIL)
    method = failing(storage._backend.set_trial_state_values, 1, after=False)
    monkeypatch.setattr(storage._backend, "set_trial_state_values", method)
    with pytest.raises(UpdateFinishedTrialError):
        storage.set_trial_state_values(trial._trial_id, TrialState.COMPLETE, [1.0])


def test_patience_ends_once(
    storage: PatientStorage, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage._backend, "get_all_studies", failing(list, 10_000, after=False))
    with pytest.raises(OperationalError):
        storage.get_all_studies()
    assert patience.PATIENCE < clock[0] < patience.PATIENCE + 20
    before = clock[0]
    with pytest.raises(OperationalError):
        storage.get_all_studies()
    assert clock[0] - before < 1
