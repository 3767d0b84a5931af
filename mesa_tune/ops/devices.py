"""Whose kernels run: those of the tensors' device, or, where fake CPU tensors stand for CUDA's, CUDA's."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor


class _Model:
    cuda = False


def on_cpu(tensor: Tensor) -> bool:
    """Return whether the CPU's kernels run on this tensor."""
    return tensor.is_cpu and not _Model.cuda


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """Choose, for the body, what CUDA tensors would get, although the tensors are on the CPU."""
    before, _Model.cuda = _Model.cuda, True
    try:
        yield
    finally:
        _Model.cuda = before
