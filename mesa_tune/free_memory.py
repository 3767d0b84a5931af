"""How much memory the device has free: what the budget `auto` is made from."""

from __future__ import annotations

import os
import re
from pathlib import Path

AUTO = "auto"
MARGIN = 0.1
"""Share of the free memory that the budget `auto` leaves: allocators, and what other programs take later."""

_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def free_memory(device: str) -> tuple[int, str]:
    """Return the bytes that a training could use on `device` now, and in words which they are."""
    if device.startswith("cuda"):
        import torch

        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached, f"free on {device}"
    amounts = [(_available(), "of memory available"), *_cgroup_bytes()]
    return min(amounts)


def _available() -> int:
    try:
        text = Path("/proc/meminfo").read_text("utf-8")
        match = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
        if match:
            return 1024 * int(match[1])
    except OSError:
        pass  # not Linux
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_bytes() -> list[tuple[int, str]]:
    """Return what the cgroup's limit leaves; nothing without a limit."""
    for limit, used in _CGROUPS:
        try:
            most, now = Path(limit).read_text("utf-8").strip(), int(Path(used).read_text("utf-8"))
        except (OSError, ValueError):
            continue
        if most.isdigit():
            return [(max(1, int(most) - now), "left by the cgroup's limit")]
    return []
