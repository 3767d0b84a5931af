"""Trace one training step from outside: when each storage is born and dies, and which call saves it.

What is hard: to predict another policy, tensors of the plain step must be found again in a compressed one,
where they have other storages and die earlier. Both steps run the same model code, and so make the same torch
calls in the same order. So the trace records the storages that each call takes and returns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from math import prod
from typing import Any

from torch import Tensor, UntypedStorage, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils._pytree import tree_leaves

from mesa_tune.engine.observer import Observer, watch
from mesa_tune.engine.rematerialize import Recipe
from mesa_tune.engine.storage import Packing
from mesa_tune.engine.tensors import is_small_view
from mesa_tune.formulas.activation import POINTWISE_INPUT
from mesa_tune.measure.memory.meter import Meter, gradients_of, storages
from mesa_tune.measure.memory.step_trace import (
    NEVER,
    CallKey,
    CodedTrace,
    Forward,
    Lifetime,
    PlainTrace,
    SlotTrace,
    StepTrace,
    TensorKey,
)
from mesa_tune.ops.maps import Deferred
from mesa_tune.ops.reference import channels_of
from mesa_tune.policy.settings import MIN_ELEMENTS
from mesa_tune.workload.boundaries import BackwardCall, StepEvents
from mesa_tune.workload.step import Context, Stepper

_LAYER = "mesa-tune layer"
"""Key in the metadata of a node: the layer whose backward it is."""


class Recorder(Meter):
    """A meter that records the lifetimes of all storages, on a clock that ticks at every birth and death.

    `gradients`: those that are alive when the step begins, and may die in it.
    """

    def __init__(self, gradients: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.trace = StepTrace()
        self.now = 0
        self.open_slot(None, "forward")
        self.count_older(gradients)
        self.trace.gradients = {birth.number for birth in self._births.values()}
        self._older_gradients = frozenset(self.trace.gradients)

    def number(self, storage: UntypedStorage) -> int | None:
        """Return the number of a storage that was born in this step; None for an older one."""
        birth = self._births.get(storage._cdata)
        return None if birth is None else birth.number

    def take_static_gradients(self) -> None:
        """Count the gradients that have lived through the whole step as older than it."""
        trace = self.trace
        through = self._older_gradients & {birth.number for birth in self._births.values()}
        trace.static_gradients = sum(trace.lifetimes.pop(number).bytes for number in through)
        trace.gradients -= through
        # Without its birth, no death of a gradient is recorded.
        self._births = {key: birth for key, birth in self._births.items() if birth.number not in through}
        for slot in trace.slots:
            slot.high = max(0, slot.high - trace.static_gradients)
            slot.tensors = max(0, slot.tensors - trace.static_gradients)

    def open_slot(self, layer: str | None, phase: str, *, again: bool = False) -> None:
        """Begin a new slot."""
        self.now += 1
        slot = SlotTrace(layer, phase, self.written_bytes, self.live_bytes, self.now, again)
        self.trace.slots.append(slot)

    def _called(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        self.trace.libraries.see(func, args)
        super()._called(func, args, result)

    def _reach(self, more: int = 0) -> None:
        slot = self.trace.slots[-1]
        slot.high = max(slot.high, self.written_bytes + more)

    def _resize(self, birth: Any, size: int) -> None:
        super()._resize(birth, size)
        self.now += 1
        self.trace.lifetimes.setdefault(birth.number, Lifetime(size, self.now)).bytes = size
        slot = self.trace.slots[-1]
        if self.live_bytes > slot.tensors:
            slot.tensors, slot.moment = self.live_bytes, self.now

    def _record_death(self, key: int) -> None:
        self.now += 1
        self.trace.lifetimes[self._births[key].number].death = self.now
        super()._record_death(key)


class CallCounter:
    """Counts the calls of each layer that save tensors, in the order of a step."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def keys(self, layer: str, count: int) -> list[TensorKey]:
        """Return the keys of the `count` tensors that the next call of `layer` saves."""
        self.counts[layer] += 1
        return [(layer, self.counts[layer] - 1, position) for position in range(count)]


class Tracer(Observer):
    """Observer that fills a `StepTrace`."""

    def __init__(self, recorder: Recorder, is_static: Callable[[Tensor], bool]) -> None:
        self.recorder = recorder
        self.trace = recorder.trace
        self.is_static = is_static
        self.forward = True
        self.saving_calls = CallCounter()
        self.calls: Counter[str] = Counter()
        self.calls_in_backward: Counter[str] = Counter()

    def begin(self, layer: str | None, given: Any) -> None:
        if layer is not None:
            self.calls[layer] += 1
            phase = "forward" if self.forward else "backward"
            self.recorder.open_slot(layer, phase, again=not self.forward)
        self._note(layer, given, False)

    def end(self, layer: str | None, output: Any) -> None:
        self._note(layer, output, True)
        node = next((leaf.grad_fn for leaf in _tensors(output) if leaf.grad_fn is not None), None)
        if layer is None or node is None:
            return
        marks: dict[str, str] = node.metadata  # type: ignore[assignment]  # the stub says that it is a method
        # A layer that returns its input (dropout with p = 0) has no backward: the node is of one before it.
        if marks.setdefault(_LAYER, layer) == layer:
            node.register_prehook(lambda _: self.recorder.open_slot(layer, "backward"))

    def asked(self, layer: str, tensors: Sequence[Tensor]) -> None:
        floats = [tensor for tensor in _tensors(tensors) if tensor.is_floating_point()]
        counts = {channels_of(tensor.shape)[1] for tensor in floats if tensor.numel() > MIN_ELEMENTS}
        self.trace.asked_channels.setdefault(layer, set()).update(counts)
        sizes = [NEVER if self._is_small_view(tensor) else tensor.numel() for tensor in floats]
        self._extend(self._call(layer), max(sizes, default=0))

    def stored(
        self,
        layer: str,
        lossy: tuple[Tensor | Deferred, ...],
        how: tuple[Packing | Recipe, ...],
        parts: tuple[list[Tensor], ...],
        exact: list[Tensor],
        row: int,
        valued: bool = False,
    ) -> None:
        saved_exactly = list(exact)
        self.trace.rows.update({layer: row} if row else {})
        self.trace.valued.update({layer} if valued else ())
        keys = self.saving_calls.keys(layer, len(how))
        for key, tensor, packing, stored in zip(keys, lossy, how, parts, strict=True):
            if isinstance(packing, Recipe):
                self.trace.derived[key] = tuple(dict.fromkeys(packing.needed()))
                self.trace.serving.update(_serving(packing))
            elif packing.packed:
                source = self._viewed(layer, packing, tensor)
                self._coded(key, packing, stored, source)
            else:
                saved_exactly += stored
        for tensor in saved_exactly:
            number = self._number(tensor)
            if number is not None:
                self.trace.side.setdefault(number, layer)
                self.trace.side_calls.setdefault(number, []).append(self._call(layer))

    def saved(self, layer: str, tensor: Tensor) -> None:
        number = self._number(tensor)
        form = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        self.trace.saves.setdefault(layer, []).append((number, form))
        if number is None:
            return
        call = self._call(layer)
        elements = min(tensor.numel(), tensor.untyped_storage().nbytes() // tensor.element_size())
        self.trace.saved_extents[call] = max(elements, self.trace.saved_extents.get(call, 0))
        item = self.trace.plain.setdefault(number, PlainTrace([], *form))
        item.calls.append(call)
        if layer not in item.layers:
            item.layers.append(layer)

    def _call(self, layer: str) -> CallKey:
        return layer, self.calls[layer] - 1

    def _viewed(self, layer: str, packing: Packing, tensor: Tensor | Deferred) -> int | None:
        """Record the size of a tensor that a call stores in parts; return the storage that it views."""
        call, elements = self._call(layer), prod(packing.shape)
        self._extend(call, elements)
        if isinstance(tensor, Tensor) and (encoded := self._number(tensor)) is not None:
            self.trace.encoded.add((encoded, layer))
        if isinstance(tensor, Deferred) and tensor.kind == "definite":
            tensor = tensor.source
        if not isinstance(tensor, Tensor) or (call[1] >= 0 and self._is_small_view(tensor)):
            return None
        number = self._number(tensor)
        if number is not None:
            self.trace.views[call, number] = min(elements, self.trace.views.get((call, number), NEVER))
        return number

    def _extend(self, call: CallKey, elements: int) -> None:
        self.trace.extents[call] = max(elements, self.trace.extents.get(call, 0))

    def _is_small_view(self, tensor: Tensor) -> bool:
        """Return whether a call would copy the tensor, so that its much larger storage can be freed."""
        number = self._number(tensor) if tensor.is_floating_point() else None
        return number is not None and is_small_view(tensor, self.trace.lifetimes[number].bytes)

    def _coded(self, key: TensorKey, packing: Packing, stored: list[Tensor], source: int | None) -> None:
        numbers = [number for part in stored if (number := self._number(part)) is not None]
        if not numbers:
            return
        new = CodedTrace([], packing.shape, packing.dtype.itemsize, numbers, source)
        item = self.trace.coded.setdefault(numbers[0], new)
        item.calls.append(self._call(key[0]))
        if packing.width:
            item.width = packing.width
            self.trace.samplers.add(key[0])
        self.trace.first_parts[key] = numbers[0]
        if key[0] not in item.layers:
            item.layers.append(key[0])

    def _number(self, tensor: Tensor) -> int | None:
        return None if self.is_static(tensor) else self.recorder.number(tensor.untyped_storage())

    def _note(self, layer: str | None, tree: Any, returned: bool) -> None:
        if not self.forward and layer is None:
            return
        numbers = tuple([self.recorder.number(tensor.untyped_storage()) for tensor in _tensors(tree)])
        if layer is None or self.forward:
            self.trace.calls.append(numbers)
        else:
            self.calls_in_backward[layer] += not returned
            self.trace.again[layer, self.calls_in_backward[layer], returned] = numbers


class StepRecording(StepEvents):
    """Context in which a step of `model` is traced; it is told of each backward.

    Tensors in `static` are not counted. `trace` is complete when the context has ended.
    """

    def __init__(self, model: nn.Module, static: list[Tensor], recorder: Recorder) -> None:
        static_storages = {storage._cdata for storage in storages(static)}
        self.model, self.static, self.recorder = model, static, recorder
        self.trace = self.recorder.trace
        self.tracer = Tracer(self.recorder, lambda tensor: tensor.untyped_storage()._cdata in static_storages)
        self._begin = 0
        self._contexts = ExitStack()

    def __enter__(self) -> StepRecording:
        self._contexts.enter_context(observing(self.tracer))
        self._contexts.enter_context(self.recorder)
        return self

    def __exit__(self, *_: object) -> None:
        self._contexts.close()
        self.trace.drop_dead_after_forward()
        self.recorder.take_static_gradients()

    def backward_begins(self, call: BackwardCall) -> None:
        recorder, trace = self.recorder, self.trace
        recorder.open_slot(None, "forward")
        trace.losses |= self._numbers(call.outputs)
        without = [*self.static, *call.outputs, *gradients_of(self.model)]
        trace.forwards.append(Forward(self._begin, recorder.now, recorder.live_since(0, without=without)))
        self.tracer.forward = False
        recorder.open_slot(None, "backward")

    def backward_ended(self) -> None:
        # A fused loss saves gradients that its forward has computed, and hands them on.
        self.trace.gradients |= self._numbers(gradients_of(self.model)) - self.trace.plain.keys()
        self._begin = self.recorder.now
        self.tracer.forward = True
        self.recorder.open_slot(None, "step")

    def _numbers(self, tensors: Iterable[Tensor]) -> set[int]:
        numbers = (self.recorder.number(storage) for storage in storages(list(tensors)))  # sparse: two each
        return {number for number in numbers if number is not None}


def trace_step(
    stepper: Stepper, model: nn.Module, batch: Any, forward: Callable[[], Context], static: list[Tensor]
) -> StepTrace:
    """Trace one step, of a loss with several micro-batches the last; `static` tensors are not counted."""
    counted = set(map(id, static))
    gradients = [gradient for gradient in gradients_of(model) if id(gradient) not in counted]
    with StepRecording(model, static, Recorder(gradients)) as recording:
        del gradients
        stepper.run_last(model, batch, forward, recording)
    return recording.trace


@contextmanager
def observing(observer: Any) -> Iterator[None]:
    """Run the body under `observer`."""
    before, watch.observer = watch.observer, observer
    try:
        yield
    finally:
        watch.observer = before


def _serving(recipe: Recipe) -> Iterator[str]:
    """Yield the layers of a recipe that would save something else if no layer derived from them."""
    if recipe.formula is POINTWISE_INPUT:
        yield recipe.layer
    for below in (*recipe.saved, *recipe.inputs):
        if isinstance(below, Recipe):
            yield from _serving(below)


def _tensors(tree: Any) -> list[Tensor]:
    """Return the tensors in `tree` that have a storage; inside a transform of `torch.func` they have none."""
    leaves = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return [leaf for leaf in leaves if not is_functorch_wrapped_tensor(leaf)]
