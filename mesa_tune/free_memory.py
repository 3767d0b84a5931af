"""How much memory the device has free, and how much a step needs besides what is predicted."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path

from mesa_tune.errors import WorkloadError

AUTO = "auto"
MARGIN = 0.1
"""Share of the free memory that the budget `auto` leaves: allocators, and what other programs take later."""
CPU_MARGIN = 0.03
"""Resident memory was at most 2.0 % above `peak_bytes` (benchmarks/estimate.py, batch 8)."""
CPU_ALLOWANCE = 8 * 10**6
"""Allowance for small blocks and objects of Python; 4 to 5 MB were measured."""
THREAD_ALLOWANCE = 10**7
"""Allowance for each thread's buffers of MKL; 0.1 to 4 MB of two were measured on an EPYC, 21 on a Xeon."""
CUDA_MARGIN = 0.2
"""Of what is not static. On an H100 2.2 % were missing for DeiT-S and GPT-2, 19 % for a plain ResNet-50."""
MMAP_THRESHOLD = "MALLOC_MMAP_THRESHOLD_"
"""In the environment it makes glibc return larger blocks to the system when they are freed."""
CUDA_CONTEXT = 600 * 10**6
"""Allowance for CUDA's context and the workspaces of its libraries; an assumption, too."""

_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def is_cuda(device: str) -> bool:
    """Return whether `device` is a CUDA device rather than the CPU; raise WorkloadError for any other one."""
    kind, _, index = device.partition(":")
    if kind in ("mps", "xpu"):
        raise WorkloadError(
            f"device {device!r}: mesa-tune measures on the CPU and on CUDA, not on {kind.upper()}\n"
            "profile with --device cpu: saved bytes and gradient errors are about the same, times are not"
        )
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()):
        raise WorkloadError(f"device {device!r}: must be cpu, cuda or cuda:N\nchoose with --device")
    return kind == "cuda"


def needed_bytes(reserved: int, static: int, libraries: int, *, cuda: bool) -> int:
    """Return the bytes of memory that a step needs of which `reserved` are predicted, `static` among them."""
    if cuda:
        return reserved + math.ceil(CUDA_MARGIN * (reserved - static)) + CUDA_CONTEXT
    return math.ceil(reserved * (1 + CPU_MARGIN)) + libraries + _cpu_allowance()


def usable_bytes(memory: int, static: int, libraries: int, *, cuda: bool) -> int:
    """Return the most bytes that may be predicted for a step that needs no more than `memory`; at least 1."""
    if cuda:
        usable = (memory - CUDA_CONTEXT + CUDA_MARGIN * static) / (1 + CUDA_MARGIN)
    else:
        usable = (memory - libraries - _cpu_allowance()) / (1 + CPU_MARGIN)
    return max(1, math.floor(usable))


def _cpu_allowance() -> int:
    import torch

    return CPU_ALLOWANCE + torch.get_num_threads() * THREAD_ALLOWANCE


def room_text(device: str) -> str:
    """Return in words what `usable_bytes` leaves free on `device`."""
    cuda = device.startswith("cuda")
    share = f"{CUDA_MARGIN:.0%} of what is not static" if cuda else f"{CPU_MARGIN:.0%}"
    return f"{share} and {(CUDA_CONTEXT if cuda else _cpu_allowance()) // 10**6} MB"


def free_memory(device: str) -> tuple[int, str]:
    """Return the bytes that a training could use on `device` now, and in words which they are."""
    if device.startswith("cuda"):
        import torch

        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached, f"free on {device}"
    amounts = [(_available(), "of memory available"), *_cgroup_bytes(), *_limited_bytes()]
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


def _limited_bytes() -> list[tuple[int, str]]:
    """Return what limits of this process leave (`ulimit -d`, `-v`); nothing without one, or without Linux."""
    try:
        import resource
    except ImportError:  # Windows
        return []
    left = []
    for limit, used in ((resource.RLIMIT_DATA, "VmData"), (resource.RLIMIT_AS, "VmSize")):
        most = resource.getrlimit(limit)[0]
        match = re.search(rf"^{used}:\s+(\d+) kB", _status(), re.MULTILINE)
        if match and most != resource.RLIM_INFINITY:
            left.append((max(1, most - 1024 * int(match[1])), "left by the process's limit"))
    return left


def _status() -> str:
    try:
        return Path("/proc/self/status").read_text("utf-8")
    except OSError:
        return ""


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
