"""A timeline at one batch size: which bytes are alive in each slot, under any assignment of settings.

What is hard: a search asks this for thousands of policies. So everything that does not depend on the policy
is an array, prepared once, and a policy takes a few operations on whole arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mesa_tune.policy.settings import LayerSettings
from mesa_tune.profiler.memory.distinct import Assignment, DistinctSettings, Incidence
from mesa_tune.profiler.memory.kinds import GRADIENTS, SAVED, STATIC, WORKING, Peak
from mesa_tune.profiler.memory.packed_sizes import LayerTraits, PackedSizes, in_effect
from mesa_tune.profiler.memory.step_trace import last_of_forwards

Bytes = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class SizedSlot:
    """A slot at one batch size; see `Slot`."""

    layer: str | None
    phase: str
    exact: int
    packed: int
    derived: int
    gradients: int
    workspaces: tuple[int, ...] = ()


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


class SizedTimeline:
    """A timeline at one batch size. `traits`: of every layer; `serving`: see `Timeline`.

    `saved_after`: whether each span is alive when each forward ends; shape [forwards, spans]. `saved`: the
    same for the forward that saves the most in the plain step.
    """

    def __init__(
        self,
        batch_size: int,
        static: Mapping[str, int],
        slots: Sequence[SizedSlot],
        spans: Sequence[SizedSpan],
        traits: Mapping[str, LayerTraits],
        serving: frozenset[str],
    ) -> None:
        self.batch_size, self.static_kinds, self.static = batch_size, static, sum(static.values())
        self.slots, self.spans = tuple(slots), tuple(spans)
        self.traits, self.serving = traits, serving
        self.names = list(traits)
        self.small = frozenset(name for name, trait in traits.items() if trait.small)
        self.exact, self.packed, self.derived = (
            _array(getattr(slot, name) for slot in slots) for name in ("exact", "packed", "derived")
        )
        known = all(slot.workspaces for slot in slots)
        self.workspaces = np.array([slot.workspaces for slot in slots], dtype=np.int64).T if known else None
        self.saved_after = np.array(
            [[span.first <= end < span.last for span in spans] for end in last_of_forwards(slots)],
            dtype=np.bool_,
        )
        plain = [span.size if span.kind in ("plain", "always") else 0 for span in spans]
        self.saved: Flags = self.saved_after[(self.saved_after @ np.array(plain, dtype=np.int64)).argmax()]

    @cached_property
    def with_workspaces(self) -> SizedTimeline:
        """The same step in which workspaces count as live bytes; where they are unknown, this timeline."""
        if self.workspaces is None:
            return self
        slots = [
            replace(
                slot,
                exact=slot.exact + exact,
                packed=slot.packed + packed,
                derived=slot.derived + derived,
                workspaces=(),
            )
            for slot, (exact, packed, derived) in zip(self.slots, self.workspaces.T.tolist(), strict=True)
        ]
        return SizedTimeline(self.batch_size, self.static_kinds, slots, self.spans, self.traits, self.serving)

    def under(self, assignment: Assignment) -> StepBytes:
        """Return the bytes of the step under `assignment`."""
        return StepBytes(self, assignment)

    def live(self, assignment: Assignment) -> Bytes:
        """Return the bytes alive in each slot, static ones included; shape [slots]."""
        return self.under(assignment).live

    def peak_bytes(self, assignment: Assignment) -> int:
        """Return the most bytes alive at once in the step."""
        return self.under(assignment).peak_bytes

    def saved_bytes(self, assignment: Assignment) -> int:
        """Return the bytes of all spans that are alive when the forward ends; of several, the most."""
        return self.under(assignment).saved_bytes

    def compressed(self, assignment: Assignment) -> dict[str, LayerSettings]:
        """Return the layers that do not store exactly, with the settings that take effect."""
        return {
            name: used
            for name, settings in assignment.items()
            if name not in self.small and not (used := self._used(name, settings)).exact
        }

    def _used(self, name: str, settings: LayerSettings) -> LayerSettings:
        return settings.hooked if name in self.traits and self.traits[name].hooked else settings

    @cached_property
    def layer_classes(self) -> tuple[list[LayerTraits], Bytes]:
        """The distinct traits, and the position of each layer's among them."""
        distinct = list(dict.fromkeys(self.traits.values()))
        return distinct, _array(distinct.index(trait) for trait in self.traits.values())

    @cached_property
    def slot_layers(self) -> Bytes:
        """The position of each slot's layer in `names`; one more than the last where it has no layer."""
        position = {name: number for number, name in enumerate(self.names)}
        return _array(len(position) if slot.layer is None else position[slot.layer] for slot in self.slots)

    @cached_property
    def sizes(self) -> Bytes:
        """The size of each span."""
        return _array(span.size for span in self.spans)

    @cached_property
    def edges(self) -> tuple[Bytes, Bytes]:
        """The first slot of each span, and the slot after its last."""
        return _array(span.first for span in self.spans), _array(span.last + 1 for span in self.spans)

    @cached_property
    def always(self) -> Bytes:
        """The bytes that each span has under every assignment."""
        return np.where([span.kind == "always" for span in self.spans], self.sizes, 0)

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
        return PackedSizes([(span.size, span.itemsize, span.samples) for span in self.spans])

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
    def serving_pairs(self) -> list[tuple[int, list[int]]]:
        """The pairs of packed span and serving layer, the latest span first, with the spans derived from it.

        Such a layer derives only if one of these spans, all later than its own, is derived.
        """
        pairs = []
        for pair in np.flatnonzero(self.can_derive).tolist():
            layer, first = self.names[self.coded.layers[pair]], self.spans[self.coded.rows[pair]].first
            if layer in self.serving:
                later = [
                    row for row, span in enumerate(self.spans) if span.first > first and layer in span.sources
                ]
                pairs.append((first, pair, later))
        return [(pair, later) for _, pair, later in sorted(pairs, reverse=True)]

    def _incidence(self, *kinds: str) -> Incidence:
        return Incidence([span.layers if span.kind in kinds else () for span in self.spans], self.names)


class StepBytes:
    """The bytes of a step at one batch size under one assignment."""

    def __init__(self, sized: SizedTimeline, assignment: Assignment) -> None:
        self.sized = sized
        self.distinct = DistinctSettings.of(assignment, sized.names)
        traits, classes = sized.layer_classes
        # Few pairs of settings and traits occur: find the settings in effect for these, not for each layer.
        of_layer = self.distinct.positions * len(traits) + classes
        pairs = np.flatnonzero(np.bincount(of_layer))
        numbers = (divmod(pair, len(traits)) for pair in pairs.tolist())
        effective = [in_effect(self.distinct.values[number], traits[kind]) for number, kind in numbers]
        objects = {id(settings): settings for settings in effective}
        number = {key: position for position, key in enumerate(objects)}
        self.settings = list(objects.values())
        stored = np.empty(len(self.distinct.values) * len(traits), dtype=np.int64)
        stored[pairs] = [number[id(settings)] for settings in effective]
        self.stored = stored[of_layer]
        self.used = np.array([not settings.exact for settings in self.settings], dtype=np.bool_)[self.stored]

    @cached_property
    def spans(self) -> Bytes:
        """The bytes of each span; 0 if it is never alive."""
        sized, total = self.sized, self.sized.always.copy()
        total += np.where(sized.plain.any(~self.used) | sized.beside.any(self.used), sized.sizes, 0)
        stores = self.used[sized.coded.layers] & ~self.deriving
        rows, stored = sized.coded.rows[stores], self.stored[sized.coded.layers[stores]]
        sizes = np.stack([sized.packed_sizes.under(settings) for settings in self.settings])
        copies = np.zeros_like(sizes)
        copies[stored, rows] = sizes[stored, rows]  # layers with equal settings share a copy
        total += copies.sum(0)
        return total

    @cached_property
    def asks(self) -> Flags:
        """Whether each layer compresses and derives what it can; shape [layers]."""
        derives = self.distinct.flags(lambda settings: settings.store == "derive")
        return np.asarray(self.used & derives, dtype=np.bool_)

    @cached_property
    def deriving(self) -> Flags:
        """Whether the layer derives the span, for each pair of a packed span and its layer."""
        sized = self.sized
        if not self.asks.any():
            return np.zeros(len(sized.coded.rows), dtype=np.bool_)
        deriving = (
            sized.can_derive
            & self.asks[sized.coded.layers]
            & ~sized.sources.any(~self.used)[sized.coded.rows]
        )
        derivers = np.bincount(sized.coded.rows[deriving], minlength=len(sized.spans))
        for pair, later in sized.serving_pairs:
            if deriving[pair] and not derivers[later].any():
                deriving[pair] = False
                derivers[sized.coded.rows[pair]] -= 1
        return deriving

    @property
    def derivers(self) -> set[str]:
        """The layers that derive something."""
        return {self.sized.names[layer] for layer in self.sized.coded.layers[self.deriving].tolist()}

    @cached_property
    def links(self) -> Flags:
        """Whether each layer derives, or others derive from what it saves; shape [layers]."""
        sized, linked = self.sized, np.zeros(len(self.sized.names), dtype=np.bool_)
        linked[sized.coded.layers[self.deriving]] = True
        derived = sized.coded.any_pair(self.deriving)
        linked[sized.sources.layers[derived[sized.sources.rows]]] = True
        return linked

    @property
    def linked(self) -> frozenset[str]:
        """The layers that derive, and those from whose saved tensors they do."""
        return frozenset(self.sized.names[layer] for layer in np.flatnonzero(self.links).tolist())

    @cached_property
    def cases(self) -> Bytes:
        """For each slot: 0 where its layer stores exactly, 1 where it compresses, 2 where it derives."""
        # By the settings asked for, not those in effect: a small layer's slot covers calls of hooks after it.
        packs = self.distinct.flags(lambda settings: not settings.exact)
        packs, derives = (np.append(flags, False)[self.sized.slot_layers] for flags in (packs, self.links))
        return np.where(derives, 2, packs)

    @cached_property
    def work(self) -> Bytes:
        """The bytes alive in each slot without static ones and spans; shape [slots]."""
        sized = self.sized
        return np.choose(self.cases, (sized.exact, sized.packed, sized.derived))

    @cached_property
    def live(self) -> Bytes:
        """The bytes alive in each slot, static ones included; shape [slots]."""
        changes = np.zeros(len(self.sized.slots) + 1, dtype=np.int64)
        births, deaths = self.sized.edges
        np.add.at(changes, births, self.spans)
        np.subtract.at(changes, deaths, self.spans)
        return np.asarray(self.sized.static + self.work + np.cumsum(changes[:-1]), dtype=np.int64)

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at once in the step."""
        return int(self.live.max(initial=self.sized.static))

    @property
    def reserved_bytes(self) -> int | None:
        """The most bytes at once with the workspaces of kernels; None if these are unknown."""
        sized = self.sized
        if sized.workspaces is None:
            return None
        reserved = self.live + np.choose(self.cases, sized.workspaces)
        return int(reserved.max(initial=sized.static))

    @property
    def peak(self) -> Peak:
        """The first slot with the most bytes alive, and their kinds."""
        sized = self.sized
        if not sized.slots:
            return Peak(None, "forward", sized.static_kinds)
        index = int(self.live.argmax())
        slot, (births, deaths) = sized.slots[index], sized.edges
        saved = int(self.spans[(births <= index) & (index < deaths)].sum())
        gradients = min(slot.gradients, int(self.work[index]))
        born = {GRADIENTS: gradients, SAVED: saved, WORKING: int(self.work[index]) - gradients}
        kinds = {
            kind: sized.static_kinds.get(kind, 0) + born.get(kind, 0) for kind in (*STATIC, SAVED, WORKING)
        }
        return Peak(slot.layer, slot.phase, kinds)

    @property
    def saved_bytes(self) -> int:
        """The bytes of all spans that are alive when the forward ends; of several, the most."""
        return int((self.sized.saved_after @ self.spans).max())


def _array(values: Iterable[int]) -> Bytes:
    return np.fromiter(values, dtype=np.int64)
