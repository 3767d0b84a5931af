"""Gradient error of `store: derive`: layers whose saved tensors are computed again from packed ones.

A consumer's noise is then its producer's: one rounded tensor reaches the producer's own backward and, through
γ x̂ + β or f(x), those of all layers that derive from it. So a price belongs to what is *stored*, and counts
all backwards that it reaches.

Such a price is in proportion to the sum of the layers' own errors (measured on a digits ViT: from batch to
batch the standard deviation of the ratio is 12 % of it, where errors vary by 45 %). So one batch measures
the ratio.

What is hard: the exact, recorded step does not show from which saved tensors each output can be derived.
A second step that does derive shows it, by layer, call and position.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from mesa_tune.codecs import Spec
from mesa_tune.engine.observer import Observer, Replay
from mesa_tune.engine.rematerialize import Recipe, rebuilt, take
from mesa_tune.engine.storage import Packing, as_is
from mesa_tune.measure.errors.recorded import CopyCache, Draw, RecordedCall, now
from mesa_tune.measure.memory.step_trace import CallKey, TensorKey
from mesa_tune.measure.memory.trace import CallCounter
from mesa_tune.policy.settings import MIN_ELEMENTS
from mesa_tune.profiles.entries import Option
from mesa_tune.profiles.intervals import Ratios, error_at


def continued(option: Option, own: Sequence[Ratios]) -> Option:
    """Return an option of a derivation, whose errors are known on the first batches, with those on all.

    `own`: noise ratios of the layers that it reaches, each without the others, on all batches.
    """
    known, sums = option.ratios, list(map(sum, zip(*own, strict=True)))
    first, others = sums[: len(known)], sums[len(known) :]
    if not sum(first):
        return replace(option, ratios=(*known, *[statistics.fmean(known)] * len(others)))
    factor = sum(known) / sum(first)
    ratios = (*known, *(factor * ratio for ratio in others))
    error = error_at(statistics.fmean(ratios), option.gradient_error, statistics.fmean(known))
    return replace(option, ratios=ratios, gradient_error=error)


class DerivedTensor(NamedTuple):
    """A derived tensor: its recipe, and the inputs of the recipe (packed ones by key, others as they are)."""

    recipe: Recipe
    inputs: tuple[TensorKey | Tensor, ...]

    def value(self, read: Callable[[TensorKey], Tensor]) -> Tensor:
        """Return the tensor, computed from the saved tensors that `read` returns."""
        tensors = [item if isinstance(item, Tensor) else read(item) for item in self.inputs]
        return rebuilt(self.recipe, tensors)

    @property
    def source_keys(self) -> list[TensorKey]:
        """The saved tensors among the inputs."""
        return [item for item in self.inputs if not isinstance(item, Tensor)]


class DerivationObserver(Observer):
    """Observer of a step that derives: finds the derived tensors, and from which saved ones they come."""

    def __init__(self) -> None:
        self.saving_calls = CallCounter()
        self.packed: dict[int, tuple[TensorKey, Tensor]] = {}
        self.derived: dict[TensorKey, DerivedTensor] = {}

    def stored(
        self,
        layer: str,
        lossy: tuple[Any, ...],
        how: tuple[Packing | Recipe, ...],
        parts: tuple[list[Tensor], ...],
        exact: list[Tensor],
        row: int,
        valued: bool = False,
    ) -> None:
        for key, packing, stored in zip(self.saving_calls.keys(layer, len(how)), how, parts, strict=True):
            if isinstance(packing, Recipe):
                derived = DerivedTensor(_over_exact(packing), tuple(self._inputs(packing, list(stored))))
                self.derived.update({key: derived} if derived.source_keys else {})
            elif packing.packed:
                # Referenced: a checkpoint frees what its part saves, and the address could be used again.
                self.packed.setdefault(stored[0].data_ptr(), (key, stored[0]))

    def _inputs(self, recipe: Recipe, tensors: list[Tensor]) -> Iterator[TensorKey | Tensor]:
        """Yield for each input of the recipe, in order, the key of a packed tensor or the tensor itself."""
        for source in recipe.saved:
            parts = take(tensors, source.parts)
            if isinstance(source, Recipe):
                yield from self._inputs(source, parts)
            else:
                yield self.packed[parts[0].data_ptr()][0] if source.packed else parts[0]
        yield from take(tensors, recipe.exact + sum(recipe.references))
        for below in recipe.inputs:
            yield from self._inputs(below, take(tensors, below.parts))


def _over_exact(recipe: Recipe) -> Recipe:
    """Return the recipe for saved tensors that are not packed."""
    return recipe._replace(
        saved=tuple(
            _over_exact(source) if isinstance(source, Recipe) else as_is(source.shape, source.dtype)
            for source in recipe.saved
        ),
        inputs=tuple(_over_exact(source) for source in recipe.inputs),
    )


@dataclass(frozen=True)
class Reach:
    """The layers that one rounding reaches: `layers` (sharers) store, `takers` derive from `sources`."""

    layers: tuple[str, ...]
    takers: tuple[str, ...]
    sources: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """All layers whose backward the rounding reaches."""
        return tuple(dict.fromkeys((*self.layers, *self.takers)))


class DerivableStep:
    """A recorded exact step whose producers save what others derive from, and what can be derived."""

    def __init__(
        self, replays: Mapping[str, Sequence[Replay]], derived: Mapping[TensorKey, DerivedTensor]
    ) -> None:
        self.replays = {
            name: sorted(calls, key=lambda call: int(call.node._sequence_nr()))  # in the order of the forward
            for name, calls in replays.items()
        }
        self.derived = {key: tensor for key, tensor in derived.items() if self._is_derivable(key, tensor)}

    def reaches(self, groups: Iterable[tuple[str, ...]]) -> Iterator[Reach]:
        """Yield the groups of sharers that store something and derive, or store what others derive from."""
        for group in groups:
            takers = dict.fromkeys(
                key[0]
                for key, tensor in self.derived.items()
                if key[0] in group or any(source[0] in group for source in tensor.source_keys)
            )
            if takers and any(self._stores(layer) for layer in group):
                recipes = [tensor.recipe for key, tensor in self.derived.items() if key[0] in takers]
                sources = dict.fromkeys(name for recipe in recipes for name in recipe.layers())
                yield Reach(group, tuple(takers), tuple(sources))

    def calls(self, reach: Reach) -> list[RecordedCall]:
        """Return the backwards that the rounding of what `reach.layers` store reaches."""
        calls = [
            _DerivingCall(self, replay, (name, index), frozenset(reach.layers))
            for name in reach.names
            for index, replay in enumerate(self.replays.get(name, []))
        ]
        return [call for call in calls if any(call.coded)]

    def exact(self, key: TensorKey) -> Tensor:
        """Return a saved tensor, exact."""
        layer, index, position = key
        return self.replays[layer][index].lossy[position]

    def _is_derivable(self, key: TensorKey, derived: DerivedTensor) -> bool:
        """Return False for small tensors, those that the producer saves, and where the two steps differ."""
        try:
            exact, inputs = self.exact(key), [self.exact(source) for source in derived.source_keys]
        except (KeyError, IndexError):
            return False
        is_input = any(tensor.data_ptr() == exact.data_ptr() for tensor in inputs)
        return exact.numel() > MIN_ELEMENTS and not is_input and tuple(exact.shape) == derived.recipe.view[0]

    def _stores(self, layer: str) -> bool:
        return any(
            not exact and tensor.numel() > MIN_ELEMENTS and (layer, index, position) not in self.derived
            for index, replay in enumerate(self.replays.get(layer, []))
            for position, (exact, tensor) in enumerate(zip(replay.exact_inputs, replay.lossy, strict=True))
        )


class _DerivingCall(RecordedCall):
    """The backward of one call some of whose saved tensors are derived."""

    def __init__(
        self, step: DerivableStep, replay: Replay, call: CallKey, stored_layers: frozenset[str]
    ) -> None:
        self.step, self.stored_layers = step, stored_layers
        self.derived = {key[2]: tensor for key, tensor in step.derived.items() if key[:2] == call}
        coded = [
            any(source[0] in stored_layers for source in self.derived[position].source_keys)
            if position in self.derived
            else call[0] in stored_layers and not exact and tensor.numel() > MIN_ELEMENTS
            for position, (exact, tensor) in enumerate(zip(replay.exact_inputs, replay.lossy, strict=True))
        ]
        super().__init__(replay, coded)

    def _store_at(
        self, position: int, spec: Spec, seed: Tensor, cache: CopyCache, draw: Draw
    ) -> tuple[float, float]:
        if position not in self.derived:
            return super()._store_at(position, spec, seed, cache, draw)

        def read(key: TensorKey) -> Tensor:
            exact = self.step.exact(key)
            if key[0] not in self.stored_layers or exact.numel() <= MIN_ELEMENTS:
                return exact
            row = self.step.replays[key[0]][key[1]].row
            return cache.copy(exact, spec.within(row), seed).tensor

        start = now(self.replay.lossy[position])
        self.lossy[position] = self.derived[position].value(read)
        draw.decode_ms += 1e3 * (now(self.lossy[position]) - start)
        return 0.0, 0.0
