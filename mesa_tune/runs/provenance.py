"""Provenance of what a command writes: the command line, the date, the versions, and the hardware.

What is hard: a command line may contain the password of a database, and reports are passed on.
"""

from __future__ import annotations

import platform
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mesa_tune.files import typed
from mesa_tune.units import counted

_arguments: ContextVar[Sequence[str]] = ContextVar("arguments", default=())
_USER = re.compile("://.*@")


@dataclass(frozen=True)
class Made:
    """How a file was made. `date`: ISO 8601 with minutes. `versions`: of mesa-tune, torch and Python."""

    command: str
    date: str
    hardware: str
    versions: str

    @staticmethod
    def now() -> Made:
        """Return the provenance of a file that the running command writes now."""
        import torch

        versions = f"mesa-tune {own_version()}, torch {torch.__version__}, Python {platform.python_version()}"
        words = ("mesa-tune", *map(_shown, _arguments.get()))
        date = datetime.now().astimezone().isoformat(" ", "minutes")
        return Made(shlex.join(words) if len(words) > 1 else "", date, hardware(), versions)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)

    @staticmethod
    def from_dict(values: object) -> Made | None:
        """Return the provenance with this `to_dict`; None for any other value."""
        try:
            return typed(Made, values) if isinstance(values, dict) else None
        except (KeyError, TypeError, ValueError):
            return None


@contextmanager
def running(arguments: Sequence[str]) -> Iterator[None]:
    """Name the command line `mesa-tune` with `arguments` in what is written in the body."""
    token = _arguments.set(arguments)
    try:
        yield
    finally:
        _arguments.reset(token)


def own_version() -> str:
    """Return the version of mesa-tune."""
    try:
        return version("mesa-tune")
    except PackageNotFoundError:
        return "not installed: run from a source folder"


@cache
def hardware() -> str:
    """Return the GPU, or the processor and the number of torch's threads."""
    import torch

    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    return f"{_processor()}, {counted(torch.get_num_threads(), 'thread')}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _shown(argument: str) -> str:
    """Return the argument without user, password and query if it is a URL."""
    return _USER.sub("://…@", argument).partition("?")[0] if "://" in argument else argument
