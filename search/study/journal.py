"""The file of a journal, for processes that share a file system and can be killed while they write.

The hard part: a process that is killed, or a disk that is full, leaves half a line at the end. Optuna appends
the next line to it, and then nobody can read the file any more. So whoever has the lock first cuts the half.
"""

from __future__ import annotations

import os
from pathlib import Path

from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock

LOCK_SECONDS = 30
"""A lock that has been unchanged for so long was left by a killed process."""


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


def backend(path: Path) -> JournalFileBackend:
    """Return Optuna's backend of the journal at `path`, which is created."""
    return JournalFileBackend(str(path), lock_obj=_CuttingLock(path))


def cut_half_line(path: Path) -> None:
    """Remove what follows the last end of a line in the file at `path`."""
    with path.open("r+b") as file:
        size = end = file.seek(0, os.SEEK_END)
        while end and file.seek(end - 1) >= 0 and file.read(1) != b"\n":
            end -= 1
        if end < size:
            file.truncate(end)
