"""Host memory instead of the device's: `store: offload`, exact, with the next copy back one layer ahead.

What is hard is the order of things. Copies run on a stream of their own beside the computation. A tensor's
memory may be used again only when its copy out is done, and the computation must wait for a copy back before
it reads; backward asks for tensors in the opposite order to forward, so whoever asks for one gets the one
kept just before it on its way, and never more than one, or the copies ahead would fill what was to be freed.
`Shelf` is that order; a `Copier` moves the bytes.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from mesa_tune.codecs.spec import Memory, Spec

Arrival = Callable[[], Tensor]
"""Waits for a copy back, in the order of the device's work, and gives it."""


class Copier(Protocol):
    """Moves tensors between a device and the host without waiting."""

    def out(self, x: Tensor) -> Tensor:
        """A copy of x on the host; x may be freed at once, the copy is not to be read there."""
        ...

    def back(self, host: Tensor) -> Arrival:
        """Begins the copy of `host` to the device."""
        ...


class StreamCopier:
    """Copies over a side stream and pinned memory of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream: Any = torch.cuda.Stream(device)

    def out(self, x: Tensor) -> Tensor:
        host = torch.empty_like(x, device="cpu", pin_memory=True)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            host.copy_(x, non_blocking=True)
        x.record_stream(self.stream)  # its memory is not handed out again before the copy is done
        return host

    def back(self, host: Tensor) -> Arrival:
        with torch.cuda.stream(self.stream):  # behind the copy out, so the bytes are there
            copy = torch.empty_like(host, device=self.device, pin_memory=False)
            copy.copy_(host, non_blocking=True)
            done: Any = torch.cuda.Event()
            done.record(self.stream)

        def arrived() -> Tensor:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(done)
            copy.record_stream(current)
            return copy

        return arrived


class PlainCopier:
    """Copies as `Tensor.to` does, for devices without streams that we know."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def out(self, x: Tensor) -> Tensor:
        return x.to("cpu", copy=True)

    def back(self, host: Tensor) -> Arrival:
        return lambda: host.to(self.device, copy=True)


class _Ticket:
    """One kept tensor: where it lies on the host, and the ticket before it."""

    def __init__(self, host: Tensor, before: "_Ticket | None") -> None:
        self.host = weakref.ref(host.untyped_storage())
        self.alive = StorageWeakRef(host.untyped_storage())
        self.shape, self.stride, self.dtype = host.shape, host.stride(), host.dtype
        self.before = before

    def tensor(self) -> Tensor | None:
        """The tensor on the host; None once nobody keeps it."""
        storage = self.host()
        if storage is None or self.alive.expired():
            return None
        return torch.empty(0, dtype=self.dtype).set_(storage, 0, self.shape, self.stride)


class Shelf:
    """What lies on the host for one device, in the order of forward, and at most one copy ahead."""

    def __init__(self, copier: Copier) -> None:
        self.copier = copier
        self.last: _Ticket | None = None
        self.tickets: dict[int, _Ticket] = {}
        self.ahead: tuple[_Ticket, Arrival] | None = None

    def put(self, x: Tensor) -> Tensor:
        """A copy of x on the host."""
        host = self.copier.out(x)
        self._forget_dead()
        self.last = self.tickets[host.untyped_storage()._cdata] = _Ticket(host, self.last)
        return host

    def take(self, host: Tensor) -> Tensor:
        """`host` on the device again, and the one kept before it on its way."""
        ticket = self.tickets.get(host.untyped_storage()._cdata)
        if self.ahead is not None and self.ahead[0] is ticket:
            arrival = self.ahead[1]
        else:
            arrival = self.copier.back(host)
        self.ahead = None
        before = ticket.before if ticket is not None else None
        while before is not None:
            waiting = before.tensor()
            if waiting is not None:
                self.ahead = (before, self.copier.back(waiting))
                break
            before = before.before
        return arrival()

    def _forget_dead(self) -> None:
        """Drops tickets whose tensors nobody keeps, from the end of the row and from the table."""
        while self.last is not None and self.last.alive.expired():
            self.last = self.last.before
        if self.last is None:
            self.ahead = None
        self.tickets = {key: ticket for key, ticket in self.tickets.items() if not ticket.alive.expired()}


_shelves: dict[torch.device, Shelf] = {}


def _shelf(device: torch.device) -> Shelf:
    if device not in _shelves:
        copier: Copier = StreamCopier(device) if device.type == "cuda" else PlainCopier(device)
        _shelves[device] = Shelf(copier)
    return _shelves[device]


def encode(x: Tensor, spec: Spec, key: Tensor, memory: Memory | None = None) -> list[Tensor]:
    """The tensor on the host, and an empty one that stays on the device and names it."""
    x = x.detach()
    marker = x.new_empty(0)
    if torch.compiler.is_compiling():
        return [x.to("cpu", non_blocking=True), marker]
    return [_shelf(x.device).put(x), marker]


def decode(parts: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype, spec: Spec) -> Tensor:
    """The tensor on its device again, bit for bit."""
    host, marker = parts
    if torch.compiler.is_compiling():
        return host.to(marker.device, non_blocking=True)
    return _shelf(marker.device).take(host)


def packed_bytes(shape: Sequence[int], spec: Spec, element_size: int = 4) -> int:
    """Bytes on the device: none."""
    return 0


def refuses(tensor: Tensor, spec: Spec) -> str | None:
    """Why `tensor` stays where it is."""
    if tensor.device.type == "cpu":
        return "`store: offload` frees nothing on a CPU device, whose memory is the host's"
    return None
