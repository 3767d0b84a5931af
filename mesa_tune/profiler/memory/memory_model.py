"""Memory through one training step under any policy, without running the step.

What is hard: a policy changes more than sizes. A layer that compresses frees PyTorch's tensor only if every
other layer that saves its storage compresses too. Sharers with equal settings pay for one packed copy, others
for several. Encoding and decoding need memory at other moments than the plain step. So the step is a row of
slots, and what is saved are spans of slots, each with its own rule for being alive. Every size is measured at
two batch sizes, and linear in the batch size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mesa_tune.codecs import CODECS, Spec, fitting_size, memory_bytes
from mesa_tune.errors import BudgetError
from mesa_tune.policy.settings import MIN_ELEMENTS, LayerSettings

SizePair = tuple[int, int]
Assignment = Mapping[str, LayerSettings]
"""Layer name -> settings; a layer that is not in it is stored exactly."""

PHASES: Final = ("forward", "backward", "step")
KINDS: Final = ("coded", "side", "plain", "always")


@dataclass(frozen=True)
class Slot:
    """A part of the step: the most bytes alive in it, without static ones and spans, at the two batch sizes.

    `exact`: if `layer` is stored exactly. `packed`: if it is compressed, with temporaries of encoding and
    decoded copies; the same where there is no layer. `derived`: if the layer derives from what others save,
    or others derive from what it saves; None: as `packed`.
    """

    layer: str | None
    phase: str
    exact: SizePair
    packed: SizePair
    derived: SizePair | None = None


@dataclass(frozen=True)
class SavedSpan:
    """Something saved: alive in slots `first` to `last`, both included, if its kind says so.

    Kind `coded`: `size` elements, one packed copy for each distinct settings among the compressed layers; up
    to `min_elements` elements, `whole` bytes once. `side`: `size` bytes that the compressed layer saves
    exactly. `plain`: `size` bytes that PyTorch saves if at least one of the layers is exact. `always`: `size`
    bytes under every policy. `itemsize`: bytes per element. `samples`: first dimension of a coded tensor.
    `sources`: the layers from whose saved tensors a coded one can be derived, if all of them compress. It
    then costs nothing for another layer with `store: derive`.
    `extents`: for each layer, the number of elements that decides whether its call compresses, or frees a
    plain span: up to `min_elements` it does not. `whole`: the bytes that a small coded tensor keeps alive,
    maybe as a view; 0 where a plain span stays alive for it; None: `size * itemsize`.
    """

    kind: str
    layers: tuple[str, ...]
    size: SizePair
    itemsize: int
    first: int
    last: int
    samples: SizePair = (1, 1)
    sources: tuple[str, ...] = ()
    extents: tuple[SizePair, ...] = ()
    whole: SizePair | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, but got {self.kind!r}")


@dataclass(frozen=True)
class Timeline:
    """One training step, traced at two batch sizes; every size is a pair, in the order of `batch_sizes`.

    `static`: weights, gradients that exist when the step begins, optimizer state, buffers, batch. `hooked`:
    layers stored by hooks, which have 256 levels at least. `serving`: layers that derive what they save only
    if others derive from them, too; else they save something else (GELU saves its derivative). `rows`: for
    layers whose groups end where rows end, the elements per row.
    """

    batch_sizes: SizePair
    static: SizePair
    slots: tuple[Slot, ...]
    kept: tuple[SavedSpan, ...]
    hooked: tuple[str, ...] = ()
    min_elements: int = MIN_ELEMENTS
    serving: tuple[str, ...] = ()
    rows: Mapping[str, int] = field(default_factory=dict)

    def saved_bytes(self, assignment: Assignment, batch_size: int | None = None) -> int:
        """Return the bytes of all spans that are alive when the forward ends."""
        return self.at(batch_size).saved_bytes(assignment)

    def live(self, assignment: Assignment, batch_size: int | None = None) -> NDArray[np.int64]:
        """Return the bytes alive in each slot, static ones included; shape [slots]."""
        return self.at(batch_size).live(assignment)

    def peak_bytes(self, assignment: Assignment, batch_size: int | None = None) -> int:
        """Return the most bytes alive at once in the step."""
        return self.at(batch_size).peak_bytes(assignment)

    def at(self, batch_size: int | None = None) -> SizedTimeline:
        """Return the timeline at one batch size (default: the first traced one).

        Raise BudgetError for another batch size than the traced one, where only one was traced.
        """
        wanted = self.batch_sizes[0] if batch_size is None else batch_size
        if wanted not in self._sized:
            self._sized[wanted] = SizedTimeline(self, wanted)
        return self._sized[wanted]

    @cached_property
    def _sized(self) -> dict[int, SizedTimeline]:
        return {}

    def with_small_views(self) -> list[str]:
        """Return the layers stored by hooks that save a tensor too small to encode at the first batch size.

        Such a tensor may be a view, and keep a larger storage alive.
        """
        small = (span for span in self.kept if span.kind == "coded" and 0 < span.size[0] <= self.min_elements)
        return sorted({layer for span in small for layer in span.layers} & set(self.hooked))

    def scaled(self, pair: SizePair, batch_size: int) -> int:
        """Return the size at `batch_size` on the line through `pair`, rounded, at least 0."""
        low, high = self.batch_sizes
        if batch_size == low:
            return pair[0]
        if low == high:
            raise BudgetError(
                f"batch size {batch_size}: the profile was traced at batch size {low} alone, so it cannot be "
                f"planned for\nprofile again with --batch-size {batch_size}, or plan for {low}"
            )
        return max(0, pair[0] + round((pair[1] - pair[0]) * (batch_size - low) / (high - low)))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "batch_sizes": self.batch_sizes,
            "static": self.static,
            "slots": [vars(slot) for slot in self.slots],
            "kept": [vars(span) for span in self.kept],
            "hooked": self.hooked,
            "min_elements": self.min_elements,
            "serving": self.serving,
            "rows": self.rows,
        }

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Timeline:
        """Return the timeline with this `to_dict`. Raise KeyError, TypeError or ValueError for others."""
        return Timeline(
            batch_sizes=_pair(values["batch_sizes"]),
            static=_pair(values["static"]),
            slots=tuple(_slot(**slot) for slot in values["slots"]),
            kept=tuple(_span(span) for span in values["kept"]),
            hooked=tuple(values["hooked"]),
            min_elements=int(values["min_elements"]),
            serving=tuple(values.get("serving", ())),
            rows={layer: int(row) for layer, row in values.get("rows", {}).items()},
        )


class SizedTimeline:
    """A timeline at one batch size, prepared to sum its bytes under many assignments."""

    def __init__(self, timeline: Timeline, batch_size: int) -> None:
        self.timeline = timeline
        self.batch_size = batch_size
        self.static = timeline.scaled(timeline.static, batch_size)
        slots = timeline.slots
        self.exact = np.array(self._scaled(slot.exact for slot in slots), dtype=np.int64)
        self.packed = np.array(self._scaled(slot.packed for slot in slots), dtype=np.int64)
        self.derived = np.array(self._scaled(slot.derived or slot.packed for slot in slots), dtype=np.int64)
        self.sizes = self._scaled(span.size for span in timeline.kept)
        self.small = self._small()
        self.spans = [self._at_this_size(span) for span in timeline.kept]
        self.derivable = [
            span
            for span, size in zip(self.spans, self.sizes, strict=True)
            if span.sources and size > timeline.min_elements
        ]
        self.forward_end = max(
            (index for index, slot in enumerate(timeline.slots) if slot.phase == "forward"), default=-1
        )
        self._hooked = frozenset(timeline.hooked)
        self._serving = frozenset(timeline.serving)

    def _scaled(self, pairs: Iterable[SizePair]) -> list[int]:
        return [self.timeline.scaled(pair, self.batch_size) for pair in pairs]

    def _small(self) -> frozenset[str]:
        """Return the layers all of whose calls are too small to compress: every policy leaves them exact."""
        largest: dict[str, int] = {}
        for span, size in zip(self.timeline.kept, self.sizes, strict=True):
            counts = self._scaled(span.extents) or [size] * len(span.layers)
            if span.kind == "coded" or (span.kind == "side" and span.extents):
                for name, count in zip(span.layers, counts, strict=True):
                    largest[name] = max(largest.get(name, 0), count)
        return frozenset(name for name, count in largest.items() if count <= self.timeline.min_elements)

    def _at_this_size(self, span: SavedSpan) -> SavedSpan:
        """Return `span` as it is at this batch size: calls that are too small save what PyTorch saves."""
        large = [count > self.timeline.min_elements for count in self._scaled(span.extents)]
        if all(large):
            return span
        if span.kind == "plain":
            return replace(span, kind="always")
        layers = tuple(layer for layer, flag in zip(span.layers, large, strict=True) if flag)
        return replace(span, layers=layers)

    def live(self, assignment: Assignment) -> NDArray[np.int64]:
        """Return the bytes alive in each slot, static ones included; shape [slots]."""
        used = self.compressed(assignment)
        changes = [0] * (len(self.timeline.slots) + 1)
        for span, size in zip(self.spans, self.sizes, strict=True):
            count = self.span_bytes(span, size, used)
            changes[span.first] += count
            changes[span.last + 1] -= count
        in_spans = np.cumsum(np.array(changes[:-1], dtype=np.int64))
        return np.asarray(self.static + self.work(assignment) + in_spans, dtype=np.int64)

    def work(self, assignment: Assignment) -> NDArray[np.int64]:
        """Return the bytes alive in each slot without static ones and spans; shape [slots]."""
        # By the settings asked for, not those in effect: a small layer's slot covers calls of hooks after it.
        asked = {name for name, settings in assignment.items() if not settings.exact}
        links = self.links(self.compressed(assignment))
        packs, derives = (
            np.array([slot.layer in names for slot in self.timeline.slots], dtype=bool)
            for names in (asked, links)
        )
        return np.where(derives, self.derived, np.where(packs, self.packed, self.exact))

    def links(self, used: Mapping[str, LayerSettings]) -> set[str]:
        """Return the layers that derive, and the layers from whose saved tensors they do."""
        linked: set[str] = set()
        for span in self.derivable:
            derivers = self.derivers(span, used)
            linked |= {*derivers, *span.sources} if derivers else set()
        return linked

    def derivers(self, span: SavedSpan, used: Mapping[str, LayerSettings]) -> list[str]:
        """Return the layers of `span`, one of `derivable`, that derive it instead of storing it."""
        if not span.sources or any(source not in used for source in span.sources):
            return []
        return [
            layer
            for layer in span.layers
            if layer in used and used[layer].store == "derive" and layer not in span.sources
            if layer not in self._serving or self._is_later_source(layer, span, used)
        ]

    def _is_later_source(self, layer: str, span: SavedSpan, used: Mapping[str, LayerSettings]) -> bool:
        """Return whether a later tensor than `span` is derived from what `layer` saves."""
        later = (other for other in self.derivable if other.first > span.first and layer in other.sources)
        return any(self.derivers(other, used) for other in later)

    def peak_bytes(self, assignment: Assignment) -> int:
        """Return the most bytes alive at once in the step."""
        return int(self.live(assignment).max(initial=self.static))

    def saved_bytes(self, assignment: Assignment) -> int:
        """Return the bytes of all spans that are alive when the forward ends."""
        used = self.compressed(assignment)
        pairs = zip(self.spans, self.sizes, strict=True)
        return sum(self.span_bytes(span, size, used) for span, size in pairs if self.is_saved(span))

    def is_saved(self, span: SavedSpan) -> bool:
        """Return whether the lifetime of `span` includes the moment between forward and backward."""
        return span.first <= self.forward_end < span.last

    def compressed(self, assignment: Assignment) -> dict[str, LayerSettings]:
        """Return the layers that do not store exactly, with the settings that take effect."""
        return {
            name: used
            for name, settings in assignment.items()
            if name not in self.small and not (used := self._used(name, settings)).exact
        }

    def _used(self, name: str, settings: LayerSettings) -> LayerSettings:
        return settings.hooked if name in self._hooked else settings

    def span_bytes(self, span: SavedSpan, size: int, used: Mapping[str, LayerSettings]) -> int:
        """Return the bytes of `span`, whose size at this batch size is `size`; 0 if it is never alive."""
        if span.kind == "coded":
            return self._coded_bytes(span, size, used)
        if span.kind == "plain":
            return size if any(layer not in used for layer in span.layers) else 0
        if span.kind == "side":
            return size if any(layer in used for layer in span.layers) else 0
        return size

    def _coded_bytes(self, span: SavedSpan, size: int, used: Mapping[str, LayerSettings]) -> int:
        is_small = size <= self.timeline.min_elements
        derivers = [] if is_small else self.derivers(span, used)
        distinct = {
            within(stored_as(used[layer]), self.timeline.rows.get(layer, 0))
            for layer in span.layers
            if layer in used and layer not in derivers
        }
        if is_small:
            whole = None if span.whole is None else self.timeline.scaled(span.whole, self.batch_size)
            return 0 if not distinct else size * span.itemsize if whole is None else whole
        samples = self.timeline.scaled(span.samples, self.batch_size)
        return sum(settings_bytes(size, settings, span.itemsize, samples) for settings in distinct)


@lru_cache(maxsize=1 << 12)
def stored_as(settings: LayerSettings) -> LayerSettings:
    """Return the settings for what a layer cannot derive."""
    return replace(settings, store="quantize") if settings.store == "derive" else settings


@lru_cache(maxsize=1 << 12)
def within(settings: LayerSettings, row: int) -> LayerSettings:
    """Return the settings of a layer whose groups end where rows of `row` elements end; 0: they do not."""
    if settings.group_size is None or not row:
        return settings
    return replace(settings, group_size=fitting_size(settings.group_size, row))


@lru_cache(maxsize=1 << 16)
def settings_bytes(elements: int, settings: LayerSettings, itemsize: int = 4, samples: int = 1) -> int:
    """Return the bytes on the device of a packed tensor whose first dimension has size `samples`.

    What its codec saves from step to step counts, too.
    """
    spec = Spec.of(settings, 0)
    if spec is None:
        return elements * itemsize
    shape = (samples, elements // samples) if samples and elements % samples == 0 else (1, elements)
    return CODECS[spec.codec].packed_bytes(shape, spec, itemsize) + memory_bytes(shape, spec)


def _pair(values: Any) -> SizePair:
    first, second = values
    return int(first), int(second)


def _slot(layer: str | None, phase: str, exact: Any, packed: Any, derived: Any = None) -> Slot:
    return Slot(layer, phase, _pair(exact), _pair(packed), None if derived is None else _pair(derived))


def _span(values: Mapping[str, Any]) -> SavedSpan:
    parts: dict[str, Any] = {name: int(values[name]) for name in ("itemsize", "first", "last")}
    parts |= {
        "layers": tuple(values["layers"]),
        "size": _pair(values["size"]),
        "samples": _pair(values.get("samples", (1, 1))),
        "sources": tuple(values.get("sources", ())),
        "extents": tuple(map(_pair, values.get("extents", ()))),
        "whole": None if values.get("whole") is None else _pair(values["whole"]),
    }
    return SavedSpan(**{**values, **parts})
