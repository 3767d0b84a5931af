"""Files: the one place that writes them, whole or not at all, and JSON documents.

A document has `"schema": "mesa-tune.<kind>/1"` and plain values, and is read back or refused.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from mesa_tune.errors import RunError

Value = TypeVar("Value")

_PLAIN = frozenset({str, int, float, bool, type(None)})


def schema(kind: str) -> str:
    """The schema of a document of `kind`."""
    return f"mesa-tune.{kind}/1"


def write_document(path: str | Path, content: Mapping[str, Any]) -> None:
    """Write `content` to `path` as JSON, whole or not at all. RunError where it cannot be written."""
    write_atomically(Path(path), dump_json(content))


def read_document(
    path: str | Path, kind: str, parse: Callable[[Mapping[str, Any]], Value], remedy: str
) -> Value:
    """What `parse` makes of the document of `kind` at `path`.

    RunError, which ends with `remedy`, for a file that cannot be read, is no JSON, has another schema or
    lacks a part.
    """
    return parse_document(path, _read(Path(path), remedy), kind, parse, remedy)


def parse_document(
    path: str | Path, text: str, kind: str, parse: Callable[[Mapping[str, Any]], Value], remedy: str
) -> Value:
    """What `parse` makes of `text`, the content of `path`; RunError as `read_document`."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path}: damaged, this is no JSON: {error}\n{remedy}") from error
    found = content.get("schema") if isinstance(content, dict) else None
    if found != schema(kind):
        raise RunError(
            f"{path}: not a document of ours: schema {found!r} instead of {schema(kind)!r}\n{remedy}"
        )
    try:
        return parse(content)
    except KeyError as error:
        raise RunError(f"{path}: damaged: {error} is missing\n{remedy}") from error
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        raise RunError(f"{path}: damaged: {type(error).__name__}: {error}\n{remedy}") from error


def typed(kind: Callable[..., Value], values: Mapping[str, Any]) -> Value:
    """The dataclass `kind` of `values`, whose plain fields have their types and whose numbers are finite.

    TypeError for others, for names that `kind` lacks and for missing ones: a document may have been edited,
    and a text in place of a number would come out much later, as somebody else's error.
    """
    for name, types in _plain_types(kind).items():
        value = values.get(name)
        if name in values and (
            type(value) not in types or (type(value) is float and not math.isfinite(value))
        ):
            expected = " or ".join(one.__name__ for one in types)
            raise TypeError(f"{name} is {value!r:.40}, not {expected}")
    return kind(**values)


@lru_cache
def _plain_types(kind: Callable[..., Any]) -> dict[str, tuple[type, ...]]:
    """The types that JSON gives the fields of `kind` that are plain, or plain or None."""
    found = {name: get_args(hint) or (hint,) for name, hint in get_type_hints(kind).items()}
    plain = {name: types for name, types in found.items() if set(types) <= _PLAIN}
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
    """`content` as the house writes JSON: two spaces, a final newline, no NaN."""
    return json.dumps(content, indent=2, allow_nan=False) + "\n"


def write_atomically(path: Path, content: str | bytes) -> None:
    """Put `content` at `path`, making its folder; readers see the old file or the new one, never a part.

    RunError where the system does not let us.
    """
    data = content.encode() if isinstance(content, str) else content
    with _explaining(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, data)


def replace_file(path: Path, data: bytes) -> None:
    """Put `data` at `path`, on the disk before the old file is gone.

    OSError where the system does not let us.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


@contextmanager
def _explaining(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        on_the_way = isinstance(error, (FileExistsError, NotADirectoryError))
        what = "a part of its path is a file, not a folder" if on_the_way else error.strerror
        remedy = "name a place in a folder that can be written and has room"
        raise RunError(f"{path}: cannot be written: {what}\n{remedy}") from error
