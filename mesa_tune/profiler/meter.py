"""Live bytes of a training step, counted from outside: every storage's birth and death.

What is hard: memory is freed by reference counts, deep inside autograd, and an address is used again the
next moment. So the meter holds weak references to *storages* (PyTorch keeps one Python object a storage for
as long as the storage lives) whose callbacks book each death when it happens; and it shares no code with what
it measures, so that it can be held against it.

What it cannot see: scratch memory that a kernel allocates and frees within one call, and memory that no
tensor owns. A storage that is first seen as an argument counts as older than the meter.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(slots=True)
class _Birth:
    number: int
    bytes: int
    watch: weakref.ref[UntypedStorage]


class Meter(TorchDispatchMode):
    """Bytes of the storages that were born since the meter was entered: alive now, and their high-water mark.

    Works in the forward, in the backward and in the optimizer's step alike, on any device. Bytes are those of
    whole storages, each counted once however many tensors view it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.high_water = 0
        self._births: dict[int, _Birth] = {}
        self._older: dict[int, weakref.ref[UntypedStorage]] = {}
        self._count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for storage in storages((args, kwargs)):
            self._meet(storage)
        result = func(*args, **(kwargs or {}))
        for storage in storages(result):
            self._bear(storage)
        return result

    def mark(self) -> int:
        """A moment to give to `live_since`."""
        return self._count

    def live_since(self, mark: int, *, without: Iterable[Tensor] = ()) -> int:
        """Bytes of the storages that are alive and were born after `mark`, except those of `without`."""
        excluded = {storage._cdata for storage in storages(list(without))}
        return sum(
            birth.bytes for key, birth in self._births.items() if birth.number > mark and key not in excluded
        )

    def bears(self, tensors: Iterable[Tensor]) -> int:
        """Bytes of those storages of `tensors` that the meter counts itself."""
        found = {storage._cdata for storage in storages(list(tensors))}
        return sum(birth.bytes for key, birth in self._births.items() if key in found)

    def reset_high_water(self) -> None:
        """The high-water mark starts again from what is alive now."""
        self.high_water = self.live_bytes

    def _meet(self, storage: UntypedStorage) -> None:
        """Note a storage that is read: older than the meter, or one of ours that may have grown."""
        key = storage._cdata
        if key in self._births:
            self._resize(self._births[key], storage.nbytes())
        elif key not in self._older:
            self._older[key] = weakref.ref(storage, lambda _: self._older.pop(key, None))

    def _bear(self, storage: UntypedStorage) -> None:
        key = storage._cdata
        if key in self._older:
            return
        if key not in self._births:
            self._count += 1
            self._births[key] = _Birth(self._count, 0, weakref.ref(storage, lambda _: self._bury(key)))
        self._resize(self._births[key], storage.nbytes())

    def _resize(self, birth: _Birth, size: int) -> None:
        self.live_bytes += size - birth.bytes
        birth.bytes = size
        self.high_water = max(self.high_water, self.live_bytes)

    def _bury(self, key: int) -> None:
        self.live_bytes -= self._births.pop(key).bytes


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes of one training step: static (weights, buffers, optimizer state, batch), saved, and the peak."""

    static_bytes: int
    saved_bytes: int
    peak_bytes: int


def measure_step(
    model: nn.Module, batch: Any, loss_fn: Callable[[nn.Module, Any], Tensor], optimizer: Optimizer
) -> StepMemory:
    """The memory of the second training step of `model` on `batch`; both steps change the model.

    A first step goes before, so that optimizer state and lazily made buffers are there. Saved: born since the
    model and batch were, and alive when the loss is there, except parameters, buffers, optimizer state and
    the loss itself; whatever object holds it. Peak: on the CPU the high-water mark of live storages; on CUDA
    the allocator's own, less what it held for others.
    """
    given = [*model.parameters(), *model.buffers(), *tensors_in(batch)]
    device = next((tensor.device for tensor in given), torch.device("cpu"))
    foreign = _allocated(device) - bytes_of(given)
    with Meter() as meter:
        take_step(model, batch, loss_fn, optimizer)
        optimizer.zero_grad(set_to_none=True)
        gc.collect()
        static = [*given, *tensors_in(optimizer.state)]
        older = bytes_of(static) - meter.bears(static)
        _begin_peak(meter, device)
        saved_bytes = 0
        for loss in step_phases(model, batch, loss_fn, optimizer):
            saved_bytes = meter.live_since(0, without=[*static, *model.buffers(), loss])
        peak = _peak(device) - foreign if device.type == "cuda" else older + meter.high_water
    return StepMemory(bytes_of(static), saved_bytes, peak)


def step_phases(
    model: nn.Module, batch: Any, loss_fn: Callable[[nn.Module, Any], Tensor], optimizer: Optimizer
) -> Iterator[Tensor]:
    """One training step that stops, and yields the loss, when the forward has ended."""
    optimizer.zero_grad(set_to_none=True)
    loss = loss_fn(model, batch)
    yield loss.detach()
    loss.backward()
    del loss
    optimizer.step()


def take_step(
    model: nn.Module, batch: Any, loss_fn: Callable[[nn.Module, Any], Tensor], optimizer: Optimizer
) -> None:
    """One whole training step; nothing of it is held afterwards."""
    for _ in step_phases(model, batch, loss_fn, optimizer):
        pass


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages of `tensors`."""
    return sum({storage._cdata: storage.nbytes() for storage in storages(list(tensors))}.values())


def storages(tree: Any) -> Iterator[UntypedStorage]:
    """The storages of all tensors in a nest of containers, sparse ones included."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            for part in _parts(leaf):
                yield part.untyped_storage()


def tensors_in(tree: Any) -> list[Tensor]:
    """All tensors in a nest of containers, mappings and objects with attributes."""
    found: list[Tensor] = []
    seen: set[int] = set()
    waiting = [tree]
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            found.append(item)
        else:
            waiting.extend(_contents(item))
    return found


def _contents(item: Any) -> list[Any]:
    if isinstance(item, Mapping):
        return list(item.values())
    if isinstance(item, (list, tuple, set, frozenset)):
        return list(item)
    return [] if isinstance(item, type) else list(getattr(item, "__dict__", {}).values())


def _parts(tensor: Tensor) -> list[Tensor]:
    if tensor.layout == torch.strided:
        return [tensor]
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    return []


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _begin_peak(meter: Meter, device: torch.device) -> None:
    meter.reset_high_water()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)


def _peak(device: torch.device) -> int:
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)
