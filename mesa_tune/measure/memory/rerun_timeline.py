"""The timeline of a step in which modules may run again in backward, some or all of them.

What is hard: no step is traced for each set of modules. One in which none runs again is, and one in which all
do. A module is alone with its part of a step: what it saves, and the slots of its layers, are taken from one
of both steps, whatever other modules do. Tensors that several modules save are saved while one of them needs
them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from mesa_tune.measure.memory.step_trace import SlotTrace
from mesa_tune.measure.memory.timeline_builder import TracedPair, TracedSpan, slot_works, timeline_of
from mesa_tune.profiles.timeline.memory_model import NOTHING, SizePair, Slot, Timeline, Work
from mesa_tune.profiles.timeline.packed_sizes import CASES
from mesa_tune.profiles.timeline.step_arrays import block_of


def rerun_timeline(
    traced: TracedPair, again: TracedPair, modules: tuple[str, ...], hooked: tuple[str, ...]
) -> Timeline:
    """Return the timeline of the `traced` steps, and of those in which all `modules` run again.

    Without `modules` where the steps differ in more than the second runs. `hooked`: layers stored by hooks.
    """
    timeline = timeline_of(traced, hooked)
    first_runs = _first_runs(traced.slots, again.slots)
    if len(first_runs) != len(traced.slots) or traced.batch_sizes != again.batch_sizes:
        return timeline
    moved = [_moved(span, first_runs) for span in traced.spans]
    inside = list(_of_modules(again.spans, modules))
    moved, inside = _without_copies(moved, inside)
    # In the step in which all run again, what layers inside save is alive in second runs alone.
    outside = [span for span in moved if not span.saved.layers or not _all_inside(span, modules)]
    works = slot_works(again, [*outside, *inside])
    once = {first_runs[index]: slot.once for index, slot in enumerate(timeline.slots)}
    nothing = Work.of(NOTHING, NOTHING)  # of a second run
    slots = tuple(
        Slot(slot.layer, slot.phase, once.get(index, nothing), _with_others(work, once.get(index, nothing)))
        for index, (slot, work) in enumerate(works)
    )
    spans = tuple(span.saved for span in (*moved, *inside))
    packed = again.large.packed
    rows, channels = packed.rows | dict(timeline.rows), packed.channels | dict(timeline.channels)
    samplers = tuple(sorted(packed.samplers.union(timeline.samplers)))
    valued = tuple(sorted(packed.valued.union(timeline.valued)))
    timeline = replace(timeline, slots=slots, kept=spans, modules=modules)
    return replace(timeline, rows=rows, channels=channels, samplers=samplers, valued=valued)


def _with_others(again: Work, once: Work) -> Work:
    """Return the work `again` in which other codecs add to the packed case what they add `once`."""
    return replace(again, live=_added(again.live, once.live))


def _added(again: Sequence[SizePair], once: Sequence[SizePair]) -> tuple[SizePair, ...]:
    packed = CASES.index("packed")
    large, small = again[packed]
    own_large, own_small = once[packed]
    others = (once[CASES.index(case)] for case in ("whole", "dropped", "sampled"))
    more = ((large + one[0] - own_large, small + one[1] - own_small) for one in others)
    return (*again[: CASES.index("whole")], *more)


def _first_runs(once: Sequence[SlotTrace], again: Sequence[SlotTrace]) -> list[int]:
    """Return the positions in `again` of the slots `once`, in order; fewer if some have no counterpart.

    Between them are those of second runs, and of all slices of a module but the first.
    """
    found: list[int] = []
    for index, slot in enumerate(again):
        if len(found) < len(once) and not slot.again:
            expected = once[len(found)]
            if (slot.layer, slot.phase) == (expected.layer, expected.phase):
                found.append(index)
    return found


def _moved(span: TracedSpan, positions: Sequence[int]) -> TracedSpan:
    """Return `span` with the new `positions` of its slots."""
    first, last = positions[span.saved.first], positions[span.saved.last]
    return replace(span, saved=replace(span.saved, first=first, last=last))


def _of_modules(spans: Sequence[TracedSpan], modules: Sequence[str]) -> Iterator[TracedSpan]:
    """Yield the inputs of modules, and what layers inside modules save in the second run."""
    for span in spans:
        if span.saved.layers and set(span.saved.layers) <= set(modules):
            yield span
        elif span.saved.layers and _all_inside(span, modules):
            yield replace(span, saved=replace(span.saved, again=True))


def _without_copies(
    once: Sequence[TracedSpan], again: Sequence[TracedSpan]
) -> tuple[list[TracedSpan], list[TracedSpan]]:
    """Return both lists without what is one tensor in both: several modules get it, and save it whole.

    Such a tensor (positions that all blocks share) is alive whatever runs again.
    """
    shared = {(span.saved.layers, span.saved.size) for span in once if span.saved.kind == "always"}
    shared &= {(span.saved.layers, span.saved.size) for span in again if span.saved.kind == "always"}

    def whole(span: TracedSpan) -> bool:
        return span.saved.kind == "always" and (span.saved.layers, span.saved.size) in shared

    merged = [replace(span, saved=replace(span.saved, layers=())) if whole(span) else span for span in once]
    return merged, [span for span in again if not whole(span)]


def _all_inside(span: TracedSpan, modules: Sequence[str]) -> bool:
    return all(block_of(layer, modules) is not None for layer in span.saved.layers)
