"""A heap that keeps its memory while steps of several kinds are timed in turn.

What is hard: glibc returns the free top of its heap to the system, and a step of which more is alive than of
the one before gets it back page by page: 5 to 15 % of a small GPT's plain step were page faults, if a step
that compresses came before. In training, all steps are of one kind, and few of them fault.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _NEVER = -1, -3, -1
_TRIM, _MMAP = 64 << 20, 32 << 20
"""Where glibc's own thresholds end up in a process that frees large blocks. Once set, they move no more."""
_CHOSEN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


@contextmanager
def steady_heap() -> Iterator[None]:
    """Let no freed memory go back to the system in the body, but after it.

    Do nothing without glibc, or where the user has set its thresholds: then steps are timed as they train.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if not hasattr(libc, "mallopt") or any(name in os.environ for name in _CHOSEN):
        yield
        return
    assert libc is not None
    libc.mallopt(_M_MMAP_THRESHOLD, _MMAP)
    libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)
    try:
        yield
    finally:
        libc.mallopt(_M_TRIM_THRESHOLD, _TRIM)
        libc.malloc_trim(0)
