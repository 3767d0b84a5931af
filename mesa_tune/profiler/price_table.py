"""What settings cost the layers of a profile: gradient error and time.

What is hard is speed: a search predicts thousands of policies, and the option nearest to settings that were
not measured takes long to find. But policies repeat few settings. So the prices of all layers are computed
once for each settings, and the nearest option once for all layers with the same options. A price has all
that depends on the settings of one layer. Only what depends on several layers, whether those that share a
tensor share its copy, is left to each prediction.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mesa_tune.policy.settings import LayerSettings
from mesa_tune.profiler.entries import Derivation, HasOptions, LayerEntry, Tie
from mesa_tune.profiler.errors.intervals import Errors, interaction_of
from mesa_tune.profiler.memory.distinct import Assignment
from mesa_tune.profiler.memory.packed_sizes import stored_as


class Cost(NamedTuple):
    """What layers cost together; None: unknown.

    `errors`: the sums of gradient errors, by batch. `interaction`: what joint rounding at few bits adds to
    their mean. `ms`: milliseconds that they add to a step of the converted model.
    """

    errors: Errors | None
    interaction: float
    ms: float | None

    @property
    def error(self) -> float | None:
        """Mean of the sums over the batches."""
        return None if self.errors is None else statistics.fmean(self.errors)


class Price(NamedTuple):
    """Gradient errors by batch of a layer that compresses, and the milliseconds that it adds. None: unknown.

    `copy_ms`: further time if it encodes a copy of its own of what the first of its tie encodes otherwise.
    `weight`: see `interaction_of`.
    """

    errors: Errors | None
    ms: float | None
    copy_ms: float | None
    weight: float


class _Nearest(NamedTuple):
    """The settings for what a layer stores, and the position of the option nearest to them."""

    stored: LayerSettings
    position: int | None


@dataclass(eq=False)
class Prices:
    """Prices of all layers under the same settings, by name.

    `tied`: if all layers of a tie have them. `derived`: while others derive, by the id of the derivation.
    """

    settings: LayerSettings
    alone: dict[str, Price] = field(default_factory=dict)
    tied: dict[str, Price] = field(default_factory=dict)
    derived: dict[int, Price] = field(default_factory=dict)


@dataclass(frozen=True)
class ActiveDerivations:
    """Derivations that happen, by the first of their layers; `free`: layers that add no error and no time."""

    by_layer: Mapping[str, Derivation]
    free: frozenset[str]


NO_DERIVATIONS = ActiveDerivations({}, frozenset())


class PriceTable:
    """Prices of `layers`, of which hooks store `hooked`, and `exact` can only be stored exactly.

    `interaction`: see `interaction_of`.
    """

    def __init__(
        self,
        layers: Sequence[LayerEntry],
        ties: Sequence[Tie],
        derivations: Sequence[Derivation],
        hooked: Collection[str],
        exact: Collection[str],
        interaction: Mapping[int, float],
    ) -> None:
        self.hooked, self.exact, self.interaction = frozenset(hooked), frozenset(exact), interaction
        self.ties, self.tie_of = ties, {name: tie for tie in ties for name in tie.layers}
        self.layers = {layer.name: layer for layer in layers}
        self.units = {name: name for name in self.layers}
        self.units |= {name: tie.layers[0] for name, tie in self.tie_of.items()}
        self.batches = min(filter(None, map(_batches, [*layers, *derivations])), default=1)
        self.prices: dict[LayerSettings, Prices] = {}
        kinds: dict[object, list[LayerEntry]] = {}
        for layer in layers:
            options = [(option.settings, bool(option.errors)) for option in layer.options]
            kinds.setdefault((layer.name in self.hooked, *options), []).append(layer)
        self.kinds = list(kinds.values())

    def cost(self, layers: Iterable[LayerEntry], assignment: Assignment, active: ActiveDerivations) -> Cost:
        """Return what `layers` cost under `assignment`; `active`: derivations under it."""
        prices = self._prices_of(assignment)
        tied, copying = self._shared(prices)
        names = [layer.name for layer in layers if layer.name in prices]
        found = {name: (prices[name].tied if name in tied else prices[name].alone)[name] for name in names}
        for name in found.keys() & active.by_layer.keys():
            found[name] = self._of_derivation(active.by_layer[name], self.layers[name], prices[name])
        for name in found.keys() & active.free:
            found[name] = Price(self._aligned(()), self.layers[name].call_ms, 0.0, 0.0)
        times = [price.ms for price in found.values()]
        times += [found[name].copy_ms for name in names if name in copying]
        return Cost(
            self._summed([price.errors for price in found.values()]),
            self._interaction(found) if self.interaction else 0.0,
            _sum(times),
        )

    def _interaction(self, found: Mapping[str, Price]) -> float:
        weights: dict[str, float] = defaultdict(float)
        for name, price in found.items():
            weights[self.units[name]] += price.weight
        return interaction_of(weights.values())

    def under(self, settings: LayerSettings) -> Prices:
        """Return the prices under `settings`, which compress."""
        if settings not in self.prices:
            nearest: dict[str, _Nearest] = {}
            for layers in self.kinds:
                stored = self._stored(layers[0], settings)
                found = _Nearest(stored, layers[0].nearest(stored))
                nearest |= dict.fromkeys((layer.name for layer in layers), found)
            prices = self.prices[settings] = Prices(settings)
            for layer in self.layers.values():
                self._add(prices, layer, nearest)
        return self.prices[settings]

    def _prices_of(self, assignment: Assignment) -> dict[str, Prices]:
        """Return the prices for the settings of each layer that compresses.

        Each settings object is looked up once: hashing settings takes long.
        """
        objects = {id(settings): settings for settings in assignment.values()}
        prices = {key: self.under(settings) for key, settings in objects.items() if not settings.exact}
        return {name: prices[id(settings)] for name, settings in assignment.items() if id(settings) in prices}

    def _shared(self, prices: Mapping[str, Prices]) -> tuple[set[str], set[str]]:
        """Return the layers of ties with equal settings throughout, and those with copies of their own.

        The noises of the former are not independent. Prices of the latter include no encoding (Rule 3).
        """
        tied: set[str] = set()
        copying: set[str] = set()
        for tie in self.ties:
            names, found = tie.layers, [prices.get(name) for name in tie.layers]
            if all(other is found[0] for other in found):
                tied.update(names)
            else:
                copying.update(
                    names[index] for index in range(1, len(names)) if found[index] not in found[:index]
                )
        return tied, copying

    def _stored(self, layer: LayerEntry, settings: LayerSettings) -> LayerSettings:
        """Return the settings for what the layer stores: one stored by hooks has 256 levels at least."""
        return stored_as(settings.hooked if layer.name in self.hooked else settings)

    def _add(self, prices: Prices, layer: LayerEntry, nearest: Mapping[str, _Nearest]) -> None:
        name, (stored, position) = layer.name, nearest[layer.name]
        errors, ms = self._errors(layer, stored, position), layer.ms_at(position)
        if name in self.exact:
            errors, ms = errors or self._aligned(()), 0.0
        ms = _sum((layer.call_ms, ms))
        first = self.units[name]
        copy_ms = 0.0 if name == first else self.layers[first].encode_ms_at(nearest[first].position)
        prices.alone[name] = prices.tied[name] = self._price(errors, ms, copy_ms, stored)
        if errors is not None and name in self.tie_of:
            ratio = self.tie_of[name].ratio(position)
            joint = tuple([ratio * error for error in errors])
            prices.tied[name] = self._price(joint, ms, copy_ms, stored)

    def _of_derivation(self, derivation: Derivation, layer: LayerEntry, prices: Prices) -> Price:
        """Return the price of `layer`, the first of `derivation`, while the takers derive."""
        if id(derivation) not in prices.derived:
            stored = stored_as(prices.settings)
            errors = self._errors(derivation, stored, derivation.nearest(stored))
            ms = 0.0 if layer.name in self.exact else derivation.ms(self._stored(layer, prices.settings))
            copy_ms = prices.alone[layer.name].copy_ms
            prices.derived[id(derivation)] = self._price(errors, _sum((layer.call_ms, ms)), copy_ms, stored)
        return prices.derived[id(derivation)]

    def _price(
        self, errors: Errors | None, ms: float | None, copy_ms: float | None, stored: LayerSettings
    ) -> Price:
        factor = self.interaction.get(stored.bits, 0.0)
        return Price(errors, ms, copy_ms, factor * statistics.fmean(errors) if factor and errors else 0.0)

    def _errors(self, row: HasOptions, stored: LayerSettings, position: int | None) -> Errors | None:
        lossless = stored.exact or stored.store == "offload"
        errors = () if lossless else row.errors_at(position, stored)
        return None if errors is None else self._aligned(errors)

    def _aligned(self, errors: Errors) -> Errors:
        """Return errors, or zeros, on as many batches as all layers have."""
        return errors[: self.batches] if any(errors) else (0.0,) * self.batches

    def _summed(self, errors: Sequence[Errors | None]) -> Errors | None:
        """Return the sums by batch; None if one of the errors is unknown."""
        known = [row for row in errors if row is not None]
        if len(known) < len(errors):
            return None
        return tuple(map(sum, zip(*known, strict=True))) or self._aligned(())


def _batches(row: HasOptions) -> int:
    """Return on how many batches a layer was priced; 0 if it has no error under any option."""
    if not any(any(option.errors) for option in row.options):
        return 0
    return max(len(option.price_errors) for option in row.options)


def _sum(values: Sequence[float | None]) -> float | None:
    """Return the sum; None if a value is unknown."""
    return None if None in values else float(sum(value for value in values if value is not None))
