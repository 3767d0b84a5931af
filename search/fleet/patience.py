"""A storage that waits for a database server which is away, and then repeats the operation.

Optuna repeats the creation of a trial only, for some seconds. Here every operation is repeated, with pauses
that grow, until the server has been away for `PATIENCE` seconds. All operations but two give the same result
when they are repeated. Of a trial that was stored twice, its worker gives up the second. A state that was
stored, though the answer was lost, counts as set.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.storages import BaseStorage, RDBStorage, _CachedStorage
from sqlalchemy.exc import (
    DBAPIError,
    InterfaceError,
    OperationalError,
    PendingRollbackError,
    SQLAlchemyError,
)

PATIENCE = 600.0
"""Seconds that an operation waits for a server which is away."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 10.0

# SQLSTATE: connection lost, shutdown or start of the server, too many connections, deadlock.
_PASSING = ("08", "57P", "53300", "40")


class PatientStorage(_CachedStorage):
    """A database, cached as by Optuna, whose operations wait for a server that is away.

    `patience`: seconds; 0 from the moment that they were once too few.
    """

    def __init__(self, backend: RDBStorage) -> None:
        self.patience = PATIENCE
        super().__init__(backend)

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        return partial(self._repeated, name, value) if name in BaseStorage.__abstractmethods__ else value

    def _repeated(self, name: str, operation: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        end, pause = time.monotonic() + self.patience, _FIRST_PAUSE
        failed = False
        while True:
            try:
                return operation(*args, **kwargs)
            except UpdateFinishedTrialError:
                if failed and name == "set_trial_state_values" and self._is_set(*args, **kwargs):
                    return True
                raise
            except (StorageInternalError, SQLAlchemyError) as error:
                if not is_passing(error):
                    raise
                if time.monotonic() > end:
                    self.patience = 0.0
                    raise
            failed = True
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _is_set(self, trial_id: int, state: Any, values: Any = None) -> bool:
        trial = self.get_trial(trial_id)
        return trial.state == state and (values is None or list(values) == trial.values)


def is_passing(error: BaseException | None) -> bool:
    """Return True if `error` says that the server is away, or has too much to do."""
    if isinstance(error, StorageInternalError):
        error = error.__cause__
    # Optuna asks again in a session whose connection is lost.
    if not isinstance(error, DBAPIError):
        return isinstance(error, PendingRollbackError)
    state = getattr(error.orig, "sqlstate", None) or getattr(error.orig, "pgcode", None)
    if state:
        return str(state).startswith(_PASSING)
    return error.connection_invalidated or isinstance(error, (OperationalError, InterfaceError))
