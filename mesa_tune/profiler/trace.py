"""One training step, followed from outside: when each storage is born and dies, and which call keeps it.

What is hard: to say what another policy would keep, tensors of the plain step must be found again in a
compressed one, where they live elsewhere and die earlier. Both steps run the same model code, hence make
the same torch calls in the same order, and a tensor is named by the call and the place in which it first
appears.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, UntypedStorage
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils._pytree import tree_leaves

from mesa_tune.engine.function import Replay, watch
from mesa_tune.engine.rematerialize import Recipe
from mesa_tune.engine.storage import Meta
from mesa_tune.formulas.activation import POINTWISE_INPUT
from mesa_tune.ops.maps import Mapped
from mesa_tune.policy.settings import SCRAP
from mesa_tune.profiler.meter import Meter

NEVER = 1 << 62

Look = tuple[tuple[int, ...], str]
"""The shape and the dtype of a tensor."""
Place = tuple[str, int, int]
"""A kept tensor by its layer, how many calls of that layer came before, and its place in the call."""
Turn = tuple[str, int]
"""A call by its layer and how many calls of that layer came before; -1: hooks store for the layer."""


@dataclass
class Life:
    """A storage's bytes and its moments of birth and death, on the step's clock."""

    bytes: int
    birth: int
    death: int = NEVER


@dataclass
class SlotTrace:
    """A stretch of the step that begins with a call of `layer`: its most live bytes, and the moment of it."""

    layer: str | None
    phase: str
    high: int
    moment: int


@dataclass
class CodedTrace:
    """A tensor stored in parts: who keeps it, how many elements it has, and its parts' storages; `source`:
    the storage that would be held if it stayed as it is.
    """

    layers: list[str]
    shape: tuple[int, ...]
    itemsize: int
    parts: list[int]
    source: int | None = None
    calls: list[Turn] = field(default_factory=list)


@dataclass
class PlainTrace:
    """A storage that autograd keeps as it is: who keeps it, and the first tensor seen in it."""

    layers: list[str]
    shape: tuple[int, ...]
    dtype: str
    calls: list[Turn] = field(default_factory=list)


@dataclass
class StepTrace:
    """All that was seen in one step; storages go by number.

    `rows`: of layers whose groups end where rows do, the elements of a row. `saves`: by layer, what autograd
    itself saves, in its order (None: from before the step). `places`: the first part of each tensor stored in
    parts; `derived`: of each that is made again instead, the layers whose kept tensors that takes; `serving`:
    layers that keep their input for that, else something else.
    `calls`: the storages that each call of the forward takes or returns; `again`: those of a routed call
    inside the backward (a checkpointed part that runs again), by layer, turn and whether it returns them.
    `extents`: of a call, the elements of the largest tensor that it stores in parts, `NEVER` if it is given
    one that it would copy; `saved_extents`: of the largest that autograd saves for it. `views`: the fewest
    elements of a storage that a call stores in parts and does not copy.
    `ended`: the moment at which the forward ended; `loss`: what it returned.
    """

    lives: dict[int, Life] = field(default_factory=dict)
    slots: list[SlotTrace] = field(default_factory=list)
    calls: list[tuple[int | None, ...]] = field(default_factory=list)
    again: dict[tuple[str, int, bool], tuple[int | None, ...]] = field(default_factory=dict)
    coded: dict[int, CodedTrace] = field(default_factory=dict)
    side: dict[int, str] = field(default_factory=dict)
    side_calls: dict[int, list[Turn]] = field(default_factory=dict)
    extents: dict[Turn, int] = field(default_factory=dict)
    saved_extents: dict[Turn, int] = field(default_factory=dict)
    views: dict[tuple[Turn, int], int] = field(default_factory=dict)
    plain: dict[int, PlainTrace] = field(default_factory=dict)
    encoded: set[tuple[int, str]] = field(default_factory=set)
    rows: dict[str, int] = field(default_factory=dict)
    hooked: set[str] = field(default_factory=set)
    saves: dict[str, list[tuple[int | None, Look]]] = field(default_factory=dict)
    places: dict[Place, int] = field(default_factory=dict)
    derived: dict[Place, tuple[str, ...]] = field(default_factory=dict)
    serving: set[str] = field(default_factory=set)
    saved_bytes: int = 0
    ended: int = NEVER
    loss: int | None = None

    def is_saved(self, number: int) -> bool:
        """Whether the storage is there when the forward has ended."""
        life = self.lives[number]
        return life.birth <= self.ended < life.death

    def forget_passing(self) -> None:
        """Drops what did not live to the end of the forward.

        A checkpoint drops what its part saves in the first run; other graphs die because nobody goes back
        through them. What the part saves in its second run, in the backward, stays.
        """
        passing = {number for number, life in self.lives.items() if life.death <= self.ended}
        self.coded = {number: item for number, item in self.coded.items() if number not in passing}
        self.side = {number: layer for number, layer in self.side.items() if number not in passing}
        self.plain = {number: item for number, item in self.plain.items() if number not in passing}

    @cached_property
    def moments(self) -> NDArray[np.int64]:
        """The slots' highest moments, which rise, of a step that is over."""
        return np.array([slot.moment for slot in self.slots], dtype=np.int64)

    @cached_property
    def forward_end(self) -> int:
        """The last slot of the forward, of a step that is over."""
        return max(place for place, slot in enumerate(self.slots) if slot.phase == "forward")

    @cached_property
    def parts(self) -> frozenset[int]:
        """The storages of what is stored in parts, of a step that is over."""
        return frozenset(number for coded in self.coded.values() for number in coded.parts)

    def alive(self, number: int, moments: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether the storage is there at each of these moments."""
        life = self.lives[number]
        return (life.birth <= moments) & (moments < life.death)

    def stays(self, number: int) -> bool:
        """Whether the storage is kept by something else than what compresses it: a hook met no floats there,
        or too few of them; or it is a checkpoint's.
        """
        if number in self.parts:
            return False
        layers = self.plain[number].layers if number in self.plain else []
        others = [layer for layer in layers if layer != self.side.get(number)]
        if any((number, layer) not in self.encoded for layer in others):
            return True
        return self.is_saved(number) and number not in self.side

    def peak(self) -> int:
        """The highest number of bytes alive, besides what was there before the step."""
        return max(slot.high for slot in self.slots)


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
        self.copying: set[Turn] = set()

    def begin(self, layer: str | None, given: Any) -> None:
        if layer is not None:
            self.begun[layer] = self.begun.get(layer, -1) + 1
            if any(self._is_scrap(tensor) for tensor in _tensors(given)):
                self.copying.add(self._turn(layer))
            self.recorder.open_slot(layer, "forward" if self.forward else "backward")
        self._note(layer, given, False)

    def end(self, layer: str | None, output: Any) -> None:
        self._note(layer, output, True)
        node = next((leaf.grad_fn for leaf in _tensors(output) if leaf.grad_fn is not None), None)
        if layer is not None and node is not None:
            node.register_prehook(lambda _: self.recorder.open_slot(layer, "backward"))

    def kept(
        self,
        layer: str,
        lossy: tuple[Tensor | Mapped, ...],
        kept: tuple[Meta | Recipe, ...],
        parts: tuple[list[Tensor], ...],
        exact: list[Tensor],
        row: int,
    ) -> None:
        aside = list(exact)
        self.trace.rows.update({layer: row} if row else {})
        places = self.turns.places(layer, len(kept))
        for place, tensor, how, stored in zip(places, lossy, kept, parts, strict=True):
            if isinstance(how, Recipe):
                self.trace.derived[place] = tuple(dict.fromkeys(how.layers()))
                self.trace.serving.update(_serving(how))
            elif how.coded:
                source = self._viewed(layer, how, tensor)
                self._coded(place, how, stored, source)
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

    def _viewed(self, layer: str, meta: Meta, tensor: Tensor | Mapped) -> int | None:
        """Notes how large a tensor is that a call stores in parts; returns the storage that it would hold."""
        turn, elements = self._turn(layer), prod(meta.shape)
        decides = NEVER if turn in self.copying else elements
        self.trace.extents[turn] = max(decides, self.trace.extents.get(turn, 0))
        if isinstance(tensor, Mapped) and tensor.kind == "definite":
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

    def _coded(self, place: Place, meta: Meta, stored: list[Tensor], source: int | None) -> None:
        numbers = [number for part in stored if (number := self._number(part)) is not None]
        if not numbers:
            return
        new = CodedTrace([], meta.shape, meta.dtype.itemsize, numbers, source)
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
    for below in (*recipe.kept, *recipe.inputs):
        if isinstance(below, Recipe):
            yield from _serving(below)


def _tensors(tree: Any) -> list[Tensor]:
    """The tensors in `tree` that have a storage; those inside a transform of `torch.func` have none."""
    leaves = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return [leaf for leaf in leaves if not is_functorch_wrapped_tensor(leaf)]
