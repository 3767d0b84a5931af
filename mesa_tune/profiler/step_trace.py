"""What a traced step is: the lives of its storages, its slots, and what each call saved."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

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
    `extents`: of a call, the elements of the largest tensor that it stores in parts, `NEVER` if it goes by
    one that it would rather copy than hold; `saved_extents`: of the largest that autograd saves for it.
    `views`: the fewest elements of a storage that a call stores in parts and does not copy.
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
