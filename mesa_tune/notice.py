"""Warnings that are shown once per process, not once per training step; and the status of long work."""

import sys
import time
import warnings
from collections.abc import Callable, Iterator
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


Progress = Callable[[str, float], None]
"""What is called with what long work does at the moment, and the share of that which is done."""


def unshown(text: str, share: float) -> None:
    """The `Progress` that nobody sees."""


STATUS_EVERY_S = 60.0
"""Without a terminal, the status is shown this often."""


def say(text: str) -> None:
    """Write a line for the user of a training script to standard error."""
    sys.stderr.write(f"mesa-tune: {text}\n")
    sys.stderr.flush()


class StatusLine:
    """What long work does at the moment: replaced in place on a terminal, elsewhere a line each minute."""

    def __init__(self) -> None:
        self._shown = time.monotonic()

    def show(self, text: str) -> None:
        """Show `text` on standard error; empty: nothing any more."""
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()
        elif text and time.monotonic() - self._shown >= STATUS_EVERY_S:
            self._shown = time.monotonic()
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()

    def progress(self, text: str, share: float) -> None:
        """Show `text` and the share that is done: a `Progress`."""
        self.show(f"{share:4.0%} {text}")
