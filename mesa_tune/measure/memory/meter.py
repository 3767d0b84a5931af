"""Live bytes of a training step, counted from outside: every storage's birth and death.

What is hard: autograd frees memory by reference counts, and its address is used again at once. So the meter
has weak references to *storages* (PyTorch has one Python object per storage for as long as the storage
lives), whose callbacks record each death when it happens. It shares no code with what it measures, and so
can check it.

What it cannot see: memory that a kernel allocates and frees within one call, and memory that no tensor owns.
On the CPU it adds a model of the first (workspaces.py). A storage that is first seen as an argument counts
as older than the meter.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor, UntypedStorage, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from mesa_tune.measure.memory.workspaces import UntouchedBytes, workspace_bytes
from mesa_tune.workload.boundaries import BackwardCall, StepEvents
from mesa_tune.workload.step import Context, LossStepper, Stepper, TrainingStep
from mesa_tune.workload.user_code import is_out_of_memory

_SIMPLE = TrainingStep()
_DEVICE = torch.ops.prim.device.default

Value = TypeVar("Value")
MeterKind = TypeVar("MeterKind", bound="Meter")


@dataclass(slots=True)
class _Birth:
    number: int
    bytes: int
    watch: weakref.ref[UntypedStorage]


class Meter(TorchDispatchMode):
    """Bytes of the storages born since the meter was entered: alive now, and the most at once.

    Works in the forward, in the backward and in the optimizer's step, on every device. Bytes are those of
    whole storages; each is counted once, however many tensors view it. `tensor_peak`: the most of tensors
    alone. `peak`: the most with what kernels take besides, and without what no kernel has written.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.tensor_peak = 0
        self.peak = 0
        self._untouched = UntouchedBytes()
        self._births: dict[int, _Birth] = {}
        self._older: dict[int, weakref.ref[UntypedStorage]] = {}
        self._count = 0

    def __enter__(self: MeterKind) -> MeterKind:
        super().__enter__()  # type: ignore[no-untyped-call]
        resize: Any = UntypedStorage.resize_

        def resized(storage: UntypedStorage, size: int) -> Any:
            before = storage.nbytes()
            result = resize(storage, size)
            self._see_new_size(storage, before)
            return result

        self._resizing = patch.object(UntypedStorage, "resize_", resized)
        self._resizing.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._resizing.stop()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):  # half of all calls on fake tensors
            return args[0].device
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):  # such as DTensor: see what it calls
            return NotImplemented
        for storage in storages((args, kwargs)):
            self._see_argument(storage)
        result = func(*args, **(kwargs or {}))
        for storage in storages(result):
            self._see_result(storage)
        self._called(func, args, result)
        return result

    def _called(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Count what an operator took besides tensors; called after each."""
        self._untouched.see(func, args, result)
        self._reach(workspace_bytes(func, args, result))

    def _reach(self, more: int = 0) -> None:
        """Count the bytes alive now and `more` as a moment of the step."""
        self.peak = max(self.peak, self.written_bytes + more)

    @property
    def written_bytes(self) -> int:
        """The live bytes that some kernel has written: the others take addresses, and no memory."""
        return self.live_bytes - self._untouched.nbytes

    def count_older(self, tensors: Iterable[Tensor], others: Iterable[UntypedStorage] = ()) -> None:
        """Count tensors and storages that exist already, in this order, as if they were born now."""
        for storage in (*storages(list(tensors)), *others):
            self._see_result(storage)
        self._reach()

    def mark(self) -> int:
        """Return the current moment, for `live_since`."""
        return self._count

    def live_since(self, mark: int, *, without: Iterable[Tensor] = ()) -> int:
        """Return the bytes of live storages born after `mark`, except those of `without`."""
        excluded = {storage._cdata for storage in storages(list(without))}
        return sum(
            birth.bytes for key, birth in self._births.items() if birth.number > mark and key not in excluded
        )

    def counted_bytes(self, tensors: Iterable[Tensor]) -> int:
        """Return the bytes of the storages of `tensors` that are in `live_bytes`."""
        keys = {storage._cdata for storage in storages(list(tensors))}
        return sum(birth.bytes for key, birth in self._births.items() if key in keys)

    def live_storages(self) -> list[UntypedStorage]:
        """Return the counted storages that are alive."""
        watched = [birth.watch() for birth in self._births.values()]
        return [storage for storage in watched if storage is not None]

    def reset_peak(self) -> None:
        """Begin again with the bytes alive now."""
        self.tensor_peak, self.peak = self.live_bytes, self.written_bytes

    def _see_argument(self, storage: UntypedStorage) -> None:
        """Record a storage that is older than the meter, or the new size of a counted one."""
        key = storage._cdata
        if key in self._births:
            self._resize(self._births[key], storage.nbytes())
        elif key not in self._older:
            self._older[key] = weakref.ref(storage, lambda _: self._older.pop(key, None))

    def _see_new_size(self, storage: UntypedStorage, before: int) -> None:
        """Record that `storage.resize_` was called: FSDP2 so frees memory of living tensors."""
        key, size = storage._cdata, storage.nbytes()
        if key in self._births and size:
            self._resize(self._births[key], size)
        elif key in self._births:
            self._record_death(key)
        else:
            self._older.pop(key, None)
            self.live_bytes -= before
            self._see_result(storage)
        self._reach()

    def _see_result(self, storage: UntypedStorage) -> None:
        key = storage._cdata
        if key in self._older:
            return
        if key not in self._births:
            self._count += 1
            self._births[key] = _Birth(
                self._count, 0, weakref.ref(storage, lambda _: self._record_death(key))
            )
        self._resize(self._births[key], storage.nbytes())

    def _resize(self, birth: _Birth, size: int) -> None:
        self.live_bytes += size - birth.bytes
        birth.bytes = size
        self.tensor_peak = max(self.tensor_peak, self.live_bytes)

    def _record_death(self, key: int) -> None:
        self._untouched.forget(key)
        self.live_bytes -= self._births.pop(key).bytes


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes of one training step: static (weights, buffers, optimizer state, batch), saved, and the peak.

    `tensor_bytes`: the peak of tensors alone.
    """

    static_bytes: int
    saved_bytes: int
    peak_bytes: int
    tensor_bytes: int


def measure_step(
    model: nn.Module,
    batch: Any,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    optimizer: Optimizer,
    step: TrainingStep = _SIMPLE,
) -> StepMemory:
    """Return the memory of the second training step of `model` with this loss; see `measure_second_step`."""
    return measure_second_step(LossStepper(step, optimizer, loss_fn), model, batch)


def measure_second_step(
    stepper: Stepper,
    model: nn.Module,
    batch: Any,
    forward: Callable[[], Context] = nullcontext,
    *,
    convert: Callable[[], object] | None = None,
) -> StepMemory:
    """Return the memory of the second training step of `model` on `batch`; the steps change the model.

    The first step creates optimizer state and lazy buffers. `convert`: called after it, and then the memory
    is that of the first step of the converted model or of the one after it, whichever takes more. Saved: born
    after the model and the batch, and alive when a backward begins, except parameters, their gradients,
    buffers, optimizer state and the loss itself; of several backwards the most. Peak: on the CPU that of
    live storages and of what kernels take besides; on CUDA the allocator's own, less what it had before.
    `forward`: see `Stepper`.
    """
    inputs = [*model.parameters(), *model.buffers(), *tensors_in(batch)]
    device = next((tensor.device for tensor in inputs), torch.device("cpu"))
    is_cuda = device.type == "cuda"
    foreign = (torch.cuda.memory_allocated(device) if is_cuda else 0) - bytes_of(inputs)
    with Meter() as meter:
        if convert is None:
            stepper.run(model, batch, forward)
        else:
            stepper.run(model, batch)
            convert()
        stepper.begin()
        gc.collect()
        static = [*inputs, *tensors_in(stepper.state)]
        static_bytes = bytes_of([*static, *gradients_of(model)])
        older = bytes_of(static) - meter.counted_bytes(static)
        meter.reset_peak()
        if is_cuda:
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        saved = _SavedBytes(meter, model, inputs, stepper)
        for _ in range(1 if convert is None else 2):
            stepper.run(model, batch, forward, saved)
        if is_cuda:
            torch.cuda.synchronize(device)
            peak = torch.cuda.max_memory_allocated(device) - foreign
        else:
            peak = older + meter.peak
    return StepMemory(static_bytes, saved.most, peak, older + meter.tensor_peak)


class _SavedBytes(StepEvents):
    """The most bytes that are saved when a backward begins. `inputs` are not counted."""

    def __init__(self, meter: Meter, model: nn.Module, inputs: list[Tensor], stepper: Stepper) -> None:
        self.meter, self.model, self.inputs, self.stepper = meter, model, inputs, stepper
        self.most = 0

    def backward_begins(self, call: BackwardCall) -> None:
        state = tensors_in(self.stepper.state)  # that of LBFGS grows from step to step
        without = [*self.inputs, *state, *self.model.buffers(), *gradients_of(self.model), *call.outputs]
        self.most = max(self.most, self.meter.live_since(0, without=without))


def gradients_of(model: nn.Module) -> list[Tensor]:
    """Return the gradients of the parameters that have one."""
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def unless_out_of_memory(measure: Callable[[], Value]) -> Value | None:
    """Return the result of `measure()`; None, with memory freed, if it runs out of memory."""
    try:
        return measure()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    # Outside the handler: the error refers to frames, and these to tensors.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the distinct storages of `tensors`."""
    return sum({storage._cdata: storage.nbytes() for storage in storages(list(tensors))}.values())


def storages(tree: Any) -> list[UntypedStorage]:
    """Return the storages of all tensors in nested lists, tuples and dicts, sparse ones included."""
    # Called for each operation of a step, and therefore neither by pytree nor by nested generators.
    found: list[UntypedStorage] = []
    waiting = [tree]
    for item in waiting:
        if isinstance(item, Tensor):
            found += [part.untyped_storage() for part in parts_of(item)]
        elif isinstance(item, (tuple, list)):
            waiting += item
        elif isinstance(item, dict):
            waiting += item.values()
    return found


def tensors_in(tree: Any) -> list[Tensor]:
    """Return all tensors in nested containers, mappings and objects with attributes."""
    tensors: list[Tensor] = []
    seen: set[int] = set()
    waiting = [tree]
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            tensors.append(item)
        else:
            waiting.extend(_contents(item))
    return tensors


def _contents(item: Any) -> list[Any]:
    if isinstance(item, Mapping):
        return list(item.values())
    if isinstance(item, (list, tuple, set, frozenset)):
        return list(item)
    return [] if isinstance(item, type) else list(getattr(item, "__dict__", {}).values())


def parts_of(tensor: Tensor) -> list[Tensor]:
    """Return the dense tensors that a wrapper subclass or a sparse tensor consists of; else `tensor`."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        inner = [getattr(tensor, name) for name in flatten()[0]]
        return [part for each in inner if isinstance(each, Tensor) for part in parts_of(each)]
    if tensor.layout is torch.strided:
        return [tensor]
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    return []
