"""What `store: derive` does to the gradient: layers that compute with outputs made again from packed tensors.

A consumer's noise is then its producer's: one rounded tensor reaches the producer's own backward and, through
γ x̂ + β or f(x), those of all that derive from it. So a price belongs to what is *stored*, and counts all
backwards that it reaches. What is hard is to find, in the exact recorded step, of which kept tensors each
output can be made: a step that really derives tells it, by layer, call and place.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from mesa_tune.codecs import Spec
from mesa_tune.engine.observer import Replay
from mesa_tune.engine.rematerialize import Recipe, rebuilt, take
from mesa_tune.engine.storage import Packing, as_is
from mesa_tune.policy.settings import MIN_ELEMENTS
from mesa_tune.profiler.recorded import Cache, Draw, RecordedCall, cached_copy
from mesa_tune.profiler.step_trace import Place
from mesa_tune.profiler.trace import Turns


class Made(NamedTuple):
    """A kept tensor that is made again: its recipe, from kept tensors (by place) and others, as they are."""

    recipe: Recipe
    leaves: tuple[Place | Tensor, ...]

    def value(self, read: Callable[[Place], Tensor]) -> Tensor:
        """The tensor, of the kept ones that `read` gives."""
        tensors = [leaf if isinstance(leaf, Tensor) else read(leaf) for leaf in self.leaves]
        return rebuilt(self.recipe, tensors)

    @property
    def places(self) -> list[Place]:
        """The kept tensors that it takes."""
        return [leaf for leaf in self.leaves if not isinstance(leaf, Tensor)]


class Links:
    """Observer of a step that derives: which kept tensors are made again, and of what."""

    wants_tensors = False

    def __init__(self) -> None:
        self.turns = Turns()
        self.known: dict[int, tuple[Place, Tensor]] = {}
        self.made: dict[Place, Made] = {}

    def begin(self, layer: str | None, given: Any) -> None: ...

    def end(self, layer: str | None, output: Any) -> None: ...

    def asked(self, layer: str, tensors: Sequence[Tensor | None]) -> None: ...

    def saved(self, layer: str, tensor: Tensor) -> None: ...

    def backward(self, replay: Replay) -> None: ...

    def unpacked(self, layer: str, tensor: Tensor) -> Tensor:
        return tensor

    def stored(
        self,
        layer: str,
        lossy: tuple[Any, ...],
        how: tuple[Packing | Recipe, ...],
        parts: tuple[list[Tensor], ...],
        exact: list[Tensor],
        row: int,
    ) -> None:
        for place, packing, stored in zip(self.turns.places(layer, len(how)), how, parts, strict=True):
            if isinstance(packing, Recipe):
                leaves = tuple(self._leaves(packing, list(stored)))
                if any(not isinstance(leaf, Tensor) for leaf in leaves):
                    self.made[place] = Made(_over_raw(packing), leaves)
            elif packing.packed:
                # Held, as a checkpoint drops what its part saves: an address must not be another's later.
                self.known.setdefault(stored[0].data_ptr(), (place, stored[0]))

    def _leaves(self, recipe: Recipe, tensors: list[Tensor]) -> Iterator[Place | Tensor]:
        """For each tensor that the recipe takes, in its order: the place of a packed one, or itself."""
        for each in recipe.saved:
            parts = take(tensors, each.parts)
            if isinstance(each, Recipe):
                yield from self._leaves(each, parts)
            else:
                yield self.known[parts[0].data_ptr()][0] if each.packed else parts[0]
        yield from take(tensors, recipe.exact + sum(recipe.references))
        for below in recipe.inputs:
            yield from self._leaves(below, take(tensors, below.parts))


def _over_raw(recipe: Recipe) -> Recipe:
    """The recipe over kept tensors that are not packed."""
    return recipe._replace(
        saved=tuple(
            _over_raw(how) if isinstance(how, Recipe) else as_is(how.shape, how.dtype) for how in recipe.saved
        ),
        inputs=tuple(_over_raw(each) for each in recipe.inputs),
    )


@dataclass(frozen=True)
class Reach:
    """What is stored by `layers` (a group of sharers) while `takers` derive; `sources`: from whom they do."""

    layers: tuple[str, ...]
    takers: tuple[str, ...]
    sources: tuple[str, ...]


class Derivable:
    """A recorded exact step whose producers keep what they keep for others, and what can be made of that."""

    def __init__(self, replays: Mapping[str, Sequence[Replay]], made: Mapping[Place, Made]) -> None:
        self.replays = {name: sorted(each, key=_forward_order) for name, each in replays.items()}
        self.made = {place: one for place, one in made.items() if self._is_new(place, one)}

    def reaches(self, groups: Iterable[tuple[str, ...]]) -> Iterator[Reach]:
        """Of all groups of sharers, those that store something which others then derive from, or beside
        what they derive themselves.
        """
        for group in groups:
            found = {place: one for place, one in self.made.items() if self._touches(group, place, one)}
            if found and any(self._stores(layer) for layer in group):
                takers = tuple(dict.fromkeys(place[0] for place in found))
                chains = [one.recipe.layers() for place, one in self.made.items() if place[0] in takers]
                yield Reach(group, takers, tuple(dict.fromkeys(name for chain in chains for name in chain)))

    def calls(self, reach: Reach) -> list[RecordedCall]:
        """The backwards that the rounding of what `reach.layers` store gets into."""
        names = dict.fromkeys((*reach.layers, *reach.takers))
        found = [
            _Linked(self, replay, (name, turn), frozenset(reach.layers))
            for name in names
            for turn, replay in enumerate(self.replays.get(name, []))
        ]
        return [call for call in found if any(call.coded)]

    def raw(self, place: Place) -> Tensor:
        """A kept tensor as it was."""
        layer, turn, number = place
        return self.replays[layer][turn].lossy[number]

    def _is_new(self, place: Place, made: Made) -> bool:
        """False for small tensors, one that its producer keeps itself, and where the steps do not match."""
        try:
            kept, inputs = self.raw(place), [self.raw(leaf) for leaf in made.places]
        except (KeyError, IndexError):
            return False
        same = any(one.data_ptr() == kept.data_ptr() for one in inputs)
        return kept.numel() > MIN_ELEMENTS and not same and tuple(kept.shape) == made.recipe.view[0]

    def _touches(self, group: tuple[str, ...], place: Place, made: Made) -> bool:
        return place[0] in group or any(leaf[0] in group for leaf in made.places)

    def _stores(self, layer: str) -> bool:
        return any(
            not flag and tensor.numel() > MIN_ELEMENTS and (layer, turn, number) not in self.made
            for turn, replay in enumerate(self.replays.get(layer, []))
            for number, (flag, tensor) in enumerate(zip(replay.exact_inputs, replay.lossy, strict=True))
        )


class _Linked(RecordedCall):
    """One call's backward over tensors of which some are made again."""

    def __init__(
        self, step: Derivable, replay: Replay, call: tuple[str, int], stored: frozenset[str]
    ) -> None:
        self.step, self.stored_layers = step, stored
        self.made = {place[2]: one for place, one in step.made.items() if place[:2] == call}
        coded = [
            any(leaf[0] in stored for leaf in self.made[number].places)
            if number in self.made
            else call[0] in stored and not flag and tensor.numel() > MIN_ELEMENTS
            for number, (flag, tensor) in enumerate(zip(replay.exact_inputs, replay.lossy, strict=True))
        ]
        super().__init__(replay, coded)

    def _one(self, place: int, spec: Spec, key: Tensor, cache: Cache, draw: Draw) -> tuple[float, float]:
        if place not in self.made:
            return super()._one(place, spec, key, cache, draw)

        def read(leaf: Place) -> Tensor:
            layer, turn, number = leaf
            source = self.step.replays[layer][turn]
            raw = source.lossy[number]
            if layer not in self.stored_layers or raw.numel() <= MIN_ELEMENTS:
                return raw
            return cached_copy(raw, spec.within(source.row), key, cache).tensor

        start = time.perf_counter()
        self.lossy[place] = self.made[place].value(read)
        draw.decode_ms += 1e3 * (time.perf_counter() - start)
        return 0.0, 0.0


def _forward_order(replay: Replay) -> int:
    return int(replay.node._sequence_nr())
