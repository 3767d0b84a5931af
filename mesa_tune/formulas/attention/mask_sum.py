"""A mask that is a sum of smaller ones (a relative bias for each head, a window's mask for each window).

Attention keeps the two as they are before they are repeated, and adds them again in backward: exact, bit for
bit. A sum is found again by storage and version, as in `storage`; traced code keeps the sum itself.
"""

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage

ADDITIONS = {torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__}
_WORTH = 2
"""A sum is noted if it has at least so many times the elements of its parts together."""
_MOST = 8

Pair = tuple[Tensor, Tensor]


class _Sum(NamedTuple):
    storage: weakref.ref[UntypedStorage]
    version: int
    place: tuple[Any, ...]
    parts: list[weakref.ref[Tensor]]
    versions: list[int]

    def is_known(self, total: Tensor) -> bool:
        """Whether `total` is that sum, unchanged."""
        same = self.storage() is total.untyped_storage()
        return same and self.version == total._version and self.place == _place(total)

    def found(self) -> Pair | None:
        """The parts, if they are still there, and unchanged."""
        first, second = (reference() for reference in self.parts)
        if first is None or second is None or [first._version, second._version] != self.versions:
            return None
        return first.detach(), second.detach()


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset()


class _Sums(threading.local):
    def __init__(self) -> None:
        self.known: deque[_Sum] = deque(maxlen=_MOST)


_sums = _Sums()


def note(output: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Remembers that `output` is the sum of `args`, if they are much smaller."""
    if kwargs or len(args) != 2 or torch.compiler.is_compiling():
        return
    if getattr(args[0], "shape", None) == getattr(args[1], "shape", None):
        return
    if not all(isinstance(each, Tensor) and each.layout is torch.strided for each in (*args, output)):
        return
    if output.numel() < _WORTH * sum(each.numel() for each in args):
        return
    references = [weakref.ref(each) for each in args]
    versions = [each._version for each in args]
    storage = weakref.ref(output.untyped_storage())
    _sums.known.append(_Sum(storage, output._version, _place(output), references, versions))


def parts(total: Tensor | None) -> Pair | None:
    """The two tensors whose sum is `total`, detached; None where they are not known or no longer there."""
    if total is None or torch.compiler.is_compiling() or total.layout is not torch.strided:
        return None
    return next((each.found() for each in _sums.known if each.is_known(total)), None)
