"""Storage of a study: memory, a SQLite file, a journal, or a database server, each by Optuna's own means.

SQLite is for one process, so its file is locked while a study uses it. On a server, Optuna's heartbeats tell
which trials are lost, and enqueue them again; a journal has none, and a lost trial stays as it was.
"""

from __future__ import annotations

import sqlite3
import warnings
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from mesa_tune.errors import RunError
from mesa_tune.files import locked
from mesa_tune.search.study.address import Address

NAME = "mesa-tune-"
"""How the names of our studies begin."""
_REMEDIES = {
    "sqlite": "--force makes a new study, --run DIR one in another folder, --storage one in another database",
    "journal": "name another file with --storage journal:PATH, where there is room and a right to write",
    "server": "check the URL of --storage and that its database answers; the same command then goes on",
}
_DRIVER = 'pip install "mesa-tune[postgresql]" and write postgresql+psycopg://…, or install its driver'
_ONE_PROCESS = (
    "SQLite is for one process: several need --storage journal:PATH or postgresql+psycopg://… (docs/fleet.md)"
)
_BEAT, _SILENCE, _RETRIES = 15, 60, 3
"""Seconds between two signs of life of a worker, and without one until its trial is another's."""
# The server must not be waited for without end where a network drops packets.
_PSYCOPG = {
    "connect_timeout": 10,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
}


@contextmanager
def opened_study(address: Address, name: str, attributes: Mapping[str, Any]) -> Iterator[Any]:
    """Open the study `name`, or create it, and close it after the body. `attributes`: its user attributes.

    Raise RunError for a file that is damaged, in use or not a study's, and for a database that does not
    answer, also during the body.
    """
    import optuna

    with explained(address), _alone(address), _storage(address) as storage:
        study = optuna.create_study(
            storage=storage, study_name=name, load_if_exists=True, direction="minimize"
        )
        stored = study.user_attrs
        for key, value in attributes.items():
            if key not in stored or stored[key] != value:
                study.set_user_attr(key, value)
        if not address.is_shared:  # what a process that was killed left running
            for trial in study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,)):
                study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
        yield study


@contextmanager
def joined_study(address: Address, name: str) -> Iterator[Any]:
    """Open the one study whose name begins with `name`. Raise RunError as `opened_study` does."""
    import optuna

    require_shared(address)
    if address.path is not None and not address.path.is_file():
        raise RunError(
            f"{address.shown}: no such file\n--join takes part in a study that was begun elsewhere"
        )
    with explained(address), _storage(address) as storage:
        names = [study.study_name for study in storage.get_all_studies()]
        matches = [full for full in names if full == name] or [
            full for full in names if full.startswith((name, NAME + name))
        ]
        if len(matches) != 1:
            few = ", ".join(sorted(matches or names)[:3]) or "none"
            what = f"{len(matches)} studies begin so" if matches else "no such study"
            raise RunError(f"{address.shown}: join {name!r}: {what}\nstudies there: {few}")
        yield optuna.load_study(study_name=matches[0], storage=storage)


def require_shared(address: Address) -> None:
    """Raise RunError for a storage that is not safe with several processes."""
    if not address.is_shared:
        raise RunError(f"{address.shown}: for one worker only\n{_ONE_PROCESS}")


@contextmanager
def explained(address: Address) -> Iterator[None]:
    """Turn errors of the storage into a RunError that names it, without its password."""
    from alembic.util import CommandError
    from optuna.exceptions import OptunaError
    from sqlalchemy.exc import SQLAlchemyError

    errors: tuple[type[Exception], ...] = (SQLAlchemyError, OptunaError, CommandError, ImportError)
    if address.kind == "journal":
        errors += (OSError, ValueError, KeyError, AssertionError)
    if address.kind == "server":
        errors += (UnboundLocalError,)  # of Optuna, where a connection is lost between two statements
    try:
        yield
    except errors as error:
        remedy = _DRIVER if isinstance(error, ImportError) else _REMEDIES.get(address.kind, "")
        message = f"{address.shown}: the study cannot be used: {address.cleaned(_reason(error))}\n{remedy}"
        # The traceback of --debug would show the password, too.
        raise RunError(message) from (None if address.secrets else error)


def _reason(error: BaseException) -> str:
    """Return one line of what the storage says."""
    from optuna.exceptions import StorageInternalError

    if isinstance(error, StorageInternalError) and error.__cause__ is not None:
        error = error.__cause__
    error = getattr(error, "orig", None) or error
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return (lines[1] if lines[0].endswith(":") and len(lines) > 1 else lines[0])[:200]


@contextmanager
def _storage(address: Address) -> Iterator[Any]:
    from optuna import logging, storages

    logging.set_verbosity(logging.ERROR)
    if address.path is not None:
        _require_ours(address, address.path)
    if address.kind == "memory":
        yield storages.InMemoryStorage()
    elif address.path is not None and address.kind == "journal":
        from mesa_tune.search.study.journal import backend

        address.path.parent.mkdir(parents=True, exist_ok=True)
        yield storages.JournalStorage(backend(address.path))
    else:
        database = _database(address)
        try:
            yield storages.get_storage(database)
        finally:
            database.engine.dispose()


def _database(address: Address) -> Any:
    from optuna.exceptions import ExperimentalWarning
    from optuna.storages import RDBStorage, RetryHeartbeatStaleTrialCallback
    from sqlalchemy import event

    assert address.url is not None
    # Optuna fills in a template: braces in a password are no part of it.
    url = address.url.replace("{", "{{").replace("}", "}}")
    more: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        if address.kind == "server":
            psycopg = address.url.startswith(("postgresql+psycopg://", "postgresql+psycopg2://"))
            more["engine_kwargs"] = {"pool_pre_ping": True, "connect_args": _PSYCOPG if psycopg else {}}
            more |= {"heartbeat_interval": _BEAT, "grace_period": _SILENCE}
            more["heartbeat_stale_trial_callback"] = RetryHeartbeatStaleTrialCallback(max_retry=_RETRIES)
        try:
            database = RDBStorage(url, **more)
            if address.kind != "server":
                event.listen(database.engine, "connect", _hurry)
                database.engine.dispose()
            return database
        except RuntimeError as error:  # a database of a newer version
            remedy = _REMEDIES[address.kind]
            raise RunError(
                f"{address.shown}: the study cannot be used: {_reason(error)}\n{remedy}"
            ) from error


def _hurry(connection: Any, _: object) -> None:
    """Do not wait for the disk at each of a trial's parameters: a killed process loses nothing by that."""
    connection.execute("PRAGMA synchronous = OFF")


def _require_ours(address: Address, path: Path) -> None:
    """Raise RunError unless the file of the storage is a study's, or none yet."""
    is_ours, why = True, "not a study"
    if path.exists() and not path.is_file():
        is_ours, why = False, "damaged, or not a study: this is no file"
    elif path.exists() and path.stat().st_size and address.kind == "journal":
        with path.open("rb") as file:
            first = file.readline(1 << 16)
        is_ours = b'"op_code"' in first or not first.endswith(b"\n")
        why = "not the journal of a study"
    elif path.exists() and path.stat().st_size:
        try:
            # Not read-only: SQLite must be able to undo what a killed process left half written.
            with closing(sqlite3.connect(f"file:{path}?mode=rw", uri=True)) as database:
                rows = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
            is_ours, why = not rows or ("studies",) in rows, "a database of something else, not a study"
        except sqlite3.Error as error:
            is_ours, why = False, f"damaged, or not a study: {error}"
    if not is_ours:
        raise RunError(f"{address.shown}: {why}\n{_REMEDIES[address.kind]}")


@contextmanager
def _alone(address: Address) -> Iterator[None]:
    """Refuse the body while another process uses the SQLite file."""
    if address.kind != "sqlite" or address.path is None:
        yield
        return
    path = address.path.resolve()
    if "://" not in address.shown:
        path.parent.mkdir(parents=True, exist_ok=True)
    busy = f"{address.shown}: another process works on this study\n{_ONE_PROCESS}"
    lock = locked(path.with_name(f".{path.name}.lock"), busy)
    # SQLite refuses a path in a folder that does not exist.
    with lock if path.parent.is_dir() else nullcontext():
        yield
