"""The registry of what is known of tensors, by which an equal copy is stored once (Rule 3).

However many layers save a tensor under the same settings, there is one packed copy. The hard part is never
to take one tensor for another: an address is reused as soon as a tensor dies, and an in-place operation
changes a tensor without moving it. So facts are filed by storage, which is referred to weakly, and facts
about values carry the tensor's version.
"""

import threading
import weakref
from collections.abc import Callable, Hashable, Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

from mesa_tune.engine.wrappers import opened

_FIRST_LIMIT = 1024


class Registry:
    """Facts about tensors by their storage; facts about freed storages are dropped from time to time."""

    def __init__(self) -> None:
        self._records: dict[int, tuple[weakref.ref[UntypedStorage], dict[Hashable, Any]]] = {}
        self._limit = _FIRST_LIMIT

    def facts(self, tensor: Tensor) -> dict[Hashable, Any] | None:
        """Return the facts about the storage of `tensor`; None if there are none."""
        storage = tensor.untyped_storage()
        record = self._records.get(storage._cdata)
        return record[1] if record is not None and record[0]() is storage else None

    def file(self, tensor: Tensor) -> dict[Hashable, Any]:
        """Return the facts about the storage of `tensor`, to which more can be added."""
        storage = tensor.untyped_storage()
        address, records = storage._cdata, self._records
        record = records.get(address)
        if record is None or record[0]() is not storage:
            if len(records) >= self._limit:
                self.purge()
            record = self._records[address] = weakref.ref(storage), {}
        return record[1]

    def purge(self) -> None:
        """Drop the facts about freed storages."""
        self._records = {key: known for key, known in self._records.items() if known[0]() is not None}
        self._limit = max(_FIRST_LIMIT, 2 * len(self._records))

    def clear(self) -> None:
        """Drop all facts."""
        self._records.clear()


class StaticTensors(Registry):
    """Tensors that are never packed: parameters, buffers and the batch of a conversion, by their storage.

    `root`: the module whose parameters and buffers are not filed yet: few forwards ask for them.
    """

    root: nn.Module | None = None

    def add(self, tensors: Iterable[Tensor]) -> None:
        """File tensors."""
        for tensor in tensors:
            if tensor.layout is torch.strided:
                self.file(opened(tensor)[0])

    def has(self, tensor: Tensor) -> bool:
        """Return whether `tensor` lies in the storage of such a tensor."""
        if tensor.layout is not torch.strided:
            return False
        if self.facts(tensor) is not None:
            return True
        root = self.root
        if root is None or not tensor.is_leaf:
            return False
        # A leaf may stand for a parameter (`torch.func.functional_call`), also of a module never called.
        self.root = None
        self.add(chain(root.parameters(), root.buffers()))
        return self.has(tensor)


class _PerThread(Registry, threading.local):
    pass


registry = _PerThread()
"""Packed copies, outputs that can be rematerialized, and sums; emptied where an outermost forward begins."""


_SELECTIVE = (_CachingTorchDispatchMode, _CachedTorchDispatchMode)


def is_selective() -> bool:
    """Return whether selective checkpointing records operators, or replays them by their count.

    Both runs of a part must then run the same operators, so neither may use a copy that only one of them
    finds.
    """
    modes = _get_current_dispatch_mode_stack() if torch._C._len_torch_dispatch_stack() else ()
    return any(isinstance(mode, _SELECTIVE) for mode in modes)


def once(tensor: Tensor, what: Any, make: Callable[..., list[Tensor]], *arguments: Any) -> list[Tensor]:
    """Return `make(*arguments)`, or what it returned before for the same `tensor` and `what`."""
    return filed(tensor, what) or file(tensor, what, make(*arguments))


def filed(tensor: Tensor, what: Hashable) -> list[Tensor] | None:
    """Return what was filed as `what` of `tensor` with these values, if it is alive."""
    facts = None if is_selective() else registry.facts(tensor)
    references = facts.get((tensor._version, tensor.storage_offset(), what)) if facts else None
    if not references:
        return None
    parts = [reference() for reference in references]
    dead = [part for part in parts if part is None]  # `None in parts` would ask the tensors
    return None if dead else parts


def file(tensor: Tensor, what: Hashable, parts: list[Tensor]) -> list[Tensor]:
    """File `parts` as `what` of `tensor` with these values; return them."""
    if not is_selective():
        registry.file(tensor)[tensor._version, tensor.storage_offset(), what] = list(map(weakref.ref, parts))
    return parts
