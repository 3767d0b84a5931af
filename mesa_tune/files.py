"""Atomic writes of files, locks, and JSON documents.

A document has `"schema": "mesa-tune.<kind>/N"` and plain values. The reader checks both: a document may have
been edited or damaged, and then the error must name the file and the part that is wrong.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, TypeVar, get_args, get_type_hints

from mesa_tune.errors import RunError

Value = TypeVar("Value")

_PLAIN = frozenset({str, int, float, bool, type(None)})


_VERSIONS = {"profile": 3, "plan": 3, "verify": 2}
"""Versions of kinds of documents; 1 of the others."""


def schema(kind: str) -> str:
    """Return the schema of a document of `kind`."""
    return f"mesa-tune.{kind}/{_VERSIONS.get(kind, 1)}"


def write_document(path: str | Path, content: Mapping[str, Any]) -> None:
    """Write `content` to `path` as JSON, atomically. Raise RunError if it cannot be written."""
    write_atomically(Path(path), dump_json(content))


def read_document(
    path: str | Path, kind: str, parse: Callable[[Mapping[str, Any]], Value], remedy: str
) -> Value:
    """Read the document of `kind` at `path` and return `parse` of its content.

    Raise RunError, which ends with `remedy`, if the file cannot be read, is not JSON, has another schema or
    lacks a part.
    """
    return parse_document(path, _read(Path(path), remedy), kind, parse, remedy)


def parse_document(
    path: str | Path, text: str, kind: str, parse: Callable[[Mapping[str, Any]], Value], remedy: str
) -> Value:
    """Return `parse` of the document `text`, the content of `path`. Raise RunError as in `read_document`."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path}: damaged, this is no JSON: {error}\n{remedy}") from error
    actual, expected = content.get("schema") if isinstance(content, dict) else None, schema(kind)
    if actual != expected:
        older = str(actual).startswith(f"mesa-tune.{kind}/")
        what = "of another version of mesa-tune" if older else "not a document of ours"
        raise RunError(f"{path}: {what}: schema {actual!r} instead of {expected!r}\n{remedy}")
    try:
        return parse(content)
    except KeyError as error:
        raise RunError(f"{path}: damaged: {error} is missing\n{remedy}") from error
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        raise RunError(f"{path}: damaged: {type(error).__name__}: {error}\n{remedy}") from error


def typed(kind: Callable[..., Value], values: Mapping[str, Any]) -> Value:
    """Return the dataclass `kind` of `values` after a check of the types of its plain fields.

    Raise TypeError for a value of another type, a number that is not finite, an unknown or missing name.
    A document may have been edited: without the check, a string instead of a number would fail much later.
    """
    for name, types in _plain_types(kind).items():
        value = values.get(name)
        if name in values and (
            type(value) not in types or (type(value) is float and not math.isfinite(value))
        ):
            expected = " or ".join(type_.__name__ for type_ in types)
            raise TypeError(f"{name} is {value!r:.40}, not {expected}")
    return kind(**values)


@lru_cache
def _plain_types(kind: Callable[..., Any]) -> dict[str, tuple[type, ...]]:
    """Return the allowed types of each field of `kind` whose type is plain, or plain or None."""
    hints = {name: get_args(hint) or (hint,) for name, hint in get_type_hints(kind).items()}
    plain = {name: types for name, types in hints.items() if set(types) <= _PLAIN}
    return {name: (*types, int) if float in types else types for name, types in plain.items()}


def _read(path: Path, remedy: str) -> str:
    try:
        return path.read_text("utf-8")
    except FileNotFoundError:
        raise RunError(f"{path}: no such file\n{remedy}") from None
    except UnicodeDecodeError as error:
        raise RunError(f"{path}: damaged, this is no text: {error.reason}\n{remedy}") from error
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}\n{remedy}") from error


def dump_json(content: object) -> str:
    """Return `content` as JSON, indented by two spaces, with a final newline. NaN is an error."""
    return json.dumps(content, indent=2, allow_nan=False) + "\n"


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write `content` to `path` and create its folder. Readers see the old file or the new one, never a part.

    Raise RunError if the system refuses.
    """
    data = content.encode() if isinstance(content, str) else content
    with _explaining(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, data)


def replace_file(path: Path, data: bytes) -> None:
    """Write `data` to a new file, sync it to the disk, move it to `path`, and sync the folder.

    Raise OSError if the system refuses.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Sync the names of the files in `folder`, where the system can open a folder."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(path: Path, busy: str | None = None) -> Iterator[None]:
    """Run the body while no other process or thread does so with the same `path`, a file made for the body.

    `busy`: the error if another has the lock; without it, wait. Raise RunError if the system refuses.
    """
    with _explaining(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            file = _locked_file(path, waiting=busy is None)
        except BlockingIOError:
            raise RunError(busy or "") from None
    try:
        yield
    finally:
        with suppress(OSError):  # Windows deletes no open file, and the next body finds this one
            path.unlink()
        file.close()


def _locked_file(path: Path, *, waiting: bool) -> IO[bytes]:
    """Return the file at `path`, open and locked by this call alone until it is closed.

    Raise BlockingIOError if another has the lock and this must not wait.
    """
    while True:
        file = path.open("wb")
        try:
            _lock(file, waiting=waiting)
        except BaseException:
            file.close()
            raise
        # The file that was opened may have been deleted while this waited for its lock.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        file.close()


def _lock(file: IO[bytes], *, waiting: bool) -> None:
    try:
        import fcntl
    except ImportError:
        import msvcrt

        mode = msvcrt.LK_LOCK if waiting else msvcrt.LK_NBLCK  # type: ignore[attr-defined]
        msvcrt.locking(file.fileno(), mode, 1)  # type: ignore[attr-defined]
    else:
        fcntl.flock(file, fcntl.LOCK_EX if waiting else fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def _explaining(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        has_file_parent = isinstance(error, (FileExistsError, NotADirectoryError))
        what = "a part of its path is a file, not a folder" if has_file_parent else error.strerror
        remedy = "name a path in a folder that can be written and has room"
        raise RunError(f"{path}: cannot be written: {what}\n{remedy}") from error
