"""Where a study lives: memory, a SQLite file, or a shared database; never somebody else's file."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from mesa_tune.errors import RunError

_REMEDY = "--force makes a new study, --run DIR one in another folder, --storage one in another database"
_URL_REMEDY = "check the URL of --storage and that its database answers, or leave it out: study.db of the run"


def open_study(storage: str | Path | None, name: str, seen_by: dict[str, Any]) -> Any:
    """The study `name` in `storage`: continued if it is there, else new, with `seen_by` as user attributes.

    `storage`: None (memory), the path of a SQLite file, or a URL of Optuna's. RunError for a file that is
    damaged or not a study's, and for a database that does not answer.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    path = _path(storage)
    if path is not None:
        _require_ours(path)
        path.parent.mkdir(parents=True, exist_ok=True)
    # A database of a newer Optuna is a RuntimeError.
    with explaining(storage, RuntimeError):
        study = optuna.create_study(
            storage=None if storage is None else f"sqlite:///{path}" if path else str(storage),
            study_name=name,
            load_if_exists=True,
            direction="minimize",
        )
        for key, value in seen_by.items():
            if study.user_attrs.get(key) != value:
                study.set_user_attr(key, value)
    return study


@contextmanager
def explaining(storage: str | Path | None, *further: type[Exception]) -> Iterator[None]:
    """What the database raises, and errors of the `further` kinds, come out as a RunError that names it."""
    from alembic.util import CommandError
    from optuna.exceptions import OptunaError
    from sqlalchemy.exc import SQLAlchemyError

    kinds: tuple[type[Exception], ...] = (SQLAlchemyError, OptunaError, CommandError, ImportError, *further)
    try:
        yield
    except kinds as error:
        remedy = _REMEDY if _path(storage) else _URL_REMEDY
        first = str(error).strip().splitlines()[0][:200]
        raise RunError(f"{_shown(storage)}: the study cannot be used: {first}\n{remedy}") from error


def _path(storage: str | Path | None) -> Path | None:
    if storage is None or "://" in str(storage):
        return None
    return Path(storage)


def _shown(storage: str | Path | None) -> str:
    # A URL may hold a password.
    text = str(storage)
    return text if "@" not in text else text.split("://", 1)[0] + "://…@" + text.rsplit("@", 1)[1]


def _require_ours(path: Path) -> None:
    if not path.exists() or path.stat().st_size == 0:
        return
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
            names = {
                name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            }
            if database.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
                raise RunError(f"{path}: damaged: SQLite finds it inconsistent\n{_REMEDY}")
    except sqlite3.Error as error:
        raise RunError(f"{path}: damaged, or not a study: {error}\n{_REMEDY}") from error
    if names and not {"studies", "trials"} <= names:
        raise RunError(f"{path}: a database of something else, not a study\n{_REMEDY}")
