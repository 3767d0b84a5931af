"""Two traces of one step, plain and packed: what in them is the same, and whose the saved bytes are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from math import prod

from mesa_tune.errors import RunError
from mesa_tune.policy.settings import MIN_ELEMENTS
from mesa_tune.profiler.entries import NO_FORMULA, OUTSIDE, ExactEntry, TensorEntry
from mesa_tune.profiler.step_trace import PlainTrace, StepTrace


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
    plain, twins = pair.plain, twins_of(pair.plain, pair.packed)
    stay = staying(pair, twins)
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


def is_held(plain: StepTrace, number: int) -> bool:
    """Whether the storage is there when the forward has ended though autograd was not asked to save it."""
    return plain.is_saved(number) and number not in plain.plain and number != plain.loss


def staying(pair: TracedPair, twins: Mapping[int, int]) -> set[int]:
    """Storages that are kept as they are whether their layers compress or not: a norm's statistics, and what
    a checkpoint holds for the layers of its part.
    """
    plain, side = pair.plain, pair.packed.side
    kept = [(twin, item) for number, item in plain.plain.items() if (twin := twins.get(number))]
    stay = {twin for twin, item in kept if side.get(twin) in item.layers or pair.packed.stays(twin)}
    return stay | {twin for number, twin in twins.items() if twin in side and is_held(plain, number)}


def sources_of(pair: TracedPair) -> dict[int, tuple[str, ...]]:
    """Of packed tensors that the deriving step makes again: the layers whose kept tensors that takes."""
    derived = pair.derived.derived
    return {number: derived[place] for place, number in pair.packed.places.items() if place in derived}


def twins_of(plain: StepTrace, packed: StepTrace) -> dict[int, int]:
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
