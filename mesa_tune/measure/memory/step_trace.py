"""A traced training step: the lifetimes of its storages, its slots, and what each call saved.

What is hard: steps under other policies are predicted from this one. So the trace says of each storage not
only its bytes, but also which calls save it, in which form, and what else keeps it alive.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mesa_tune.measure.memory.workspaces import LibraryMemory
from mesa_tune.ops.reference import channels_of
from mesa_tune.profiles.timeline.step_arrays import last_of_forwards

NEVER = 1 << 62

ShapeDtype = tuple[tuple[int, ...], str]
"""Shape and dtype of a tensor."""

CallKey = tuple[str, int]
"""A call: its layer, and how many calls of this layer came before; -1 where hooks store for the layer."""

TensorKey = tuple[str, int, int]
"""A saved tensor: its layer, how many calls of this layer came before, and its position in the call."""


@dataclass
class Lifetime:
    """Bytes of a storage, and its birth and death as moments on the clock of the step."""

    bytes: int
    birth: int
    death: int = NEVER


@dataclass
class SlotTrace:
    """Part of the step that begins with a call of `layer`: the most bytes that it needs at once.

    `high`: at the end of an operator, with the workspace that it took, and without what no operator has
    written. `tensors`: of tensors alone; `moment`: when this was. `again`: the call runs again, in the
    backward.
    """

    layer: str | None
    phase: str
    high: int
    tensors: int
    moment: int
    again: bool = False


@dataclass
class CodedTrace:
    """A tensor stored in parts: the layers that save it, its shape, and the storages of its parts.

    `source`: the storage that would stay alive if the tensor was saved exactly. `width`: elements per row,
    where rows may be left out; else 0.
    """

    layers: list[str]
    shape: tuple[int, ...]
    itemsize: int
    parts: list[int]
    source: int | None = None
    calls: list[CallKey] = field(default_factory=list)
    width: int = 0

    @property
    def channels(self) -> int:
        """The number that `quant_groups` must divide."""
        return channels_of(self.shape)[1]


@dataclass
class PlainTrace:
    """A storage that autograd saves exactly: the layers that save it, and the first tensor seen in it."""

    layers: list[str]
    shape: tuple[int, ...]
    dtype: str
    calls: list[CallKey] = field(default_factory=list)


@dataclass(frozen=True)
class Forward:
    """A forward with its loss: the moments of its begin and end, and the bytes that are saved then."""

    begin: int
    end: int
    saved_bytes: int


@dataclass
class StepTrace:
    """Everything observed in one step. A storage is named by its number, in the order of birth.

    `calls`: the storages that each call of the forward takes or returns. `again`: the same for a routed call
    in the backward (a checkpointed part that runs again), by layer, number of the call, and whether returned.
    `coded`: tensors stored in parts, by the storage of the first part. `side`: storages that a compressed
    layer saves exactly, with this layer. `plain`: storages that autograd saves exactly.
    `extents`: for each call, the elements of the largest tensor that it stores in parts, or that decides
    whether it stores any; `NEVER` if it has a small view of a large storage, which is always copied.
    `saved_extents`: of the largest autograd saves. `asked_channels`: for each layer, the channels of the
    tensors of which one must be packed, or its calls are PyTorch's.
    `views`: for a call and a storage, the fewest elements that the call stores in parts without a copy.
    `rows`: for layers whose groups end where rows end, the elements per row. `samplers`: layers that may
    leave out rows. `valued`: layers that may store fixed levels. `saves`: for each layer, what autograd
    itself saves, in order (None: older than the step). `first_parts`: for each tensor stored in parts, the
    storage of the first part. `derived`: for each tensor that is derived instead, the layers that this needs.
    `serving`: layers that save their input only because others derive from it.
    `forwards`: each that ends with a backward; a step may have several. `losses`: what their backwards start
    from. `gradients`: the storages of the parameters' gradients, as far as they die in the step or were born
    in it; `static_gradients`: bytes of the others. `variables`: storages that are alive when a forward ends,
    but only because the user's own code refers to them. `libraries`: what libraries keep of the step.
    """

    lifetimes: dict[int, Lifetime] = field(default_factory=dict)
    slots: list[SlotTrace] = field(default_factory=list)
    calls: list[tuple[int | None, ...]] = field(default_factory=list)
    again: dict[tuple[str, int, bool], tuple[int | None, ...]] = field(default_factory=dict)
    coded: dict[int, CodedTrace] = field(default_factory=dict)
    side: dict[int, str] = field(default_factory=dict)
    side_calls: dict[int, list[CallKey]] = field(default_factory=dict)
    extents: dict[CallKey, int] = field(default_factory=dict)
    saved_extents: dict[CallKey, int] = field(default_factory=dict)
    asked_channels: dict[str, set[int]] = field(default_factory=dict)
    views: dict[tuple[CallKey, int], int] = field(default_factory=dict)
    plain: dict[int, PlainTrace] = field(default_factory=dict)
    encoded: set[tuple[int, str]] = field(default_factory=set)
    rows: dict[str, int] = field(default_factory=dict)
    samplers: set[str] = field(default_factory=set)
    valued: set[str] = field(default_factory=set)
    saves: dict[str, list[tuple[int | None, ShapeDtype]]] = field(default_factory=dict)
    first_parts: dict[TensorKey, int] = field(default_factory=dict)
    derived: dict[TensorKey, tuple[str, ...]] = field(default_factory=dict)
    serving: set[str] = field(default_factory=set)
    static_gradients: int = 0
    forwards: list[Forward] = field(default_factory=list)
    losses: set[int] = field(default_factory=set)
    libraries: LibraryMemory = field(default_factory=LibraryMemory)
    gradients: set[int] = field(default_factory=set)
    variables: set[int] = field(default_factory=set)

    @property
    def saved_bytes(self) -> int:
        """Bytes alive when the forward ended that saves the most."""
        return self.forwards[self.fullest].saved_bytes if self.forwards else 0

    @property
    def saving_layers(self) -> set[str]:
        """Layers that save a tensor, in a plain step."""
        return {layer for item in self.plain.values() for layer in item.layers}

    def packed_bytes(self, key: TensorKey) -> int:
        """Return the bytes of a tensor that is stored in parts; 0 where it is not."""
        first = self.first_parts.get(key)
        parts = self.coded[first].parts if first in self.coded else ()
        return sum(self.lifetimes[number].bytes for number in parts)

    @property
    def fullest(self) -> int:
        """Index of the first of the forwards that save the most."""
        sizes = [forward.saved_bytes for forward in self.forwards]
        return sizes.index(max(sizes))

    def is_saved(self, number: int) -> bool:
        """Return whether the storage is alive for backward when a forward ends."""
        return bool(self.saved_after(number))

    def is_counted(self, number: int) -> bool:
        """Return whether the storage is alive for backward when the fullest forward ends."""
        return self.fullest in self.saved_after(number)

    def saved_after(self, number: int) -> list[int]:
        """Return the forwards at whose end the storage is alive for backward."""
        kept_anyway = number in self.variables or number in self.gradients
        return [] if kept_anyway else self.alive_after(number)

    def alive_after(self, number: int) -> list[int]:
        """Return the forwards at whose end the storage is alive."""
        lifetime = self.lifetimes[number]
        ends = [forward.end for forward in self.forwards]
        return [index for index, end in enumerate(ends) if lifetime.birth <= end < lifetime.death]

    def belongs_to(self, number: int, index: int) -> bool:
        """Return whether the storage is alive at the end of this forward, or born in it or its backward."""
        following = self.forwards[index + 1].begin if index + 1 < len(self.forwards) else NEVER
        born_in = self.forwards[index].begin <= self.lifetimes[number].birth < following
        return born_in or index in self.saved_after(number)

    def drop_dead_after_forward(self) -> None:
        """Drop the saved tensors whose storage died before the forward ended.

        A checkpoint frees what its part saves in the first run. Other graphs are freed because no backward
        runs through them. What the part saves in its second run, in the backward, stays.
        """
        dead = {
            number
            for number, lifetime in self.lifetimes.items()
            if any(each.begin <= lifetime.birth and lifetime.death <= each.end for each in self.forwards)
        }
        self.coded = {number: item for number, item in self.coded.items() if number not in dead}
        self.side = {number: layer for number, layer in self.side.items() if number not in dead}
        self.plain = {number: item for number, item in self.plain.items() if number not in dead}

    @cached_property
    def moments(self) -> NDArray[np.int64]:
        """For each slot of a finished step, the moment with the most live bytes; ascending."""
        return np.array([slot.moment for slot in self.slots], dtype=np.int64)

    @cached_property
    def forward_ends(self) -> list[int]:
        """Indices of the last slots of the forwards, in a finished step."""
        return last_of_forwards(self.slots)

    @cached_property
    def channels(self) -> dict[str, tuple[int, ...]]:
        """For each layer, the numbers of channels of what it stores in parts or might pack, ascending."""
        found = {layer: set(counts) for layer, counts in self.asked_channels.items()}
        for item in self.coded.values():
            for layer in item.layers:
                found.setdefault(layer, set()).add(item.channels)
        return {layer: tuple(sorted(counts)) for layer, counts in found.items()}

    @cached_property
    def parts(self) -> frozenset[int]:
        """The storages of all tensors stored in parts, in a finished step."""
        return frozenset(number for coded in self.coded.values() for number in coded.parts)

    def last_backward(self, layer: str, first: int, last: int) -> int:
        """Return the last slot of the layer's backward in `first` to `last`; `last` without one."""
        slots = (index for index in range(last, first - 1, -1) if self._is_backward_of(index, layer))
        return next(slots, last)

    def _is_backward_of(self, index: int, layer: str) -> bool:
        slot = self.slots[index]
        return slot.layer == layer and slot.phase == "backward"

    def alive(self, number: int, moments: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return for each of `moments` whether the storage is alive."""
        lifetime = self.lifetimes[number]
        return (lifetime.birth <= moments) & (moments < lifetime.death)

    def gradient_bytes(self) -> NDArray[np.int64]:
        """Return for each slot the bytes of gradients born in the step, when most bytes are alive."""
        total = np.zeros(len(self.slots), dtype=np.int64)
        for number in self.gradients:
            total += self.lifetimes[number].bytes * self.alive(number, self.moments)
        return total

    def stays_whole(self, number: int) -> bool:
        """Return whether the storage is saved whole although its layers compress.

        This is so where a hook met no floats in it or too few, and for what a checkpoint saves.
        """
        if number in self.parts:
            return False
        layers = self.plain[number].layers if number in self.plain else []
        others = [layer for layer in layers if layer != self.side.get(number)]
        if any((number, layer) not in self.encoded for layer in others):
            return True
        return self.is_saved(number) and number not in self.side

    def peak(self) -> int:
        """Return the most bytes that are needed at once, without those that are older than the step."""
        return max(slot.high for slot in self.slots)

    def tensor_peak(self) -> int:
        """Return the most bytes of tensors alone."""
        return max(slot.tensors for slot in self.slots)
