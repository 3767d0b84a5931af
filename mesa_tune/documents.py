"""JSON documents on disk: `"schema": "mesa-tune.<kind>/1"` and plain values, read back or refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from mesa_tune.commands.run_folder import dump_json, write_atomically
from mesa_tune.errors import RunError

Value = TypeVar("Value")


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
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunError(f"{path}: damaged: {type(error).__name__}: {error}\n{remedy}") from error


def _read(path: Path, remedy: str) -> str:
    try:
        return path.read_text("utf-8")
    except FileNotFoundError:
        raise RunError(f"{path}: no such file\n{remedy}") from None
    except UnicodeDecodeError as error:
        raise RunError(f"{path}: damaged, this is no text: {error.reason}\n{remedy}") from error
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}\n{remedy}") from error
