"""What settings cost each layer of a profile: gradient error and time.

What is hard is speed: a search predicts thousands of policies, and the option nearest to settings that were
not measured takes long to find. But policies repeat few settings. So the prices of all layers are computed
once for each settings, and the nearest option once for all layers with the same options.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from mesa_tune.policy.settings import LayerSettings
from mesa_tune.profiler.entries import Derivation, LayerEntry, Tie
from mesa_tune.profiler.memory.packed_sizes import stored_as


class Price(NamedTuple):
    """Gradient error and milliseconds of a layer. `tied_error`: if its whole tie has the same settings."""

    error: float | None
    tied_error: float | None
    ms: float | None


_FREE = Price(0.0, 0.0, 0.0)


class PriceTable:
    """Prices of `layers`, of which hooks store `hooked`, and `exact` can only be stored exactly."""

    def __init__(
        self,
        layers: Sequence[LayerEntry],
        ties: Iterable[Tie],
        hooked: Collection[str],
        exact: Collection[str],
    ) -> None:
        self.hooked, self.exact = frozenset(hooked), frozenset(exact)
        self.tie_of = {name: tie for tie in ties for name in tie.layers}
        self.prices: dict[LayerSettings, dict[str, Price]] = {}
        kinds: dict[object, list[LayerEntry]] = {}
        for layer in layers:
            options = [
                (option.settings, option.gradient_error is None, option.measured) for option in layer.options
            ]
            kinds.setdefault((layer.name in self.hooked, *options), []).append(layer)
        self.kinds = list(kinds.values())

    def under(self, settings: LayerSettings) -> dict[str, Price]:
        """Return the price of each layer under `settings`, by name."""
        if settings not in self.prices:
            prices = (price for layers in self.kinds for price in self._prices(layers, settings))
            self.prices[settings] = dict(prices)
        return self.prices[settings]

    def stored(self, layer: LayerEntry, settings: LayerSettings) -> LayerSettings:
        """Return the settings for what the layer stores: one stored by hooks has 256 levels at least."""
        return stored_as(settings.hooked if layer.name in self.hooked else settings)

    def _prices(self, layers: Sequence[LayerEntry], settings: LayerSettings) -> Iterator[tuple[str, Price]]:
        """Yield name and price of each of `layers`, which are of one kind."""
        stored = self.stored(layers[0], settings)
        position = layers[0].nearest(stored)
        for layer in layers:
            yield layer.name, _FREE if settings.exact else self._price(layer, stored, position)

    def _price(self, layer: LayerEntry, stored: LayerSettings, position: int | None) -> Price:
        """Return the price of what the layer stores; `position`: of the nearest option."""
        name, lossless = layer.name, stored.exact or stored.store == "offload"
        error = 0.0 if lossless else layer.error_at(position, stored)
        ms = layer.ms_at(position)
        if name in self.exact:
            error, ms = error or 0.0, 0.0
        tie = self.tie_of.get(name)
        tied_error = error if error is None or tie is None else error * tie.ratio(position)
        return Price(error, tied_error, ms)

    def of_derivation(self, derivation: Derivation, layer: LayerEntry, settings: LayerSettings) -> Price:
        """Return the price of `layer`, the first of `derivation`, while the takers derive."""
        error = 0.0 if settings.store == "offload" else derivation.error(stored_as(settings))
        stays = layer.name in self.exact
        return Price(error, error, 0.0 if stays else derivation.ms(self.stored(layer, settings)))
