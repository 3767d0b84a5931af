"""Host memory instead of device memory: `store: offload`, exact, with prefetch of one tensor in backward.

What is hard is the order of events. Copies run on their own stream beside the computation. The memory of a
tensor may be used again only when its copy to the host is done, and the computation must wait for a copy to
the device before it reads it. Backward loads tensors in the opposite order to forward. So loading one tensor
starts the copy of the tensor saved just before it, and of no more than one: further copies would fill the
memory that offloading frees. `OffloadQueue` decides this order; a `Copier` moves the bytes.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from mesa_tune.codecs.spec import Memory, Spec

PendingCopy = Callable[[], Tensor]
"""Makes the device's work wait for a copy to the device, and returns the copy."""


class Copier(Protocol):
    """Moves tensors between a device and the host; the host does not wait."""

    def to_host(self, x: Tensor) -> Tensor:
        """Return a copy of x on the host. x may be freed at once; the host must not read the copy."""
        ...

    def to_device(self, host: Tensor) -> PendingCopy:
        """Start the copy of `host` to the device."""
        ...


class StreamCopier:
    """Copies over a side stream and pinned memory of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream: Any = torch.cuda.Stream(device)

    def to_host(self, x: Tensor) -> Tensor:
        host = torch.empty_like(x, device="cpu", pin_memory=True)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            host.copy_(x, non_blocking=True)
        x.record_stream(self.stream)  # the allocator reuses its memory only after the copy
        return host

    def to_device(self, host: Tensor) -> PendingCopy:
        with torch.cuda.stream(self.stream):  # after the copy to the host, so the bytes are there
            copy = torch.empty_like(host, device=self.device, pin_memory=False)
            copy.copy_(host, non_blocking=True)
            done: Any = torch.cuda.Event()
            done.record(self.stream)

        def wait() -> Tensor:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(done)
            copy.record_stream(current)
            return copy

        return wait


class PlainCopier:
    """Copies by `Tensor.to`, for devices whose streams are not supported."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def to_host(self, x: Tensor) -> Tensor:
        return x.to("cpu", copy=True)

    def to_device(self, host: Tensor) -> PendingCopy:
        return lambda: host.to(self.device, copy=True)


class _HostCopy:
    """One saved tensor: a weak reference to its copy on the host, and the tensor saved before it."""

    def __init__(self, host: Tensor, previous: "_HostCopy | None") -> None:
        self.storage = weakref.ref(host.untyped_storage())
        self.alive = StorageWeakRef(host.untyped_storage())
        self.shape, self.stride, self.dtype = host.shape, host.stride(), host.dtype
        self.previous = previous

    def tensor(self) -> Tensor | None:
        """Return the tensor on the host; None once it is freed."""
        storage = self.storage()
        if storage is None or self.alive.expired():
            return None
        return torch.empty(0, dtype=self.dtype).set_(storage, 0, self.shape, self.stride)


class OffloadQueue:
    """The tensors that one device has saved on the host, in forward order, and one prefetched copy."""

    def __init__(self, copier: Copier) -> None:
        self.copier = copier
        self.last: _HostCopy | None = None
        self.copies: dict[int, _HostCopy] = {}
        self.prefetched: tuple[_HostCopy, PendingCopy] | None = None

    def save(self, x: Tensor) -> Tensor:
        """Return a copy of x on the host."""
        host = self.copier.to_host(x)
        self._remove_freed()
        self.last = self.copies[host.untyped_storage()._cdata] = _HostCopy(host, self.last)
        return host

    def load(self, host: Tensor) -> Tensor:
        """Return `host` on the device, and start the copy of the tensor saved before it."""
        saved = self.copies.get(host.untyped_storage()._cdata)
        if self.prefetched is not None and self.prefetched[0] is saved:
            pending = self.prefetched[1]
        else:
            pending = self.copier.to_device(host)
        self.prefetched = None
        previous = saved.previous if saved is not None else None
        while previous is not None:
            tensor = previous.tensor()
            if tensor is not None:
                self.prefetched = (previous, self.copier.to_device(tensor))
                break
            previous = previous.previous
        return pending()

    def _remove_freed(self) -> None:
        """Remove freed tensors from the end of the list and from the table."""
        while self.last is not None and self.last.alive.expired():
            self.last = self.last.previous
        if self.last is None:
            self.prefetched = None
        self.copies = {key: saved for key, saved in self.copies.items() if not saved.alive.expired()}


_queues: dict[torch.device, OffloadQueue] = {}


def _queue(device: torch.device) -> OffloadQueue:
    if device not in _queues:
        copier: Copier = StreamCopier(device) if device.type == "cuda" else PlainCopier(device)
        _queues[device] = OffloadQueue(copier)
    return _queues[device]


def encode(x: Tensor, spec: Spec, key: Tensor, memory: Memory | None = None) -> list[Tensor]:
    """Return the tensor on the host, and an empty tensor whose device is that of x."""
    x = x.detach()
    marker = x.new_empty(0)
    if torch.compiler.is_compiling():
        return [x.to("cpu", non_blocking=True), marker]
    return [_queue(x.device).save(x), marker]


def decode(parts: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype, spec: Spec) -> Tensor:
    """Return the tensor on its device again, bit for bit."""
    host, marker = parts
    if torch.compiler.is_compiling():
        return host.to(marker.device, non_blocking=True)
    return _queue(marker.device).load(host)


def packed_bytes(shape: Sequence[int], spec: Spec, element_size: int = 4) -> int:
    """Return the bytes on the device: none."""
    return 0


def refuses(tensor: Tensor, spec: Spec) -> str | None:
    """Return why `tensor` cannot be offloaded; None if it can."""
    if tensor.device.type == "cpu":
        return "`store: offload` frees nothing on a CPU device, whose memory is the host's"
    return None
