"""One training step, followed from outside: when each storage is born and dies, and which call keeps it.

What is hard: to say what another policy would keep, tensors of the plain step must be found again in a
compressed one, where they live elsewhere and die earlier. Both steps run the same model code, hence make
the same torch calls in the same order, and a tensor is named by the call and the place in which it first
appears.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

from torch import Tensor, UntypedStorage
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils._pytree import tree_leaves

from mesa_tune.engine.observer import Replay, watch
from mesa_tune.engine.rematerialize import Recipe
from mesa_tune.engine.storage import Packing
from mesa_tune.formulas.activation import POINTWISE_INPUT
from mesa_tune.ops.maps import Deferred
from mesa_tune.policy.settings import SCRAP
from mesa_tune.profiler.meter import Meter
from mesa_tune.profiler.step_trace import (
    NEVER,
    CodedTrace,
    Life,
    Place,
    PlainTrace,
    SlotTrace,
    StepTrace,
    Turn,
)


class Recorder(Meter):
    """A meter that keeps the lives of all storages, on a clock that ticks with every birth and death."""

    def __init__(self) -> None:
        super().__init__()
        self.trace = StepTrace()
        self.now = 0

    def number(self, storage: UntypedStorage) -> int | None:
        """The number of a storage that was born in this step; None for an older one."""
        birth = self._births.get(storage._cdata)
        return None if birth is None else birth.number

    def open_slot(self, layer: str | None, phase: str) -> None:
        """A new slot begins."""
        self.now += 1
        self.trace.slots.append(SlotTrace(layer, phase, self.live_bytes, self.now))

    def _resize(self, birth: Any, size: int) -> None:
        super()._resize(birth, size)
        self.now += 1
        self.trace.lives.setdefault(birth.number, Life(size, self.now)).bytes = size
        slot = self.trace.slots[-1]
        if self.live_bytes > slot.high:
            slot.high, slot.moment = self.live_bytes, self.now

    def _bury(self, key: int) -> None:
        self.now += 1
        self.trace.lives[self._births[key].number].death = self.now
        super()._bury(key)


class Turns:
    """Counts the calls of each layer in the order of a step."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {}

    def places(self, layer: str, count: int) -> list[Place]:
        """The places of the `count` tensors that the next call of `layer` keeps."""
        turn = self.known.get(layer, 0)
        self.known[layer] = turn + 1
        return [(layer, turn, place) for place in range(count)]


class Tracer:
    """The observer that fills a `StepTrace`."""

    wants_tensors = False

    def __init__(self, recorder: Recorder, is_static: Callable[[Tensor], bool]) -> None:
        self.recorder = recorder
        self.trace = recorder.trace
        self.is_static = is_static
        self.forward = True
        self.turns = Turns()
        self.known: dict[str, int] = {}
        self.begun: dict[str, int] = {}

    def begin(self, layer: str | None, given: Any) -> None:
        if layer is not None:
            self.begun[layer] = self.begun.get(layer, -1) + 1
            self.recorder.open_slot(layer, "forward" if self.forward else "backward")
        self._note(layer, given, False)

    def end(self, layer: str | None, output: Any) -> None:
        self._note(layer, output, True)
        node = next((leaf.grad_fn for leaf in _tensors(output) if leaf.grad_fn is not None), None)
        if layer is not None and node is not None:
            node.register_prehook(lambda _: self.recorder.open_slot(layer, "backward"))

    def asked(self, layer: str, tensors: Sequence[Tensor | None]) -> None:
        if any(self._is_scrap(tensor) for tensor in _tensors(tensors)):
            self.trace.extents[self._turn(layer)] = NEVER

    def stored(
        self,
        layer: str,
        lossy: tuple[Tensor | Deferred, ...],
        how: tuple[Packing | Recipe, ...],
        parts: tuple[list[Tensor], ...],
        exact: list[Tensor],
        row: int,
    ) -> None:
        aside = list(exact)
        self.trace.rows.update({layer: row} if row else {})
        places = self.turns.places(layer, len(how))
        for place, tensor, packing, stored in zip(places, lossy, how, parts, strict=True):
            if isinstance(packing, Recipe):
                self.trace.derived[place] = tuple(dict.fromkeys(packing.layers()))
                self.trace.serving.update(_serving(packing))
            elif packing.packed:
                source = self._viewed(layer, packing, tensor)
                self._coded(place, packing, stored, source)
                if isinstance(tensor, Tensor):
                    self._encoded(layer, tensor)
            else:
                aside += stored
        for tensor in aside:
            number = self._number(tensor)
            if number is not None:
                self.trace.side.setdefault(number, layer)
                self.trace.side_calls.setdefault(number, []).append(self._turn(layer))

    def saved(self, layer: str, tensor: Tensor) -> None:
        number = self._number(tensor)
        look = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        self.trace.saves.setdefault(layer, []).append((number, look))
        if number is None:
            return
        turn = self._turn(layer)
        elements = min(tensor.numel(), tensor.untyped_storage().nbytes() // tensor.element_size())
        self.trace.saved_extents[turn] = max(elements, self.trace.saved_extents.get(turn, 0))
        item = self.trace.plain.setdefault(number, PlainTrace([], *look))
        item.calls.append(turn)
        if layer not in item.layers:
            item.layers.append(layer)

    def backward(self, replay: Replay) -> None:
        """Slots of the backward are opened by the nodes' own hooks, in plain and compressed steps alike."""

    def unpacked(self, layer: str, tensor: Tensor) -> Tensor:
        return tensor

    def _turn(self, layer: str) -> Turn:
        return layer, self.begun.get(layer, -1)

    def _viewed(self, layer: str, packing: Packing, tensor: Tensor | Deferred) -> int | None:
        """Notes how large a tensor is that a call stores in parts; returns the storage that it would hold."""
        turn, elements = self._turn(layer), prod(packing.shape)
        self.trace.extents[turn] = max(elements, self.trace.extents.get(turn, 0))
        if isinstance(tensor, Deferred) and tensor.kind == "definite":
            tensor = tensor.source
        if not isinstance(tensor, Tensor) or (turn[1] >= 0 and self._is_scrap(tensor)):
            return None
        number = self._number(tensor)
        if number is not None:
            self.trace.views[turn, number] = min(elements, self.trace.views.get((turn, number), NEVER))
        return number

    def _is_scrap(self, tensor: Tensor) -> bool:
        """Whether a call would rather copy the tensor, however small, than hold all of its storage."""
        number = self._number(tensor) if tensor.is_floating_point() else None
        if number is None:
            return False
        elements = prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
        return 0 < elements * tensor.element_size() * SCRAP <= self.trace.lives[number].bytes

    def _coded(self, place: Place, packing: Packing, stored: list[Tensor], source: int | None) -> None:
        numbers = [number for part in stored if (number := self._number(part)) is not None]
        if not numbers:
            return
        new = CodedTrace([], packing.shape, packing.dtype.itemsize, numbers, source)
        item = self.trace.coded.setdefault(numbers[0], new)
        item.calls.append(self._turn(place[0]))
        self.trace.places[place] = numbers[0]
        if place[0] not in item.layers:
            item.layers.append(place[0])

    def _encoded(self, layer: str, tensor: Tensor) -> None:
        number = self._number(tensor)
        if number is not None:
            self.trace.encoded.add((number, layer))

    def _number(self, tensor: Tensor) -> int | None:
        return None if self.is_static(tensor) else self.recorder.number(tensor.untyped_storage())

    def _note(self, layer: str | None, tree: Any, returned: bool) -> None:
        if not self.forward and layer is None:
            return
        numbers = tuple([self.recorder.number(tensor.untyped_storage()) for tensor in _tensors(tree)])
        if layer is None or self.forward:
            self.trace.calls.append(numbers)
        else:
            turn = self.known[layer] = self.known.get(layer, -1) + (not returned)
            self.trace.again[layer, turn, returned] = numbers


def trace_step(
    begin: Callable[[], None], loss: Callable[[], Tensor], step: Callable[[], None], static: list[Tensor]
) -> StepTrace:
    """Follows one step: `begin()`, `loss()` and its backward, `step()`; `static` is never counted."""
    known = {tensor.untyped_storage()._cdata for tensor in static}
    recorder = Recorder()
    tracer = Tracer(recorder, lambda tensor: tensor.untyped_storage()._cdata in known)
    recorder.open_slot(None, "forward")
    with observing(tracer), recorder:
        begin()
        value = loss()
        recorder.open_slot(None, "forward")
        recorder.trace.saved_bytes = recorder.live_since(0, without=[*static, value])
        recorder.trace.ended = recorder.now
        recorder.trace.loss = recorder.number(value.untyped_storage())
        tracer.forward = False
        recorder.open_slot(None, "backward")
        value.backward()
        del value
        recorder.open_slot(None, "step")
        step()
    recorder.trace.forget_passing()
    return recorder.trace


@contextmanager
def observing(observer: Any) -> Iterator[None]:
    """The body runs under `observer`."""
    before, watch.observer = watch.observer, observer
    try:
        yield
    finally:
        watch.observer = before


def _serving(recipe: Recipe) -> Iterator[str]:
    """The layers of a recipe that would keep something else if nobody derived from them."""
    if recipe.formula is POINTWISE_INPUT:
        yield recipe.layer
    for below in (*recipe.saved, *recipe.inputs):
        if isinstance(below, Recipe):
            yield from _serving(below)


def _tensors(tree: Any) -> list[Tensor]:
    """The tensors in `tree` that have a storage; those inside a transform of `torch.func` have none."""
    leaves = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return [leaf for leaf in leaves if not is_functorch_wrapped_tensor(leaf)]
