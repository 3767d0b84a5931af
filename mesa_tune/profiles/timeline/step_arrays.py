"""A timeline at one batch size as arrays: all that does not depend on the policy, prepared once."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mesa_tune.policy.settings import LayerSettings
from mesa_tune.profiles.timeline.distinct import Assignment, Incidence
from mesa_tune.profiles.timeline.packed_sizes import LayerTraits, PackedSizes, possible

Bytes = NDArray[np.int64]
Flags = NDArray[np.bool_]


class SlotName(NamedTuple):
    """The layer whose call begins a slot, None between calls, and its phase."""

    layer: str | None
    phase: str


class SizedWork(NamedTuple):
    """The `Work` of all slots at one batch size: live [slots, cases], gradients [slots]."""

    live: Bytes
    gradients: Bytes


@dataclass(frozen=True)
class SizedSpan:
    """A saved span at one batch size; see `SavedSpan`.

    Kind `small`: `size` bytes that at least one compressed layer saves as they are, because the tensor is too
    small to encode.
    """

    kind: str
    layers: tuple[str, ...]
    size: int
    itemsize: int
    first: int
    last: int
    samples: int = 1
    sources: tuple[str, ...] = ()
    again: bool = False
    width: int = 0
    channels: int = 0


class StepArrays:
    """What a timeline at one batch size knows before the policy, as arrays.

    `work`: where no module runs again, and where all do. `traits`: of every layer. `serving`, `modules`: see
    `Timeline`.

    `saved_after`: whether each span is alive when each forward ends; shape [forwards, spans]. `saved`: the
    same for the forward that saves the most in the plain step.
    """

    def __init__(
        self,
        batch_size: int,
        static: Mapping[str, int],
        slots: Sequence[SlotName],
        work: tuple[SizedWork, SizedWork | None],
        spans: Sequence[SizedSpan],
        traits: Mapping[str, LayerTraits],
        serving: frozenset[str],
        modules: tuple[str, ...] = (),
    ) -> None:
        self.batch_size, self.static_kinds, self.static = batch_size, static, sum(static.values())
        self.slots, self.spans = tuple(slots), tuple(spans)
        self.once, self.again = work
        self.traits, self.serving, self.modules = traits, serving, modules
        self.names = list(traits)
        self.small = frozenset(name for name, trait in traits.items() if trait.small)
        self.saved_after = np.array(
            [[span.first <= end < span.last for span in spans] for end in last_of_forwards(slots)],
            dtype=np.bool_,
        )
        plain = [span.size if span.kind in ("plain", "always") else 0 for span in spans]
        self.saved: Flags = self.saved_after[(self.saved_after @ np.array(plain, dtype=np.int64)).argmax()]

    def compressed(self, assignment: Assignment) -> dict[str, LayerSettings]:
        """Return the layers that do not store exactly, with the settings that take effect."""
        return {
            name: used
            for name, settings in assignment.items()
            if name not in self.small and not (used := self._used(name, settings)).exact
        }

    def _used(self, name: str, settings: LayerSettings) -> LayerSettings:
        return possible(settings, self.traits[name]) if name in self.traits else settings

    @cached_property
    def are_small(self) -> Flags:
        """Whether all calls of each layer are too small to compress; shape [layers]."""
        return np.array([name in self.small for name in self.names], dtype=np.bool_)

    @cached_property
    def layer_classes(self) -> tuple[list[LayerTraits], Bytes]:
        """The distinct traits, and the position of each layer's among them."""
        distinct = list(dict.fromkeys(self.traits.values()))
        return distinct, _array(distinct.index(trait) for trait in self.traits.values())

    @cached_property
    def blocks(self) -> Bytes:
        """The position in `modules` of the one around each layer; one more than the last where none is."""
        position = {block: number for number, block in enumerate(self.modules)}
        around = (block_of(name, self.modules) for name in self.names)
        return _array(len(position) if block is None else position[block] for block in around)

    @cached_property
    def slot_layers(self) -> Bytes:
        """The position of each slot's layer in `names`; one more than the last where it has no layer."""
        position = {name: number for number, name in enumerate(self.names)}
        return _array(len(position) if slot.layer is None else position[slot.layer] for slot in self.slots)

    @cached_property
    def first_run(self) -> Bytes:
        """The position in `modules` of the one whose first run each slot is in; as `blocks` where none is."""
        forward = [slot.phase == "forward" for slot in self.slots]
        around = np.append(self.blocks, len(self.modules))[self.slot_layers]
        return np.where(forward, around, len(self.modules))

    @cached_property
    def left(self) -> list[tuple[int, int]]:
        """Modules in the order of their first runs, each with the bytes that it leaves for the next ones.

        It does without these where it runs again: a cache of keys and values, results that nobody saves.
        """
        if self.again is None:
            return []
        more = self.once.live[:, 0] - self.again.live[:, 0]
        runs = [(np.flatnonzero(self.first_run == module), module) for module in range(len(self.modules))]
        begins = sorted((int(slots[0]), module) for slots, module in runs if len(slots))
        ends = [begin for begin, _ in begins[1:]]
        return [
            (module, max(0, int(more[end] - more[begin])))
            for (begin, module), end in zip(begins, ends, strict=False)
        ] + [(module, 0) for _, module in begins[-1:]]

    @cached_property
    def sizes(self) -> Bytes:
        """The size of each span."""
        return _array(span.size for span in self.spans)

    @cached_property
    def edges(self) -> tuple[Bytes, Bytes]:
        """The first slot of each span, and the slot after its last."""
        return _array(span.first for span in self.spans), _array(span.last + 1 for span in self.spans)

    @cached_property
    def spans_again(self) -> Flags:
        """Whether each span is of modules that run again."""
        return np.array([span.again for span in self.spans], dtype=np.bool_)

    @cached_property
    def always(self) -> Bytes:
        """The bytes that each span of no layer has under every assignment."""
        return np.where(
            [span.kind == "always" and not span.layers for span in self.spans], self.sizes, 0
        ).astype(np.int64)

    @cached_property
    def whole(self) -> Incidence:
        """The layers of the spans that are alive under every assignment of them."""
        return self._incidence("always")

    @cached_property
    def plain(self) -> Incidence:
        """The layers of the spans that are alive if one of these stores exactly."""
        return self._incidence("plain")

    @cached_property
    def beside(self) -> Incidence:
        """The layers of the spans that are alive if one of these compresses."""
        return self._incidence("side", "small")

    @cached_property
    def coded(self) -> Incidence:
        """The layers of the packed spans."""
        return self._incidence("coded")

    @cached_property
    def sources(self) -> Incidence:
        """The layers from which the packed spans can be derived."""
        return Incidence([span.sources for span in self.spans], self.names)

    @cached_property
    def packed_sizes(self) -> PackedSizes:
        """The bytes of the packed spans, under any settings."""
        return PackedSizes(
            [(span.size, span.itemsize, span.samples, span.width, span.channels) for span in self.spans]
        )

    @cached_property
    def can_derive(self) -> Flags:
        """Whether the layer can derive the span, for each pair of a packed span and its layer."""
        pairs = zip(self.coded.rows.tolist(), self.coded.layers.tolist(), strict=True)
        spans = self.spans
        return np.array(
            [
                bool(spans[row].sources) and self.names[layer] not in spans[row].sources
                for row, layer in pairs
            ],
            dtype=np.bool_,
        )

    @cached_property
    def serves(self) -> Flags:
        """Whether the layer derives the span only for others, for each pair of packed span and layer."""
        layers = (self.names[layer] for layer in self.coded.layers.tolist())
        return self.can_derive & np.fromiter((layer in self.serving for layer in layers), dtype=np.bool_)

    @cached_property
    def served(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Those pairs, each beside all spans that can be derived from its layer, in any of its calls."""
        pairs = [
            (pair, row)
            for pair in np.flatnonzero(self.serves).tolist()
            for row, span in enumerate(self.spans)
            if self.names[self.coded.layers[pair]] in span.sources
        ]
        return _array(pair for pair, _ in pairs), _array(row for _, row in pairs)

    def _incidence(self, *kinds: str) -> Incidence:
        return Incidence([span.layers if span.kind in kinds else () for span in self.spans], self.names)


def _array(values: Iterable[int]) -> Bytes:
    return np.fromiter(values, dtype=np.int64)


def block_of(layer: str, modules: Collection[str]) -> str | None:
    """Return the one of `modules` that contains `layer`; None if none does."""
    return next((module for module in modules if layer.startswith(f"{module}.")), None)


def last_of_forwards(slots: Sequence[Any]) -> list[int]:
    """Return the index of the last slot of each forward; slots have a layer and a phase."""
    ends = [index for index, slot in enumerate(slots[1:]) if slot.layer is None and slot.phase == "backward"]
    return ends or [max((index for index, slot in enumerate(slots) if slot.phase == "forward"), default=-1)]
