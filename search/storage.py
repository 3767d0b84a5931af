"""Storage of a study: memory, a SQLite file, or a shared database. A file of another kind is refused."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from mesa_tune.errors import RunError

_REMEDY = "--force makes a new study, --run DIR one in another folder, --storage one in another database"
_URL_REMEDY = "check the URL of --storage and that its database answers, or leave it out: study.db of the run"


def open_study(storage: str | Path | None, name: str, labels: dict[str, Any]) -> Any:
    """Open the study `name` in `storage`, or create it. `labels` become its user attributes.

    `storage`: None (memory), the path of a SQLite file, or a URL as in Optuna. Raise RunError for a file that
    is damaged or not a study's, and for a database that does not answer.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    path = _path(storage)
    if path is not None:
        _require_ours(path)
        path.parent.mkdir(parents=True, exist_ok=True)
    # Optuna raises RuntimeError for a database of a newer version.
    with storage_errors(storage, RuntimeError):
        study = optuna.create_study(
            storage=None if storage is None else f"sqlite:///{path}" if path else str(storage),
            study_name=name,
            load_if_exists=True,
            direction="minimize",
        )
        for key, value in labels.items():
            if study.user_attrs.get(key) != value:
                study.set_user_attr(key, value)
    return study


@contextmanager
def storage_errors(storage: str | Path | None, *further: type[Exception]) -> Iterator[None]:
    """Turn errors of the database, and of the `further` kinds, into a RunError that names the storage."""
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
    # A URL may contain a password.
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
