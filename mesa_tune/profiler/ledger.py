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
from itertools import accumulate, chain
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray

from mesa_tune.errors import RunError
from mesa_tune.policy.settings import MIN_ELEMENTS
from mesa_tune.profiler.entries import NO_FORMULA, OUTSIDE, ExactEntry, TensorEntry
from mesa_tune.profiler.timeline import Kept, Slot, Timeline
from mesa_tune.profiler.trace import NEVER, PlainTrace, SlotTrace, StepTrace, Turn


@dataclass(frozen=True)
class TracedPair:
    """The plain, the compressed and the deriving step at one batch size; `static` are the bytes before it."""

    batch_size: int
    static: int
    plain: StepTrace
    packed: StepTrace
    derived: StepTrace

    def same_shape(self, other: TracedPair) -> bool:
        """Whether the same things are kept by the same layers in the same order."""
        return self._form() == other._form()

    def _form(self) -> tuple[object, ...]:
        kept = [tuple(item.layers) for item in self.plain.plain.values()]
        kept += [tuple(item.layers) for item in self.packed.coded.values()]
        slots = [
            (slot.layer, slot.phase)
            for trace in (self.plain, self.packed, self.derived)
            for slot in trace.slots
        ]
        return kept, slots, list(self.packed.side.values()), self.derived.derived


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


def tensor_entries(plain: StepTrace) -> list[TensorEntry]:
    """What the plain step keeps from its forward on, oldest first."""
    return [
        TensorEntry(
            number, item.layers[0], tuple(item.layers), item.shape, item.dtype, plain.lives[number].bytes
        )
        for number, item in sorted(plain.plain.items())
        if plain.is_saved(number)
    ]


UNATTRIBUTED = "unattributed"
"""The layer of what nobody asked autograd to save: tensors that somebody's Function holds in its `ctx`."""


def unattributed_bytes(plain: StepTrace) -> int:
    """Bytes alive when the forward has ended that autograd was not asked to save."""
    return max(0, plain.saved_bytes - sum(entry.bytes for entry in tensor_entries(plain)))


def exact_entries(pair: TracedPair, tags: Mapping[str, str]) -> list[ExactEntry]:
    """Return what every policy leaves as PyTorch saves it, largest first; `tags` are those of layers."""
    plain, twins = pair.plain, _twins(pair.plain, pair.packed)
    stay = _staying(pair, twins)
    found = [
        ExactEntry(
            _function(item.layers[0], tags), item.layers[0], plain.lives[number].bytes, _why(item, tags)
        )
        for number, item in plain.plain.items()
        if plain.is_saved(number) and twins.get(number) in stay
    ]
    left = unattributed_bytes(plain)
    if left > 0:
        found.append(ExactEntry(UNATTRIBUTED, UNATTRIBUTED, left, OUTSIDE))
    return sorted(found, key=lambda entry: -entry.bytes)


def _function(layer: str, tags: Mapping[str, str]) -> str:
    """Return the function that a layer's name ends with; of a module that is a layer, its tag."""
    parts = layer.split(".")
    return parts[-2] if len(parts) > 1 and parts[-1].isdecimal() else tags.get(layer, layer)


def _why(item: PlainTrace, tags: Mapping[str, str]) -> str:
    """Return why a tensor stays exact."""
    if "float" not in item.dtype:
        return f"its dtype is {item.dtype}"
    if prod(item.shape) <= MIN_ELEMENTS:
        return "small"
    return "left exact by its formula" if item.layers[0] in tags else NO_FORMULA


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
    twins = _twins(plain, packed)
    stay = _staying(pair, twins)
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
    packed, sources = pair.packed, _sources(pair)
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
    stay = _staying(pair, twins)
    for number, life in plain.lives.items():
        twin = twins.get(number)
        if _is_held(plain, number) and twin is not None and (twin in stay or packed.stays(twin)):
            yield _Span("always", (), life.bytes, 1, _alive(packed, twin), life.bytes)
            unexplained -= life.bytes
    if unexplained > 0:
        end = packed.forward_end
        yield _Span("always", (), unexplained, 1, (end, end + 1), unexplained)


def _is_held(plain: StepTrace, number: int) -> bool:
    """Whether the storage is there when the forward has ended though autograd was not asked to save it."""
    return plain.is_saved(number) and number not in plain.plain and number != plain.loss


def _left(pair: TracedPair, twins: Mapping[int, int]) -> Iterator[_Span]:
    """What is there in the compressed step alone though no layer keeps it: it is the layer's that made it."""
    packed, known = pair.packed, {*twins.values(), *pair.packed.side}
    for number, life in packed.lives.items():
        layer = packed.slots[_birth_slot(packed, number)].layer
        if packed.is_saved(number) and number not in known and packed.stays(number) and layer is not None:
            yield _Span("side", (layer,), life.bytes, 1, _alive(packed, number), life.bytes)


def _staying(pair: TracedPair, twins: Mapping[int, int]) -> set[int]:
    """Storages that are kept as they are whether their layers compress or not: a norm's statistics, and what
    a checkpoint holds for the layers of its part.
    """
    plain, side = pair.plain, pair.packed.side
    kept = [(twin, item) for number, item in plain.plain.items() if (twin := twins.get(number))]
    stay = {twin for twin, item in kept if side.get(twin) in item.layers or pair.packed.stays(twin)}
    return stay | {twin for number, twin in twins.items() if twin in side and _is_held(plain, number)}


def _sources(pair: TracedPair) -> dict[int, tuple[str, ...]]:
    """Of packed tensors that the deriving step makes again: the layers whose kept tensors that takes."""
    derived = pair.derived.derived
    return {number: derived[place] for place, number in pair.packed.places.items() if place in derived}


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


def _twins(plain: StepTrace, packed: StepTrace) -> dict[int, int]:
    """For storages of the plain step, the same tensor's storage in the compressed one."""
    if [len(call) for call in plain.calls] != [len(call) for call in packed.calls]:
        raise RunError(
            "the model made other torch calls in its second run than in its first, on the same batch\n"
            "its forward depends on something that changes: fix its seed, or profile it in eval mode"
        )
    found: dict[int, int] = {}
    for number, other in chain(_passed(plain, packed), _saved_alike(plain, packed)):
        if number is not None and other is not None:
            found.setdefault(number, other)
    return found


def _passed(plain: StepTrace, packed: StepTrace) -> Iterator[tuple[int | None, int | None]]:
    """What calls take and return in both steps."""
    for call, twin in zip(plain.calls, packed.calls, strict=True):
        yield from zip(call, twin, strict=True)
    for key, call in plain.again.items():
        yield from zip(call, packed.again.get(key, ()), strict=False)


def _saved_alike(plain: StepTrace, packed: StepTrace) -> Iterator[tuple[int | None, int | None]]:
    """What layers left to autograd save in both steps, though no call takes or returns it (LSTM's parts)."""
    for layer, saved in plain.saves.items():
        others = packed.saves.get(layer, [])
        if [look for _, look in saved] == [look for _, look in others]:
            yield from zip((number for number, _ in saved), (number for number, _ in others), strict=True)
