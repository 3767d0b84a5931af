"""Storage of a study: memory, a SQLite file, a journal, or a database. A file of another kind is refused.

SQLite is for one process, so its file is locked while a study uses it. What a process that was killed left
running in it is then known to be lost.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from mesa_tune.errors import RunError
from mesa_tune.files import locked
from mesa_tune.search.fleet.address import Address

NAME = "mesa-tune-"
"""How the names of our studies begin."""
_REMEDY = "--force makes a new study, --run DIR one in another folder, --storage one in another database"
_URL_REMEDY = "check the URL of --storage and that its database answers, or leave it out: study.db of the run"
_JOURNAL_REMEDY = "name another file with --storage journal:PATH, where there is room and a right to write"
_DRIVER_REMEDY = 'pip install "mesa-tune[postgresql]" and write postgresql+psycopg://…, or install its driver'
_ONE_PROCESS = (
    "SQLite is for one process: several need --storage journal:PATH or postgresql+psycopg://… (docs/fleet.md)"
)
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
        errors += (OSError,)
    try:
        yield
    except errors as error:
        remedy = {"sqlite": _REMEDY, "journal": _JOURNAL_REMEDY}.get(address.kind, _URL_REMEDY)
        if isinstance(error, ImportError):
            remedy = _DRIVER_REMEDY
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
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    if address.kind == "memory":
        yield optuna.storages.InMemoryStorage()
        return
    if address.path is not None:
        _require_ours(address, address.path)
    if address.kind == "journal":
        yield _journal(address)
        return
    storage = _database(address)
    try:
        yield optuna.storages.get_storage(storage) if address.kind == "sqlite" else _patient(storage)
    finally:
        storage.engine.dispose()


def _require_ours(address: Address, path: Path) -> None:
    """Raise RunError unless the file of the storage is a study's, or none yet."""
    if path.exists() and not path.is_file():
        remedy = _REMEDY if address.kind == "sqlite" else _JOURNAL_REMEDY
        raise RunError(f"{address.shown}: damaged, or not a study: this is no file\n{remedy}")
    if path.exists() and path.stat().st_size:
        (_require_database if address.kind == "sqlite" else _require_journal)(path)


def _journal(address: Address) -> Any:
    from optuna.storages import JournalStorage

    from mesa_tune.search.fleet.journal import backend

    assert address.path is not None
    address.path.parent.mkdir(parents=True, exist_ok=True)
    try:
        return JournalStorage(backend(address.path))
    except (ValueError, KeyError, AssertionError) as error:
        raise RunError(f"{address.shown}: damaged: {error}\n{_JOURNAL_REMEDY}") from error


def _database(address: Address) -> Any:
    from optuna.storages import RDBStorage

    assert address.url is not None
    arguments: dict[str, Any] = {}
    if address.kind == "server":
        is_psycopg = address.url.startswith(("postgresql+psycopg://", "postgresql+psycopg2://"))
        arguments = {"pool_pre_ping": True, "connect_args": _PSYCOPG if is_psycopg else {}}
    # Optuna fills in a template: braces in a password are no part of it.
    url = address.url.replace("{", "{{").replace("}", "}}")
    try:
        return RDBStorage(url, engine_kwargs=arguments)
    except RuntimeError as error:  # a database of a newer version
        remedy = _URL_REMEDY if address.kind == "server" else _REMEDY
        raise RunError(f"{address.shown}: the study cannot be used: {_reason(error)}\n{remedy}") from error


def _patient(storage: Any) -> Any:
    from mesa_tune.search.fleet.patience import PatientStorage

    return PatientStorage(storage)


@contextmanager
def _alone(address: Address) -> Iterator[None]:
    """Refuse the body while another process uses the SQLite file."""
    if address.kind != "sqlite" or address.path is None:
        yield
        return
    path = address.path.resolve()
    if "://" not in address.shown:
        path.parent.mkdir(parents=True, exist_ok=True)
    lock = locked(path.with_name(f".{path.name}.lock"), _in_use(address))
    # SQLite refuses a path in a folder that does not exist.
    with lock if path.parent.is_dir() else nullcontext():
        yield


def _in_use(address: Address) -> str:
    return f"{address.shown}: another process works on this study\n{_ONE_PROCESS}"


def _require_database(path: Path) -> None:
    try:
        # Not read-only: SQLite must be able to undo what a killed process left half written.
        with closing(sqlite3.connect(f"file:{path}?mode=rw", uri=True)) as database:
            names = {
                name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            }
            if database.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
                raise RunError(f"{path}: damaged: SQLite finds it inconsistent\n{_REMEDY}")
    except sqlite3.Error as error:
        raise RunError(f"{path}: damaged, or not a study: {error}\n{_REMEDY}") from error
    if names and not {"studies", "trials"} & names:  # a killed process may not have made all tables
        raise RunError(f"{path}: a database of something else, not a study\n{_REMEDY}")


def _require_journal(path: Path) -> None:
    try:
        with path.open("rb") as file:
            first = file.readline(1 << 16)
        if first.endswith(b"\n") and "op_code" not in json.loads(first):
            raise ValueError
    except (ValueError, TypeError):
        raise RunError(f"{path}: not the journal of a study\n{_JOURNAL_REMEDY}") from None
