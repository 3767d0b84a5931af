"""Who works on a study, and whether they still do."""

from __future__ import annotations

import os
import socket
from functools import cache
from pathlib import Path
from uuid import uuid4


@cache
def this_machine() -> str:
    """Return a name of this machine, this boot, and this container's process ids; empty where unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("utf-8").strip()
        return f"{boot[:8]}.{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return ""


def worker_name() -> str:
    """Return a name for one worker of a study: host, machine, process, its start, and a random part."""
    pid = os.getpid()
    return "/".join([socket.gethostname(), this_machine(), str(pid), _start(pid) or "", uuid4().hex[:6]])


def is_dead(worker: str) -> bool:
    """Return True if the worker's process ran on this machine and has ended. Where unknown: False."""
    _, machine, pid, start, _ = worker.split("/")
    if not (machine and start) or machine != this_machine():
        return False
    return _start(int(pid)) != start


def _start(pid: int) -> str | None:
    """Return when the process started, in ticks since boot; None if it has ended, or is a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8")
    except OSError:
        return None
    state, *fields = text.rpartition(")")[2].split()
    return None if state == "Z" else fields[18]
