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
from contextlib import AbstractContextManager, contextmanager, nullcontext

from mesa_tune.free_memory import MMAP_THRESHOLD, free_memory

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _NEVER = -1, -3, -1
_TRIM, _MMAP = 64 << 20, 32 << 20
"""Where glibc's own thresholds end up in a process that frees large blocks. Once set, they move no more."""
_LARGEST, _ROOM = 1 << 30, 4
_CHOSEN = ("MALLOC_TRIM_THRESHOLD_", MMAP_THRESHOLD, "GLIBC_TUNABLES")


def roomy_heap(peak: int, device: str) -> AbstractContextManager[None]:
    """Return a context in which also large tensors find the memory that others have freed.

    They fill it less well: of a GPT-2 with 50,257 words, steps take 1.3 times the memory, and 0.8 times the
    time of the processor. So do nothing unless there is room for four times the `peak` of a step.
    """
    has_room = device == "cpu" and free_memory(device)[0] > _ROOM * peak
    return steady_heap(_LARGEST) if has_room else nullcontext()


@contextmanager
def steady_heap(largest: int = _MMAP) -> Iterator[None]:
    """Let no freed memory go back to the system in the body, but after it.

    Blocks of `largest` bytes or more are mapped one by one, and always go back. Do nothing without glibc, or
    where the user has set its thresholds: then steps are timed as they train.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if not hasattr(libc, "mallopt") or any(name in os.environ for name in _CHOSEN):
        yield
        return
    assert libc is not None
    libc.mallopt(_M_MMAP_THRESHOLD, largest)
    libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)
    try:
        yield
    finally:
        libc.mallopt(_M_MMAP_THRESHOLD, _MMAP)
        libc.mallopt(_M_TRIM_THRESHOLD, _TRIM)
        libc.malloc_trim(0)
