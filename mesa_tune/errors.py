"""Errors that a user can cause. A message says what, where, and the remedy, in three lines at most.

What is hard: a remedy names options, and the same error reaches those who type commands and those who call
functions. So `options` writes them as they are written where the error is raised.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_typed: ContextVar[bool] = ContextVar("typed", default=False)


@contextmanager
def typed_options() -> Iterator[None]:
    """Make `options` write those of commands in the body."""
    token = _typed.set(True)
    try:
        yield
    finally:
        _typed.reset(token)


def at_command_line() -> bool:
    """Return True inside `typed_options`: the error reaches somebody who types commands."""
    return _typed.get()


def options(*names: str, **values: object) -> str:
    """Return options as the user writes them: `--max-saved 1GB` of a command, else `max_saved="1GB"`.

    `names`: those without a value.
    """
    if _typed.get():
        given = {**dict.fromkeys(names, ""), **values}
        return " ".join(f"--{name.replace('_', '-')} {value}".rstrip() for name, value in given.items())
    return ", ".join([*(f"{name}=" for name in names), *(f"{k}={_source(v)}" for k, v in values.items())])


def _source(value: object) -> str:
    """Return the Python source of a value."""
    if isinstance(value, str):
        return f'"{value}"'
    return "math.inf" if value == math.inf else str(value)


class MesaTuneError(Exception):
    """Error that the user can fix. The command line prints it and exits with `exit_status`."""

    exit_status = 1


class PolicyError(MesaTuneError, ValueError):
    """A policy file cannot be read or overwritten, or a policy is invalid or does not fit its model."""


class WorkloadError(MesaTuneError):
    """A model, batch, loss or optimizer function is missing, raises, or returns something unusable."""


class BudgetError(MesaTuneError):
    """A memory budget is not an amount, or no policy can meet it."""


class RunError(MesaTuneError):
    """A run folder, profile or study is missing, damaged or of another origin, or a step cannot run."""


class MissingPackageError(MesaTuneError, ImportError):
    """A package that only this part of mesa-tune needs is not installed."""

    def __init__(self, what: str, package: str) -> None:
        super().__init__(
            f"{what} needs {package}, which cannot be imported\ninstall it: pip install {package}"
        )
