"""Traces of one step under several policies: which storages are the same tensor, and which layers save them.

What is hard: the same tensor has another storage in each trace. All steps make the same torch calls in the
same order, so it is found by the call that takes, returns or saves it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from math import prod

from mesa_tune.errors import RunError
from mesa_tune.measure.memory.step_trace import PlainTrace, StepTrace
from mesa_tune.policy.settings import MIN_ELEMENTS
from mesa_tune.profiles.entries import NO_FORMULA, OUTSIDE, ExactEntry, TensorEntry

UNATTRIBUTED = "unattributed"
"""Layer of the bytes that autograd was not asked to save: tensors that a custom Function puts in `ctx`."""


@dataclass(frozen=True)
class TracedSteps:
    """The plain step and those that store in other ways (`CASES`) at one batch size.

    `static`: bytes before the step, by kind.
    """

    batch_size: int
    static: Mapping[str, int]
    plain: StepTrace
    packed: StepTrace
    derived: StepTrace
    whole: StepTrace
    dropped: StepTrace
    sampled: StepTrace

    @property
    def cases(self) -> tuple[StepTrace, ...]:
        """The steps in the order of `CASES`."""
        return self.plain, self.packed, self.derived, self.whole, self.dropped, self.sampled

    def matches(self, other: TracedSteps) -> bool:
        """Return whether in `other` the same layers save the same tensors in the same order."""
        return self._form() == other._form()

    def _form(self) -> tuple[object, ...]:
        saved = [tuple(item.layers) for item in self.plain.plain.values()]
        saved += [tuple(item.layers) for item in self.packed.coded.values()]
        slots = [
            (slot.layer, slot.phase)
            for trace in (self.plain, self.packed, self.derived)
            for slot in trace.slots
        ]
        return saved, slots, list(self.packed.side.values()), self.derived.derived


def tensor_entries(plain: StepTrace) -> list[TensorEntry]:
    """Return the tensors that the plain step has saved when its fullest forward ends, oldest first."""
    return [
        TensorEntry(
            number, item.layers[0], tuple(item.layers), item.shape, item.dtype, plain.lifetimes[number].bytes
        )
        for number, item in sorted(plain.plain.items())
        if plain.is_counted(number)
    ]


def unattributed_bytes(plain: StepTrace) -> int:
    """Return the bytes alive when the forward ends that autograd was not asked to save.

    What modules save that run again is packed also in the plain step.
    """
    packed = [number for number in (*plain.parts, *plain.side) if number not in plain.plain]
    known = sum(entry.bytes for entry in tensor_entries(plain))
    known += sum(plain.lifetimes[number].bytes for number in packed if plain.is_counted(number))
    return max(0, plain.saved_bytes - known)


def exact_entries(steps: TracedSteps, tags: Mapping[str, str]) -> list[ExactEntry]:
    """Return what every policy leaves exact, largest first; `tags` maps layers to tags."""
    plain, counterparts = steps.plain, counterparts_of(steps.plain, steps.packed)
    always = always_saved(steps, counterparts)
    entries = [
        ExactEntry(
            _function(item.layers[0], tags), item.layers[0], plain.lifetimes[number].bytes, _why(item, tags)
        )
        for number, item in plain.plain.items()
        if plain.is_counted(number) and counterparts.get(number) in always
    ]
    unattributed = unattributed_bytes(plain)
    if unattributed > 0:
        entries.append(ExactEntry(UNATTRIBUTED, UNATTRIBUTED, unattributed, OUTSIDE))
    return sorted(entries, key=lambda entry: -entry.bytes)


def _function(layer: str, tags: Mapping[str, str]) -> str:
    """Return the function that the layer's name ends with; for a module that is a layer, its tag."""
    parts = layer.split(".")
    return parts[-2] if len(parts) > 1 and parts[-1].isdecimal() else tags.get(layer, layer)


def _why(item: PlainTrace, tags: Mapping[str, str]) -> str:
    """Return why a tensor stays exact."""
    if "float" not in item.dtype:
        return f"its dtype is {item.dtype}"
    if prod(item.shape) <= MIN_ELEMENTS:
        return "small"
    return "left exact by its formula" if item.layers[0] in tags else NO_FORMULA


def is_unattributed(plain: StepTrace, number: int) -> bool:
    """Return whether the storage is alive when the forward ends though no layer or module saves it."""
    known = number in plain.plain or number in plain.parts or number in plain.side
    return not known and plain.is_saved(number) and number not in plain.losses


def always_saved(steps: TracedSteps, counterparts: Mapping[int, int]) -> set[int]:
    """Return the storages of the compressed step that every policy saves whole.

    Examples: a norm's statistics; what a checkpoint saves for the layers inside it.
    """
    plain, packed = steps.plain, steps.packed
    items = [(counterparts[number], item) for number, item in plain.plain.items() if number in counterparts]
    always = {new for new, item in items if packed.side.get(new) in item.layers or packed.stays_whole(new)}
    return always | {
        new for old, new in counterparts.items() if new in packed.side and is_unattributed(plain, old)
    }


def sources_of(steps: TracedSteps) -> dict[int, tuple[str, ...]]:
    """Return for the first parts of packed tensors the layers from which the deriving step derives them."""
    derived = steps.derived.derived
    return {number: derived[key] for key, number in steps.packed.first_parts.items() if key in derived}


def counterparts_of(plain: StepTrace, packed: StepTrace) -> dict[int, int]:
    """Return for storages of the plain step the storage of the same tensor in the compressed step."""
    if [len(call) for call in plain.calls] != [len(call) for call in packed.calls]:
        raise RunError(
            "the model made other torch calls in its second run than in its first, on the same batch\n"
            "its forward depends on something that changes: fix its seed, or profile it in eval mode"
        )
    counterparts: dict[int, int] = {}
    for number, counterpart in chain(_matched_by_call(plain, packed), _matched_by_save(plain, packed)):
        if number is not None and counterpart is not None:
            counterparts.setdefault(number, counterpart)
    return counterparts


def _matched_by_call(plain: StepTrace, packed: StepTrace) -> Iterator[tuple[int | None, int | None]]:
    """Yield the storages that the same call takes or returns in both steps."""
    for call, counterpart in zip(plain.calls, packed.calls, strict=True):
        yield from zip(call, counterpart, strict=True)
    for key, call in plain.again.items():
        yield from zip(call, packed.again.get(key, ()), strict=False)


def _matched_by_save(plain: StepTrace, packed: StepTrace) -> Iterator[tuple[int | None, int | None]]:
    """Yield what autograd saves for a layer in both steps, also where no call returns it (LSTM's parts)."""
    for layer, saves in plain.saves.items():
        packed_saves = packed.saves.get(layer, [])
        if [form for _, form in saves] == [form for _, form in packed_saves]:
            yield from zip(
                (number for number, _ in saves), (number for number, _ in packed_saves), strict=True
            )
