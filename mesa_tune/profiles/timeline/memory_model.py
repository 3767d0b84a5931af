"""Memory through one training step under any policy, without running the step.

What is hard: a policy changes more than sizes. A layer that compresses frees PyTorch's tensor only if every
other layer that saves its storage compresses too. Sharers with equal settings pay for one packed copy, others
for several. Encoding and decoding need memory at other moments than the plain step. So the step is a row of
slots, and what is saved are spans of slots, each with its own rule for being alive. Every size is measured at
two batch sizes, and linear in the batch size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mesa_tune.errors import BudgetError, options
from mesa_tune.policy.settings import MIN_ELEMENTS
from mesa_tune.profiles.timeline.distinct import Assignment
from mesa_tune.profiles.timeline.packed_sizes import CASES, LayerTraits
from mesa_tune.profiles.timeline.sized_timeline import SizedSpan, SizedTimeline, SizedWork, SlotName

SizePair = tuple[int, int]
PHASES: Final = ("forward", "backward", "step")
KINDS: Final = ("coded", "side", "plain", "always")


@dataclass(frozen=True)
class Work:
    """The most bytes needed in a slot without static ones and spans, at the two batch sizes.

    `live`: in each of `CASES` of the slot's layer, with temporaries of encoding, decoded copies, and what
    kernels take besides tensors; all equal where there is no layer. `gradients`: those of parameters, among
    them.
    """

    live: tuple[SizePair, ...]
    gradients: SizePair = (0, 0)

    @staticmethod
    def of(exact: SizePair, packed: SizePair, derived: SizePair | None = None) -> Work:
        """Return the work of a layer that takes the same bytes in all other cases."""
        live = {"exact": exact, "derived": derived or packed}
        return Work(tuple(live.get(case, packed) for case in CASES))


NOTHING: Final = (0, 0)


@dataclass(frozen=True)
class Slot:
    """A part of the step that begins with a call of `layer`; None: it is between calls.

    `once`: its work where no module runs again in backward; `again`: where all `modules` of the timeline do;
    None: no module can.
    """

    layer: str | None
    phase: str
    once: Work
    again: Work | None = None


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
    `width`: elements per row of a coded tensor, where rows may be left out; else 0. `channels`: the number
    that `quant_groups` must divide; else it is stored exactly. 0: any does.
    `again`: only layers inside modules that run again in backward save it; else only the other layers do.
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
    again: bool = False
    width: SizePair = (0, 0)
    channels: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, but got {self.kind!r}")


@dataclass(frozen=True)
class Timeline:
    """One training step, traced at two batch sizes; every size is a pair, in the order of `batch_sizes`.

    `static`: bytes alive when the step begins, by kind (`STATIC` in kinds.py). `hooked`: layers stored by
    hooks, which have 256 levels at least. `serving`: layers that derive what they save only if others derive
    from them, too; else they save something else (GELU saves its derivative). `rows`: for layers whose groups
    end where rows end, the elements per row. `channels`: for each layer, the numbers of channels of what it
    stores in parts; it stores exactly where `quant_groups` divides none. `samplers`: layers that may leave
    out rows. `valued`: layers that may store fixed levels. `modules`: those that can run again in backward.
    Settings by their names, with `store: recompute`, are those of their inputs. `libraries`: bytes that
    oneDNN keeps besides, under every policy and about the same for every batch.
    """

    batch_sizes: SizePair
    static: Mapping[str, SizePair]
    slots: tuple[Slot, ...]
    kept: tuple[SavedSpan, ...]
    hooked: tuple[str, ...] = ()
    min_elements: int = MIN_ELEMENTS
    serving: tuple[str, ...] = ()
    rows: Mapping[str, int] = field(default_factory=dict)
    modules: tuple[str, ...] = ()
    libraries: int = 0
    samplers: tuple[str, ...] = ()
    valued: tuple[str, ...] = ()
    channels: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def saved_bytes(self, assignment: Assignment, batch_size: int | None = None) -> int:
        """Return the bytes of all spans that are alive when the forward ends."""
        return self.at(batch_size).saved_bytes(assignment)

    def live(self, assignment: Assignment, batch_size: int | None = None) -> NDArray[np.int64]:
        """Return the bytes needed in each slot, static ones included; shape [slots]."""
        return self.at(batch_size).live(assignment)

    def peak_bytes(self, assignment: Assignment, batch_size: int | None = None) -> int:
        """Return the most bytes needed at once in the step."""
        return self.at(batch_size).peak_bytes(assignment)

    def at(self, batch_size: int | None = None) -> SizedTimeline:
        """Return the timeline at one batch size (default: the first traced one).

        Raise BudgetError for another batch size than the traced one, where only one was traced.
        """
        wanted = self.batch_sizes[0] if batch_size is None else batch_size
        if wanted not in self._sized:
            self._sized[wanted] = _Sizing(self, wanted).timeline()
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
                f"planned for\nprofile again with {options(batch_size=batch_size)}, or plan for {low}"
            )
        return max(0, pair[0] + round((pair[1] - pair[0]) * (batch_size - low) / (high - low)))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "batch_sizes": self.batch_sizes,
            "static": self.static,
            "slots": [asdict(slot) for slot in self.slots],
            "kept": [vars(span) for span in self.kept],
            "hooked": self.hooked,
            "min_elements": self.min_elements,
            "serving": self.serving,
            "rows": self.rows,
            "modules": self.modules,
            "libraries": self.libraries,
            "samplers": self.samplers,
            "valued": self.valued,
            "channels": self.channels,
        }

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Timeline:
        """Return the timeline with this `to_dict`. Raise KeyError, TypeError or ValueError for others."""
        return Timeline(
            batch_sizes=_pair(values["batch_sizes"]),
            static={str(kind): _pair(pair) for kind, pair in dict(values["static"]).items()},
            slots=tuple(_slot(slot) for slot in values["slots"]),
            kept=tuple(_span(span) for span in values["kept"]),
            hooked=tuple(values["hooked"]),
            min_elements=int(values["min_elements"]),
            serving=tuple(values.get("serving", ())),
            rows={layer: int(row) for layer, row in values.get("rows", {}).items()},
            modules=tuple(values.get("modules", ())),
            libraries=int(values.get("libraries", 0)),
            samplers=tuple(values.get("samplers", ())),
            valued=tuple(values.get("valued", ())),
            channels={layer: tuple(counts) for layer, counts in values["channels"].items()},
        )


class _Sizing:
    """Makes the timeline at one batch size."""

    def __init__(self, timeline: Timeline, batch_size: int) -> None:
        self.source, self.modules = timeline, frozenset(timeline.modules)
        self.batch_size = batch_size

    def timeline(self) -> SizedTimeline:
        source = self.source
        slots = [SlotName(slot.layer, slot.phase) for slot in source.slots]
        once = self._work([slot.once for slot in source.slots])
        again = self._work([slot.again for slot in source.slots if slot.again]) if source.modules else None
        spans = [self._span(span) for span in source.kept]
        static = {kind: self._size(pair) for kind, pair in source.static.items()}
        serving = frozenset(source.serving)
        traits = self._traits()
        return SizedTimeline(
            self.batch_size, static, slots, (once, again), spans, traits, serving, source.modules
        )

    def _size(self, pair: SizePair) -> int:
        return self.source.scaled(pair, self.batch_size)

    def _work(self, works: Sequence[Work]) -> SizedWork:
        rows = [tuple(map(self._size, (*work.live, work.gradients))) for work in works]
        sizes = np.array(rows, dtype=np.int64).reshape(len(rows), len(CASES) + 1)
        return SizedWork(sizes[:, :-1], sizes[:, -1])

    def _traits(self) -> dict[str, LayerTraits]:
        source, largest = self.source, dict(self._largest_calls())
        names = dict.fromkeys(slot.layer for slot in source.slots if slot.layer is not None)
        for span in source.kept:
            names |= dict.fromkeys((*span.layers, *span.sources))
        hooked = frozenset(source.hooked)
        # Every policy leaves a layer exact whose calls are all too small to compress.
        small = {name for name, count in largest.items() if count <= source.min_elements}
        small -= self.modules
        samplers, valued = frozenset(source.samplers), frozenset(source.valued)
        return {
            name: LayerTraits(
                name in hooked,
                name in small,
                source.rows.get(name, 0),
                name in samplers,
                name in valued,
                source.channels.get(name, ()),
            )
            for name in names
        }

    def _largest_calls(self) -> Iterator[tuple[str, int]]:
        """Yield each layer whose size decides whether it compresses, and the elements of its largest call."""
        pairs = [
            (count, name)
            for span in self.source.kept
            if span.kind == "coded" or (span.kind == "side" and span.extents)
            for name, count in zip(span.layers, self._extents(span), strict=True)
        ]
        for count, name in sorted(pairs):
            yield name, count

    def _extents(self, span: SavedSpan) -> list[int]:
        return [self._size(pair) for pair in span.extents] or [self._size(span.size)] * len(span.layers)

    def _span(self, span: SavedSpan) -> SizedSpan:
        """Return `span` at this batch size: calls that are too small save what PyTorch saves."""
        kind, layers, size, sources = span.kind, span.layers, self._size(span.size), span.sources
        large = [self._size(pair) > self.source.min_elements for pair in span.extents]
        if kind == "plain":
            kind = "plain" if all(large) else "always"
        elif large and not self.modules.issuperset(layers):  # these save small inputs as they are
            layers = tuple(name for name, flag in zip(layers, large, strict=True) if flag)
        if kind == "coded" and size <= self.source.min_elements:
            size = size * span.itemsize if span.whole is None else self._size(span.whole)
            kind, sources = "small", ()
        return SizedSpan(
            kind,
            layers,
            size,
            span.itemsize,
            span.first,
            span.last,
            self._size(span.samples),
            sources,
            span.again,
            self._size(span.width),
            span.channels,
        )


def _pair(values: Any) -> SizePair:
    first, second = values
    return int(first), int(second)


def _slot(values: Mapping[str, Any]) -> Slot:
    again = values["again"]
    return Slot(
        values["layer"], values["phase"], _work(values["once"]), None if again is None else _work(again)
    )


def _work(values: Mapping[str, Any]) -> Work:
    return Work(tuple(map(_pair, values["live"])), _pair(values["gradients"]))


def _span(values: Mapping[str, Any]) -> SavedSpan:
    parts: dict[str, Any] = {name: int(values[name]) for name in ("itemsize", "first", "last")}
    parts |= {
        "layers": tuple(values["layers"]),
        "size": _pair(values["size"]),
        "samples": _pair(values.get("samples", (1, 1))),
        "width": _pair(values.get("width", (0, 0))),
        "sources": tuple(values.get("sources", ())),
        "extents": tuple(map(_pair, values.get("extents", ()))),
        "whole": None if values.get("whole") is None else _pair(values["whole"]),
    }
    return SavedSpan(**{**values, **parts})
