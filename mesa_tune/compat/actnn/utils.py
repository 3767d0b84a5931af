"""ActNN's two helpers for measuring memory."""

import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

MIB = 1024**2


def get_memory_usage(print_info: bool = False) -> int:
    """Bytes allocated on the GPU; without one, the resident bytes of this process."""
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
    # Elsewhere the system tells only the highest value so far.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def compute_tensor_bytes(tensors: Tensor | Iterable[Tensor]) -> int:
    """Bytes of a tensor, or of several together, each by its elements."""
    given = [tensors] if isinstance(tensors, Tensor) else tensors
    return sum(tensor.numel() * tensor.element_size() for tensor in given)
