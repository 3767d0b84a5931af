"""Budgets as typed: one, several, `auto`, or none; and how much memory the device has free."""

from __future__ import annotations

import os
import re
from pathlib import Path

from mesa_tune.errors import BudgetError
from mesa_tune.units import format_bytes, parse_bytes

AUTO = "auto"
MARGIN = 0.1
"""Share of the free memory that `--budget auto` leaves: allocators, and what other programs take later."""

_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def split_budgets(text: str | None, device: str, smallest: bool) -> tuple[list[str | None], list[str]]:
    """Return the budgets in `text`, and lines that say how `auto` was found. None: no budget.

    Raise BudgetError for none without `smallest`, and for what is not an amount.
    """
    if text is None:
        if not smallest:
            raise BudgetError("no budget\ngive --budget 6GB (or 40%, auto, 4GB,6GB), or --smallest")
        return [None], []
    budgets: list[str | None] = []
    lines: list[str] = []
    for word in (part.strip() for part in text.split(",")):
        budget = word
        if word == AUTO:
            free, what = free_memory(device)
            lines.append(f"budget auto: {format_bytes(free)} {what}, less {MARGIN:.0%}")
            budget = str(int(free * (1 - MARGIN)))
        parse_bytes(budget)
        budgets.append(budget)
    return list(dict.fromkeys(budgets)), lines


def label_of(budget: str | None) -> str:
    """Return a budget as a part of a file name."""
    return re.sub(r"[^0-9A-Za-z.%]", "", budget or "smallest").replace("%", "percent")


def free_memory(device: str) -> tuple[int, str]:
    """Return the bytes that a training could use on `device` now, and in words which they are."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.mem_get_info(device)[0], f"free on {device}"
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
