"""From traced steps to a `Timeline`: which bytes are kept from when to when, under any policy.

A plain and a compressed step are traced, each at two batch sizes. The compressed one tells when PyTorch's
own tensors die by nature, and what encoding and decoding add; the plain one what is kept where nothing is
compressed. A third, compressed with `store: derive`, tells what is made again instead of being stored, and
what that takes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray

from mesa_tune.policy.settings import MIN_ELEMENTS
from mesa_tune.profiler.account import TracedPair, is_held, sources_of, staying, twins_of, unattributed_bytes
from mesa_tune.profiler.step_trace import NEVER, PlainTrace, SlotTrace, StepTrace, Turn
from mesa_tune.profiler.timeline import Kept, Slot, Timeline


@dataclass(frozen=True)
class _Span:
    """A kept thing at one batch size: its timeline entry, and its bytes in the traced step."""

    kind: str
    layers: tuple[str, ...]
    size: int
    itemsize: int
    slots: tuple[int, int]
    traced_bytes: int
    samples: int = 1
    sources: tuple[str, ...] = ()
    extents: tuple[int, ...] = ()
    whole: int = 0

    @property
    def is_stored_when_derived(self) -> bool:
        """Whether a step in which all layers derive what they can has the thing."""
        return not self.sources or any(layer in self.sources for layer in self.layers)


def timeline(large: TracedPair, small: TracedPair) -> Timeline:
    """The timeline of two traced batch sizes; of `large` alone where the steps differ in more than sizes."""
    second = small if large.same_shape(small) else large
    spans, other = list(_spans(large)), list(_spans(second))
    if len(spans) != len(other):
        second, other = large, spans
    slots = _slots(large, spans)
    lesser = _slots(second, [_placed(span, like) for span, like in zip(other, spans, strict=True)])
    return Timeline(
        batch_sizes=(large.batch_size, second.batch_size),
        static=(large.static, second.static),
        slots=tuple(
            Slot(slot.layer, slot.phase, *zip(sizes, others, strict=True))
            for (slot, *sizes), (_, *others) in zip(slots, lesser, strict=True)
        ),
        kept=tuple(
            Kept(
                span.kind,
                span.layers,
                (span.size, twin.size),
                span.itemsize,
                *span.slots,
                (span.samples, twin.samples),
                span.sources,
                tuple(map(_extents, span.extents, twin.extents)),
                (span.whole, twin.whole),
            )
            for span, twin in zip(spans, other, strict=True)
        ),
        hooked=tuple(sorted(large.packed.hooked)),
        serving=tuple(sorted(large.derived.serving)),
        rows=large.packed.rows,
    )


def _extents(first: int, second: int) -> tuple[int, int]:
    """The pair of them; what is copied in one step alone counts as if it were in both, or in neither."""
    return (first, first) if NEVER in (first, second) else (first, second)


def _placed(span: _Span, like: _Span) -> _Span:
    return replace(span, slots=like.slots)


def _slots(pair: TracedPair, spans: list[_Span]) -> list[tuple[SlotTrace, int, int, int]]:
    """Each slot with its live bytes besides kept things, in the plain, compressed and deriving step."""
    rows = []
    plain, derived = _aligned(pair.plain, pair.packed), _aligned(pair.derived, pair.packed)
    count = len(pair.packed.slots)
    stored = [span for span in spans if span.kind != "plain"]
    exact = _summed(
        (span for span in spans if span.kind in ("plain", "always")), count, lambda span: span.size
    )
    packed = _summed(stored, count, lambda span: span.traced_bytes)
    deriving = _summed(
        (span for span in stored if span.is_stored_when_derived), count, lambda span: span.traced_bytes
    )
    for place, slot in enumerate(pair.packed.slots):
        rows.append(
            (
                slot,
                max(0, plain[place].high - exact[place]),
                max(0, slot.high - packed[place]),
                max(0, derived[place].high - deriving[place]),
            )
        )
    return rows


def _summed(spans: Iterable[_Span], count: int, size: Callable[[_Span], int]) -> list[int]:
    """The sum of the sizes of those spans that each of `count` slots lies in."""
    changes = [0] * (count + 1)
    for span in spans:
        changes[span.slots[0]] += size(span)
        changes[span.slots[1] + 1] -= size(span)
    return list(accumulate(changes[:-1]))


def _aligned(trace: StepTrace, packed: StepTrace) -> list[SlotTrace]:
    """For each slot of the compressed step, that of `trace`."""
    known = dict(_by_turn(trace))
    return [known.get(place, slot) for place, slot in _by_turn(packed)]


def _by_turn(trace: StepTrace) -> Iterator[tuple[tuple[str | None, str, int], SlotTrace]]:
    """Each slot under its layer, its phase, and how many such slots came before it."""
    counts: dict[tuple[str | None, str], int] = {}
    for slot in trace.slots:
        turn = counts.get((slot.layer, slot.phase), 0)
        counts[slot.layer, slot.phase] = turn + 1
        yield (slot.layer, slot.phase, turn), slot


def _spans(pair: TracedPair) -> Iterator[_Span]:
    packed, plain = pair.packed, pair.plain
    twins = twins_of(plain, packed)
    stay = staying(pair, twins)
    yield from _coded(pair, twins)
    for number, layer in packed.side.items():
        if number in stay:
            continue
        size = packed.lives[number].bytes
        extents = _largest(pair, (layer,), packed.side_calls[number])
        yield _Span("side", (layer,), size, 1, _alive(packed, number), size, extents=extents)
    aligned = np.array([slot.moment for slot in _aligned(plain, packed)], dtype=np.int64)
    for number, item in plain.plain.items():
        size, twin = plain.lives[number].bytes, twins.get(number)
        if twin in stay:
            yield _Span("always", tuple(item.layers), size, 1, _alive(packed, twin), size)
        else:
            extension = _extension(pair, number, twin, aligned)
            size = 0 if extension is None else size
            itemsize = getattr(torch, item.dtype).itemsize
            extents = _smallest(pair, item, twin)
            where = extension or (0, 0)
            yield _Span("plain", tuple(item.layers), size, itemsize, where, size, extents=extents)
    yield from _held(pair, twins)
    yield from _left(pair, twins)


def _coded(pair: TracedPair, twins: Mapping[int, int]) -> Iterator[_Span]:
    """What the compressed step stores in parts."""
    packed, sources = pair.packed, sources_of(pair)
    plain = [(twins.get(number), item) for number, item in pair.plain.plain.items()]
    known = {(twin, layer) for twin, item in plain if twin is not None for layer in item.layers}
    shares = Counter(item.source for item in packed.coded.values() if prod(item.shape) <= MIN_ELEMENTS)
    for first, coded in packed.coded.items():
        where = _alive(packed, coded.parts[0])
        traced = sum(packed.lives[number].bytes for number in coded.parts)
        samples = coded.shape[0] if len(coded.shape) > 1 else 1
        whole = prod(coded.shape) * coded.itemsize
        if any((coded.source, layer) in known for layer in coded.layers):
            whole = 0
        elif coded.source is not None:
            whole = packed.lives[coded.source].bytes // max(1, shares[coded.source])
        yield _Span(
            "coded",
            tuple(coded.layers),
            prod(coded.shape),
            coded.itemsize,
            where,
            traced,
            samples,
            sources.get(first, ()),
            _largest(pair, coded.layers, coded.calls),
            whole,
        )


def _largest(pair: TracedPair, layers: Iterable[str], calls: list[Turn]) -> tuple[int, ...]:
    """For each layer, how many elements decide whether one of its calls compresses."""
    return tuple(max(_extent(pair, turn) for turn in calls if turn[0] == layer) for layer in layers)


def _smallest(pair: TracedPair, item: PlainTrace, twin: int | None) -> tuple[int, ...]:
    """For each layer that PyTorch keeps a storage for, how many elements decide whether it lets go of it:
    hooks go by each view of the storage, a call by all that it keeps, and then by each view.
    """
    views = pair.packed.views
    return tuple(
        min(
            count
            for turn in item.calls
            if turn[0] == layer
            for count in (
                NEVER if turn[1] < 0 else _extent(pair, turn),
                NEVER if twin is None else views.get((turn, twin), NEVER),
            )
        )
        for layer in item.layers
    )


def _extent(pair: TracedPair, turn: Turn) -> int:
    """How many elements decide whether a call compresses: those that it would store in parts; of a call that
    keeps masks alone, those that PyTorch would save.
    """
    return pair.packed.extents.get(turn, pair.plain.saved_extents.get(turn, NEVER))


def _held(pair: TracedPair, twins: Mapping[int, int]) -> Iterator[_Span]:
    """What is there when the forward has ended, though autograd keeps it for no layer: a checkpoint's own."""
    plain, packed = pair.plain, pair.packed
    unexplained = unattributed_bytes(plain)
    stay = staying(pair, twins)
    for number, life in plain.lives.items():
        twin = twins.get(number)
        if is_held(plain, number) and twin is not None and (twin in stay or packed.stays(twin)):
            yield _Span("always", (), life.bytes, 1, _alive(packed, twin), life.bytes)
            unexplained -= life.bytes
    if unexplained > 0:
        end = packed.forward_end
        yield _Span("always", (), unexplained, 1, (end, end + 1), unexplained)


def _left(pair: TracedPair, twins: Mapping[int, int]) -> Iterator[_Span]:
    """What is there in the compressed step alone though no layer keeps it: it is the layer's that made it."""
    packed, known = pair.packed, {*twins.values(), *pair.packed.side}
    for number, life in packed.lives.items():
        layer = packed.slots[_birth_slot(packed, number)].layer
        if packed.is_saved(number) and number not in known and packed.stays(number) and layer is not None:
            yield _Span("side", (layer,), life.bytes, 1, _alive(packed, number), life.bytes)


def _alive(trace: StepTrace, number: int) -> tuple[int, int]:
    """First and last slot at whose highest moment the storage is alive; what is saved reaches into the
    backward.
    """
    birth = _birth_slot(trace, number)
    ends = _ends(trace.alive(number, trace.moments)) or (birth, birth)
    return _reaching(trace, ends) if trace.is_saved(number) else ends


def _ends(marked: NDArray[np.bool_]) -> tuple[int, int] | None:
    """The first and the last place that is marked."""
    places = np.flatnonzero(marked)
    return (int(places[0]), int(places[-1])) if places.size else None


def _birth_slot(trace: StepTrace, number: int) -> int:
    before = np.searchsorted(trace.moments, trace.lives[number].birth, side="right")
    return max(0, int(before) - 1)


def _reaching(trace: StepTrace, ends: tuple[int, int]) -> tuple[int, int]:
    return min(ends[0], trace.forward_end), max(ends[1], trace.forward_end + 1)


def _extension(
    pair: TracedPair, number: int, twin: int | None, aligned: NDArray[np.int64]
) -> tuple[int, int] | None:
    """The slots in which a tensor is alive only because the plain step keeps it; None if there are none.

    `aligned`: for each slot of the compressed step, the highest moment of that of the plain one.
    """
    only = pair.plain.alive(number, aligned)
    ends = _ends(only)
    if twin is not None:
        moments = pair.packed.moments
        only &= ~pair.packed.alive(twin, moments)
        ends = _ends(only & (moments >= pair.packed.lives[twin].death)) or _ends(only)
    return _reaching(pair.packed, ends or (0, 0)) if pair.plain.is_saved(number) else ends
