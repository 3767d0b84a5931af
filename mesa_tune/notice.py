"""Warnings that are shown once per process, not once per training step; and a status line on terminals."""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from mesa_tune.compiling import constant_result

_given: set[str] = set()


@constant_result
def warn_once(text: str) -> bool:
    """Warn the first time that this process passes `text`; return True if it warned."""
    if text in _given:
        return False
    _given.add(text)
    warnings.warn(text, stacklevel=2)
    return True


@contextmanager
def unnoticed() -> Iterator[None]:
    """Show no warnings of the body, and count none as shown: it tries what may not work."""
    before = set(_given)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            _given.intersection_update(before)


def say(text: str) -> None:
    """Write a line for the user of a training script to standard error."""
    sys.stderr.write(f"mesa-tune: {text}\n")
    sys.stderr.flush()


def show_status(text: str) -> None:
    """Replace the last status on the terminal by `text`. Without a terminal print nothing."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()
