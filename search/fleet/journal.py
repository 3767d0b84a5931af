"""The file of a journal, for processes that share a file system and can be killed while they write.

The hard part: a process that is killed, or a disk that is full, leaves half a line at the end. Optuna ignores
it while it is the last, but the next line would be appended to it, and the file could not be read any more.
So whoever has the lock first cuts such a half.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock

LOCK_SECONDS = 30
"""A lock that has been unchanged for so long was left by a killed process."""
_BLOCK = 1 << 16


class _CuttingLock(JournalFileSymlinkLock):
    """The lock of a journal; whoever gets it finds a file of whole lines."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path), grace_period=LOCK_SECONDS)
        self._lock_target_file = path.name  # in the lock's own folder, however each process names it
        self.path = path

    def acquire(self) -> bool:
        acquired: bool = super().acquire()
        try:
            cut_half_line(self.path)
        except BaseException:
            self.release()
            raise
        return acquired


class _Backend(JournalFileBackend):
    """A journal that is read once from its beginning: only the last line's offset is stored."""

    def read_logs(self, log_number_from: int) -> Generator[dict[str, Any], None, None]:
        offsets = self._log_number_offset
        for number in [number for number in offsets if number < log_number_from]:
            del offsets[number]
        yield from super().read_logs(log_number_from)


def backend(path: Path) -> JournalFileBackend:
    """Return Optuna's backend of the journal at `path`, which is created."""
    return _Backend(str(path), lock_obj=_CuttingLock(path))


def cut_half_line(path: Path) -> None:
    """Remove what follows the last end of a line in the file at `path`."""
    with path.open("r+b") as file:
        size = end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - _BLOCK)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            end = start + newline + 1
            if newline >= 0:
                break
        if end < size:
            file.truncate(end)
