"""Build a `Timeline` from traced steps: which bytes are saved from when to when, under any policy.

What is hard: no step is traced under the policy itself. A plain and a compressed step are, each at two batch
sizes. The compressed one shows how long tensors live that are not saved, and what encoding and decoding add.
The plain one shows what is saved where nothing is compressed. Further steps, compressed in other ways
(`CASES`), show what is derived instead of stored, and what deriving and other codecs add.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from operator import itemgetter

import numpy as np
import torch
from numpy.typing import NDArray

from mesa_tune.measure.memory.step_trace import NEVER, CallKey, PlainTrace, SlotTrace, StepTrace
from mesa_tune.measure.memory.traced_steps import (
    TracedSteps,
    always_saved,
    counterparts_of,
    is_unattributed,
    sources_of,
    unattributed_bytes,
)
from mesa_tune.policy.settings import MIN_ELEMENTS
from mesa_tune.profiles.timeline.memory_model import SavedSpan, SizePair, Slot, Timeline, Work
from mesa_tune.profiles.timeline.packed_sizes import CASES


@dataclass(frozen=True)
class _TracedSpan:
    """The fields of a `SavedSpan` at one batch size, and the bytes that it has in the step of each case."""

    kind: str
    layers: tuple[str, ...]
    size: int
    itemsize: int
    slots: tuple[int, int]
    traced_bytes: tuple[int, ...]
    samples: int = 1
    sources: tuple[str, ...] = ()
    extents: tuple[int, ...] = ()
    whole: int = 0
    width: int = 0
    channels: int = 0


@dataclass(frozen=True)
class TracedSpan:
    """A saved span, and the bytes that it has in the traced step of each case, at two batch sizes."""

    saved: SavedSpan
    traced_bytes: tuple[tuple[int, ...], tuple[int, ...]]


class TracedPair:
    """Traced steps at two batch sizes; `large` twice where the steps differ in more than sizes."""

    def __init__(self, large: TracedSteps, small: TracedSteps) -> None:
        spans, others = list(_spans(large)), list(_spans(small) if large.matches(small) else ())
        self.large, self.small = large, small
        if len(spans) != len(others):
            self.small, others = large, spans
        pairs = zip(spans, others, strict=True)
        self.spans = [part for span, other in pairs for part in _parts(span, other, large.packed)]

    @property
    def slots(self) -> list[SlotTrace]:
        """The slots of the large compressed step."""
        return self.large.packed.slots

    @property
    def batch_sizes(self) -> SizePair:
        """The two batch sizes, equal where the steps differ."""
        return self.large.batch_size, self.small.batch_size

    def excess(self) -> tuple[int, str | None]:
        """Return the most bytes by which spans exceed a slot's tensors in a traced step, and its layer.

        Where they do, the bytes of other policies than the traced ones are estimates. (0, None): nowhere.
        """
        saved = _saved(self.spans, len(self.slots), 0)
        cases = zip(*(_aligned(trace, self.large.packed) for trace in self.large.cases), strict=True)
        excess = (
            (size - slot.tensors, slot.layer)
            for slots, sizes in zip(cases, saved, strict=True)
            for slot, size in zip(slots, sizes, strict=True)
        )
        return max(excess, key=itemgetter(0), default=(0, None))


def build_timeline(large: TracedSteps, small: TracedSteps, hooked: tuple[str, ...]) -> Timeline:
    """Return the timeline of two batch sizes; of `large` alone where the steps differ in more than sizes.

    `hooked`: the layers stored by hooks.
    """
    return timeline_of(TracedPair(large, small), hooked)


def timeline_of(traced: TracedPair, hooked: tuple[str, ...]) -> Timeline:
    """Return the timeline of traced steps."""
    large = traced.large
    return Timeline(
        batch_sizes=traced.batch_sizes,
        static={kind: (count, traced.small.static[kind]) for kind, count in large.static.items()},
        slots=tuple(Slot(slot.layer, slot.phase, work) for slot, work in slot_works(traced, traced.spans)),
        kept=tuple(span.saved for span in traced.spans),
        hooked=hooked,
        serving=tuple(sorted(large.derived.serving)),
        rows=large.packed.rows,
        channels=large.packed.channels,
        samplers=tuple(sorted(large.packed.samplers)),
        valued=tuple(sorted(large.packed.valued)),
        libraries=max(trace.libraries.nbytes for trace in large.cases),
    )


def _parts(span: _TracedSpan, other: _TracedSpan, trace: StepTrace) -> Iterator[TracedSpan]:
    """Yield the span of two batch sizes, in the parts of `_until_released`."""
    for part in _until_released(_paired(span, other), trace):
        yield TracedSpan(part, (span.traced_bytes, other.traced_bytes))


def _paired(span: _TracedSpan, other: _TracedSpan) -> SavedSpan:
    """Return the span of two batch sizes."""
    return SavedSpan(
        span.kind,
        span.layers,
        (span.size, other.size),
        span.itemsize,
        *span.slots,
        (span.samples, other.samples),
        span.sources,
        tuple(map(_extent_pair, span.extents, other.extents)),
        (span.whole, other.whole),
        width=(span.width, other.width),
        channels=span.channels,
    )


def _until_released(span: SavedSpan, trace: StepTrace) -> Iterator[SavedSpan]:
    """Yield `span` in parts: after its backward, a layer keeps a storage that it saves exactly no longer.

    A layer without a slot in the backward keeps it until the end. So does one whose backward is over before
    the last one of them begins: its graph was retained.
    """
    if span.kind not in ("plain", "side") or len(span.layers) < 2:
        yield span
        return
    releases = [trace.last_backward(layer, span.first, span.last) for layer in span.layers]
    begin = max((end for end in trace.forward_ends if end < max(releases)), default=0)
    releases = [span.last if release < begin else release for release in releases]
    first = span.first
    for last in sorted(set(releases)):
        keepers = [number for number, release in enumerate(releases) if release >= last]
        layers = tuple(span.layers[number] for number in keepers)
        extents = tuple(span.extents[number] for number in keepers) if span.extents else ()
        yield replace(span, layers=layers, extents=extents, first=first, last=last)
        first = last + 1


def _extent_pair(first: int, second: int) -> tuple[int, int]:
    """Return both extents; a call that copies at one batch size alone counts as at the first one."""
    return (first, first) if NEVER in (first, second) else (first, second)


def slot_works(traced: TracedPair, spans: Sequence[TracedSpan]) -> list[tuple[SlotTrace, Work]]:
    """Return each slot with its work.

    The timeline has the bytes of the traced steps in every slot, to the byte. Below zero: spans cover a slot
    in which their storage is not alive, or no kernel has written it.
    """
    sizes = zip(_works(traced.large, spans, 0), _works(traced.small, spans, 1), strict=True)
    works = [tuple(map(_pairs, large, small)) for large, small in sizes]
    return [
        (slot, Work(live, *gradients)) for slot, (live, gradients) in zip(traced.slots, works, strict=True)
    ]


def _pairs(large: Sequence[int], small: Sequence[int]) -> tuple[SizePair, ...]:
    return tuple(zip(large, small, strict=True))


def _works(
    steps: TracedSteps, spans: Sequence[TracedSpan], which: int
) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yield for each slot its live bytes outside spans in each case, and its gradients.

    `which`: position of the batch size.
    """
    saved = _saved(spans, len(steps.packed.slots), which)
    cases = zip(*(_aligned(trace, steps.packed) for trace in steps.cases), strict=True)
    gradients = steps.packed.gradient_bytes().tolist()
    for slots, sizes, gradient in zip(cases, saved, gradients, strict=True):
        live = tuple(slot.high - size for slot, size in zip(slots, sizes, strict=True))
        yield live, (gradient,)


def _saved(spans: Iterable[TracedSpan], count: int, which: int) -> list[list[int]]:
    """Return for each of `count` slots, and each case, the bytes of the spans that cover it."""
    changes = np.zeros((count + 1, len(CASES)), dtype=np.int64)
    for span in spans:
        changes[span.saved.first] += span.traced_bytes[which]
        changes[span.saved.last + 1] -= span.traced_bytes[which]
    sums: list[list[int]] = changes[:-1].cumsum(axis=0).tolist()
    return sums


def _aligned(trace: StepTrace, packed: StepTrace) -> list[SlotTrace]:
    """Return for each slot of the compressed step the same slot of `trace`."""
    slots = dict(_with_keys(trace))
    return [slots.get(key, slot) for key, slot in _with_keys(packed)]


def _with_keys(trace: StepTrace) -> Iterator[tuple[tuple[str | None, str, bool, int], SlotTrace]]:
    """Yield each slot with its layer, its phase, whether this runs again, and the number of such slots."""
    counts: Counter[tuple[str | None, str, bool]] = Counter()
    for slot in trace.slots:
        name = slot.layer, slot.phase, slot.again
        counts[name] += 1
        yield (*name, counts[name]), slot


def _spans(steps: TracedSteps) -> Iterator[_TracedSpan]:
    packed, plain = steps.packed, steps.plain
    counterparts = counterparts_of(plain, packed)
    always = always_saved(steps, counterparts)
    yield from _coded(steps, counterparts)
    for number, calls in packed.side_calls.items():
        if number in always or number not in packed.side:
            continue
        size, layers = packed.lifetimes[number].bytes, tuple(dict.fromkeys(layer for layer, _ in calls))
        extents = _largest(steps, layers, calls)
        yield _TracedSpan("side", layers, size, 1, _alive(packed, number), _compressed(size), extents=extents)
    aligned = np.array([slot.moment for slot in _aligned(plain, packed)], dtype=np.int64)
    for number, item in plain.plain.items():
        size, counterpart = plain.lifetimes[number].bytes, counterparts.get(number)
        if counterpart in always:
            slots = _alive(packed, counterpart)
            yield _TracedSpan("always", tuple(item.layers), size, 1, slots, _always(size))
        else:
            extension = _extension(steps, number, counterpart, aligned)
            size = 0 if extension is None else size
            itemsize = getattr(torch, item.dtype).itemsize
            extents = _smallest(steps, item, counterpart)
            slots, layers, traced = extension or (0, 0), tuple(item.layers), _exact(size)
            yield _TracedSpan("plain", layers, size, itemsize, slots, traced, extents=extents)
    yield from _unattributed(steps, counterparts, always)
    yield from _compressed_only(steps, counterparts)


def _exact(size: int) -> tuple[int, ...]:
    """Return the bytes in each case of what is alive in the plain step alone."""
    return (size, *[0] * (len(CASES) - 1))


def _compressed(size: int) -> tuple[int, ...]:
    """Return the bytes in each case of what is alive in all steps but the plain one."""
    return (0, *[size] * (len(CASES) - 1))


def _always(size: int) -> tuple[int, ...]:
    """Return the bytes in each case of what is alive in all steps."""
    return (size,) * len(CASES)


def _coded(steps: TracedSteps, counterparts: Mapping[int, int]) -> Iterator[_TracedSpan]:
    """Yield what the compressed step stores in parts."""
    packed, sources = steps.packed, sources_of(steps)
    plain = [(counterparts.get(number), item) for number, item in steps.plain.plain.items()]
    also_plain = {(new, layer) for new, item in plain if new is not None for layer in item.layers}
    shares = Counter(item.source for item in packed.coded.values() if prod(item.shape) <= MIN_ELEMENTS)
    keys = {number: key for key, number in packed.first_parts.items()}
    for first_part, coded in packed.coded.items():
        whole = prod(coded.shape) * coded.itemsize
        if any((coded.source, layer) in also_plain for layer in coded.layers):
            whole = 0
        elif coded.source is not None:
            whole = packed.lifetimes[coded.source].bytes // max(1, shares[coded.source])
        yield _TracedSpan(
            "coded",
            tuple(coded.layers),
            prod(coded.shape),
            coded.itemsize,
            _alive(packed, coded.parts[0]),
            tuple(trace.packed_bytes(keys[first_part]) for trace in steps.cases),
            coded.shape[0] if len(coded.shape) > 1 else 1,
            sources.get(first_part, ()),
            _largest(steps, coded.layers, coded.calls),
            whole,
            coded.width,
            coded.channels,
        )


def _largest(steps: TracedSteps, layers: Iterable[str], calls: list[CallKey]) -> tuple[int, ...]:
    """Return for each layer the largest extent of one of its calls."""
    return tuple(max(_extent(steps, call) for call in calls if call[0] == layer) for layer in layers)


def _smallest(steps: TracedSteps, item: PlainTrace, counterpart: int | None) -> tuple[int, ...]:
    """Return for each layer the extent that decides whether it frees a storage that PyTorch saves for it.

    Hooks decide by each view of the storage; a call by everything it saves, and then by each view.
    """
    views = steps.packed.views
    return tuple(
        min(
            count
            for call in item.calls
            if call[0] == layer
            for count in (
                NEVER if call[1] < 0 else _extent(steps, call),
                NEVER if counterpart is None else views.get((call, counterpart), NEVER),
            )
        )
        for layer in item.layers
    )


def _extent(steps: TracedSteps, call: CallKey) -> int:
    """Return the number of elements that decides whether a call compresses: of what it would store in parts,
    or, for a call that saves masks alone, of what PyTorch would save.
    """
    return steps.packed.extents.get(call, steps.plain.saved_extents.get(call, NEVER))


def _unattributed(
    steps: TracedSteps, counterparts: Mapping[int, int], always: set[int]
) -> Iterator[_TracedSpan]:
    """Yield what is alive when the forward ends though autograd saves it for no layer: a checkpoint's own."""
    plain, packed = steps.plain, steps.packed
    unexplained = unattributed_bytes(plain)
    for number, lifetime in plain.lifetimes.items():
        new = counterparts.get(number)
        if is_unattributed(plain, number) and new is not None and (new in always or packed.stays_whole(new)):
            yield _TracedSpan("always", (), lifetime.bytes, 1, _alive(packed, new), _always(lifetime.bytes))
            unexplained -= lifetime.bytes * plain.is_counted(number)
    if unexplained > 0:
        end = packed.forward_ends[plain.fullest]
        yield _TracedSpan("always", (), unexplained, 1, (end, end + 1), _always(unexplained))


def _compressed_only(steps: TracedSteps, counterparts: Mapping[int, int]) -> Iterator[_TracedSpan]:
    """Yield what only the compressed step has alive though no layer saves it, with the layer that made it."""
    packed = steps.packed
    explained = {*counterparts.values(), *packed.side}
    for number, lifetime in packed.lifetimes.items():
        if number not in explained and packed.is_saved(number) and packed.stays_whole(number):
            layer, slots = packed.slots[_birth_slot(packed, number)].layer, _alive(packed, number)
            if layer is not None:
                traced = _compressed(lifetime.bytes)
                yield _TracedSpan("side", (layer,), lifetime.bytes, 1, slots, traced)


def _alive(trace: StepTrace, number: int) -> tuple[int, int]:
    """Return the first and the last slot in which the storage is alive; a saved one reaches the backward."""
    birth = _birth_slot(trace, number)
    ends = _ends(trace.alive(number, trace.moments)) or (birth, birth)
    return _into_backward(trace, trace.saved_after(number), ends)


def _ends(marked: NDArray[np.bool_]) -> tuple[int, int] | None:
    """Return the first and the last index that is marked."""
    indices = np.flatnonzero(marked)
    return (int(indices[0]), int(indices[-1])) if indices.size else None


def _birth_slot(trace: StepTrace, number: int) -> int:
    before = np.searchsorted(trace.moments, trace.lifetimes[number].birth, side="right")
    return max(0, int(before) - 1)


def _into_backward(trace: StepTrace, saved_after: list[int], ends: tuple[int, int]) -> tuple[int, int]:
    """Return `ends`, extended to the backwards that follow the forwards `saved_after`."""
    last = [trace.forward_ends[forward] for forward in saved_after]
    return min([ends[0], *last]), max([ends[1], *(slot + 1 for slot in last)])


def _extension(
    steps: TracedSteps, number: int, counterpart: int | None, aligned: NDArray[np.int64]
) -> tuple[int, int] | None:
    """Return the slots in which a tensor is alive only because the plain step saves it, or None.

    `aligned`: for each slot of the compressed step, the moment of the same slot of the plain one.
    """
    extended = steps.plain.alive(number, aligned)
    ends = _ends(extended)
    if counterpart is not None:
        moments = steps.packed.moments
        extended &= ~steps.packed.alive(counterpart, moments)
        death = steps.packed.lifetimes[counterpart].death
        ends = _ends(extended & (moments >= death)) or _ends(extended)
    saved_after = steps.plain.saved_after(number)
    return _into_backward(steps.packed, saved_after, ends or (0, 0)) if saved_after else ends
