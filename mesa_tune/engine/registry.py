"""`Registry`: facts about tensors, found by the tensors' storage.

What is hard is never to take one tensor for another: an address is reused as soon as a tensor is freed, and
an in-place operation changes a tensor without moving it. So facts are filed by storage, with a weak reference
to it, and facts about values include the tensor's version. Traced code has neither storages nor versions.
"""

import threading
import weakref
from collections.abc import Hashable
from typing import Any

from torch import Tensor, UntypedStorage

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
        record = self._records.get(storage._cdata)
        if record is None or record[0]() is not storage:
            if len(self._records) >= self._limit:
                self.purge()
            record = self._records[storage._cdata] = weakref.ref(storage), {}
        return record[1]

    def purge(self) -> None:
        """Drop the facts about freed storages."""
        self._records = {
            address: record for address, record in self._records.items() if record[0]() is not None
        }
        self._limit = max(_FIRST_LIMIT, 2 * len(self._records))

    def clear(self) -> None:
        """Drop all facts."""
        self._records.clear()


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.registry = Registry()


_per_thread = _PerThread()


def registry() -> Registry:
    """Return this thread's registry of packed copies, outputs that can be rematerialized, and sums.

    It is emptied whenever an outermost forward begins.
    """
    return _per_thread.registry
