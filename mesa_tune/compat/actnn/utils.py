"""ActNN's helpers for measuring memory, and its recorder of results."""

import os
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from mesa_tune.compat.recorder import GlobalExpRecorder, exp_recorder

__all__ = [
    "GlobalExpRecorder",
    "compute_tensor_bytes",
    "disable_cache_allocator",
    "empty_cache",
    "enable_cache_allocator",
    "exp_recorder",
    "get_memory_usage",
    "swap_to_cpu",
]

MIB = 1024**2


def get_memory_usage(print_info: bool = False) -> int:
    """Return the bytes allocated on the GPU; without a GPU, the resident bytes of this process."""
    if torch.cuda.is_available():
        allocated = torch.cuda.memory_allocated()
        lines = [("allocated", allocated), ("reserved", torch.cuda.memory_reserved())]
    else:
        allocated = _resident()
        lines = [("resident", allocated)]
    if print_info:
        sys.stdout.writelines(f"{name}: {value / MIB:.2f} MB\n" for name, value in lines)
    return allocated


def _resident() -> int:
    import resource

    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    # Without /proc the system only reports the highest value so far.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def compute_tensor_bytes(tensors: Tensor | Iterable[Tensor]) -> int:
    """Return the bytes of all elements of one tensor or several."""
    listed = [tensors] if isinstance(tensors, Tensor) else tensors
    return sum(tensor.numel() * tensor.element_size() for tensor in listed)


def swap_to_cpu(tensor: Tensor) -> Tensor:
    """Copy `tensor` to host memory, pinned and asynchronous if there is a GPU."""
    pinned = torch.cuda.is_available()
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
    return copy.copy_(tensor, non_blocking=True)


def empty_cache(ratio: float | None) -> None:
    """Free the GPU's cached memory if the share in use is below `ratio`; None: never."""
    if ratio is None or not torch.cuda.is_available():
        return
    reserved = torch.cuda.memory_reserved()
    if reserved > 0 and torch.cuda.memory_allocated() / reserved < ratio:
        torch.cuda.empty_cache()


_NO_CACHE = "PYTORCH_NO_CUDA_MEMORY_CACHING"


def disable_cache_allocator() -> None:
    """Turn off caching of GPU memory; has no effect after torch's first use of the GPU."""
    os.environ[_NO_CACHE] = "1"


def enable_cache_allocator() -> None:
    """Turn on caching of GPU memory again; has no effect after torch's first use of the GPU."""
    os.environ.pop(_NO_CACHE, None)
