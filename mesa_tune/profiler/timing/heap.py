"""A heap that keeps its memory while steps of several kinds are timed in turn.

What is hard: glibc returns the free top of its heap to the system, and a step of which more is alive than of
the one before gets it back page by page: 5 to 15 % of a small GPT's plain step were page faults, if a step
that compresses came before. In training, all steps are of one kind, and few of them fault.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

_M_TRIM_THRESHOLD, _NEVER = -1, -1
_USUAL = 64 << 20
"""Where glibc's own threshold ends up in a process that frees large blocks. Once set, it moves no more."""


@contextmanager
def steady_heap() -> Iterator[None]:
    """Let no freed memory go back to the system in the body, but after it; do nothing without glibc."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt") or not hasattr(libc, "malloc_trim"):
        yield
        return
    libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)
    try:
        yield
    finally:
        libc.mallopt(_M_TRIM_THRESHOLD, _USUAL)
        libc.malloc_trim(0)
