"""What settings cost the layers of a profile: gradient error and time.

What is hard is speed: a search predicts thousands of policies, and the option nearest to settings that were
not measured takes long to find. But policies repeat few settings. So the prices of all layers are one array
for each settings, made once, and the nearest option is found once for all layers with the same options. A
price has all that depends on the settings of one layer. Only what depends on several layers, whether those
that share a tensor share its copy, is left to each prediction.
"""

from __future__ import annotations

import math
import operator
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mesa_tune.policy.settings import EXACT, LayerSettings
from mesa_tune.profiles.entries import Derivation, HasOptions, LayerEntry, Tie
from mesa_tune.profiles.intervals import Ratios, interaction_of
from mesa_tune.profiles.timeline.distinct import Assignment, DistinctSettings, Incidence
from mesa_tune.profiles.timeline.packed_sizes import LayerTraits, possible, stored_as
from mesa_tune.profiles.timeline.sized_timeline import StepBytes

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

_COLUMNS, _MS = 4, -3
"""Columns of an option or a price after its noise ratios by batch. NaN: unknown.

Of an option: gradient error; milliseconds; milliseconds of encoding; ratio of its tie. Of a price: gradient
error; milliseconds that the layer adds; further milliseconds if it encodes a copy of its own of what the
first of its tie encodes otherwise; the weight of `interaction_of`.
"""
FEW = 0.05
"""The share of layers, by time, with which most of what the first ones add beyond their prices is reached."""
_ALONE, _TIED = 0, 1
"""Whether all layers of the layer's tie have the same settings."""


class Cost(NamedTuple):
    """What layers cost together; None: unknown.

    `ratios`: the sums of noise ratios, by batch; `error`: the sum of gradient errors. `interaction`: what
    joint rounding at few bits adds to the mean ratio. `ms`: milliseconds that they add to a step of the
    converted model. `root`: the sum of √w over the weights w of `interaction_of`, from which the interaction
    with other layers follows.
    """

    ratios: Ratios | None
    error: float | None
    interaction: float
    ms: float | None
    root: float = 0.0

    @property
    def ratio(self) -> float | None:
        """Mean of the sums over the batches."""
        return None if self.ratios is None else statistics.fmean(self.ratios)

    def plus(self, other: Cost) -> Cost:
        """Return the sum of both; what is unknown of one is unknown of the sum."""
        known = self.ratios is not None and other.ratios is not None
        ratios = tuple(map(operator.add, self.ratios or (), other.ratios or ())) if known else None
        error = None if self.error is None or other.error is None else self.error + other.error
        ms = None if self.ms is None or other.ms is None else self.ms + other.ms
        return Cost(ratios, error, self.interaction + other.interaction, ms, self.root + other.root)


@dataclass(frozen=True)
class ActiveDerivations:
    """Positions of the derivations that happen; `free`: layers that add no error and no time then."""

    positions: Sequence[int]
    free: frozenset[str]


NO_DERIVATIONS = ActiveDerivations((), frozenset())


class DerivationTable:
    """The derivations of a profile whose timeline has the layers `names`: which of them happen in a step."""

    def __init__(self, derivations: Sequence[Derivation], names: Sequence[str]) -> None:
        self.derivations = derivations
        self.sources = Incidence([derivation.sources for derivation in derivations], names)
        self.takers = Incidence([derivation.takers for derivation in derivations], names)
        self.stored = frozenset(name for derivation in derivations for name in derivation.layers)

    def active(self, step: StepBytes) -> ActiveDerivations:
        """Return the derivations of which all sources compress and all takers derive."""
        if not self.derivations or not step.asks.any():
            return NO_DERIVATIONS
        active = ~(self.sources.any(~step.used) | self.takers.any(~step.asks))
        positions = np.flatnonzero(active).tolist()
        happening = [self.derivations[position] for position in positions]
        takers = {name for derivation in happening for name in derivation.takers} & step.derivers
        sharers = {name for derivation in happening for name in derivation.layers[1:]}
        return ActiveDerivations(positions, frozenset(sharers | (takers - self.stored)))


class PriceTable:
    """Prices of `layers`: hooks store `hooked`, `exact` can only be stored exactly.

    `samplers` may leave out rows, and `valued` may store fixed levels. `skipped` add no time: the timed step
    does not run them.

    `interaction`: see `interaction_of`. `overlap_ms`: milliseconds that two halves of the layers add to steps
    of their own beyond what all layers add to one. `prices` has the shape [settings, 2, rows, batches + 4].
    It has a row for each layer, and one for each derivation: the price of its first layer while the takers
    derive.
    """

    def __init__(
        self,
        layers: Sequence[LayerEntry],
        ties: Sequence[Tie],
        derivations: Sequence[Derivation],
        hooked: Collection[str],
        exact: Collection[str],
        interaction: Mapping[int, float],
        overlap_ms: float = 0.0,
        samplers: Collection[str] = (),
        valued: Collection[str] = (),
        skipped: Collection[str] = (),
    ) -> None:
        self.interaction, self.overlap_ms = interaction, overlap_ms
        self.names = [layer.name for layer in layers]
        self.position = {name: number for number, name in enumerate(self.names)}
        on_all = [row for row in layers if row.name not in skipped]
        self.batches = min(filter(None, map(_batches, [*on_all, *derivations])), default=1)
        self.tie_of_sharer = np.repeat(np.arange(len(ties)), [len(tie.layers) for tie in ties])
        self.sharers = _ints(self.position[name] for tie in ties for name in tie.layers)
        self.unit = np.arange(len(layers))
        self.unit[self.sharers] = _ints(self.position[tie.layers[0]] for tie in ties for _ in tie.layers)
        # The layer of each row.
        self.layer = _ints([*range(len(layers)), *(self.position[row.layers[0]] for row in derivations)])
        self.runs = np.array([layer.name not in skipped for layer in layers])[self.layer]
        self.call_ms = np.array([layer.call_ms for layer in layers], dtype=np.float64)[self.layer]
        weights = np.maximum(0.0, np.nan_to_num(self.call_ms[: len(layers)]))
        self.shares = weights / max(1e-9, weights.sum())
        self.call_ms[len(layers) :] += [derivation.call_ms for derivation in derivations]
        of_layer = {name: tie for tie in ties for name in tie.layers}
        rows: list[tuple[HasOptions, Tie]] = [(layer, of_layer.get(layer.name, _NO_TIE)) for layer in layers]
        rows += [(derivation, _NO_TIE) for derivation in derivations]
        self.kinds = self._kinds(rows, tuple(map(frozenset, (hooked, exact, samplers, valued))))
        self.numbers = {EXACT: 0}
        self.prices = np.zeros((1, 2, len(rows), self.batches + _COLUMNS))

    def _kinds(
        self, rows: Sequence[tuple[HasOptions, Tie]], flagged: Sequence[Collection[str]]
    ) -> list[_Kind]:
        alike: dict[tuple[tuple[bool, ...], tuple[tuple[LayerSettings, bool], ...]], list[int]] = {}
        for number, ((row, _), layer) in enumerate(zip(rows, self.layer.tolist(), strict=True)):
            options = tuple([(option.settings, bool(option.ratios)) for option in row.options])
            flags = tuple([self.names[layer] in names for names in flagged])
            alike.setdefault((flags, options), []).append(number)
        return [
            _Kind.of([rows[number] for number in numbers], numbers, self.batches, flags)
            for (flags, _), numbers in alike.items()
        ]

    def cost(
        self, layers: Iterable[LayerEntry] | None, assignment: Assignment, active: ActiveDerivations
    ) -> Cost:
        """Return what `layers` (None: all) cost under `assignment`; `active`: derivations under it."""
        chosen = slice(None) if layers is None else _ints(self.position[layer.name] for layer in layers)
        numbers = self._numbers(assignment)
        prices = self._priced(numbers, active)[chosen]
        ms = float(prices[:, _MS:-1].sum()) + (self._overlap(numbers) if layers is None else 0.0)
        *ratios, error = prices[:, : 1 - _COLUMNS].sum(0).tolist()
        known = not math.isnan(ratios[0])
        weights = np.bincount(self.unit[chosen], weights=prices[:, -1]) if known else np.zeros(0)
        return Cost(
            tuple(ratios) if known else None,
            error if known else None,
            interaction_of(weights),
            None if math.isnan(ms) else ms,
            float(np.sqrt(weights).sum()),
        )

    def by_layer(self, assignment: Assignment, active: ActiveDerivations) -> Floats:
        """Return the mean noise ratio of each layer under `assignment`; NaN: unknown."""
        ratios: Floats = self._priced(self._numbers(assignment), active)[:, :-_COLUMNS].mean(-1)
        return ratios

    def mean_ratio(self, settings: LayerSettings) -> float:
        """Return the mean noise ratio of all layers that err and can have `settings`; 0 if none does."""
        ratios = self.by_layer(dict.fromkeys(self.names, settings), NO_DERIVATIONS)
        rows = [kind.rows for kind in self.kinds if kind.used(settings) == settings]
        can = np.concatenate([_ints(()), *rows])
        known = ratios[can[can < len(ratios)]]
        known = known[known > 0]
        return float(known.mean()) if known.size else 0.0

    def _priced(self, numbers: Ints, active: ActiveDerivations) -> Floats:
        """Return the prices of all layers, by the numbers of their settings; shape [layers, batches + 4]."""
        tied, copying = self._shared(numbers)
        rows = np.arange(len(self.names))
        derived = len(rows) + _ints(active.positions)
        rows[self.layer[derived]] = derived
        prices = self.prices[numbers, tied, rows]
        prices[~copying, -2] = 0.0
        free = [position for name in active.free if numbers[position := self.position[name]]]
        prices[free] = 0.0
        prices[free, _MS] = self.call_ms[free]
        return prices

    def _overlap(self, numbers: Ints) -> float:
        """Return what layers with the settings of these numbers add beyond the sum of their prices.

        The first layers that compress add more than the last: their code has left the caches. Prices add up
        to what all layers add, and a half of them adds half of `overlap_ms` more than half of that. What is
        added beyond prices rises within the first few layers (on a digits ViT and a GPT-2, a tenth of the
        layers added no less than a half), and then falls in proportion. So sums of prices, which a solver
        minimizes, are never above what is predicted.
        """
        share = float(self.shares[numbers > 0].sum())
        return self.overlap_ms * (1 - share) * (1 - math.exp(-share / FEW))

    def error(self, name: str, settings: LayerSettings) -> float | None:
        """Return the gradient error of one layer that compresses; None if unknown."""
        number = self._number(settings)  # may make `prices` anew
        error = float(self.prices[number, _ALONE, self.position[name], -_COLUMNS])
        return None if math.isnan(error) else error

    def _numbers(self, assignment: Assignment) -> Ints:
        """Return the number of the settings of each layer."""
        distinct = DistinctSettings.of(assignment, self.names)
        return _ints(map(self._number, distinct.values))[distinct.positions]

    def _number(self, settings: LayerSettings) -> int:
        """Return the number of `settings` in `prices`, to which they are added if they are new."""
        if settings.exact:
            return 0
        if settings not in self.numbers:
            number = self.numbers[settings] = len(self.numbers)
            if number == len(self.prices):
                self.prices = np.concatenate([self.prices, np.zeros_like(self.prices)])
            self.prices[number] = self._under(settings)
        return self.numbers[settings]

    def _under(self, settings: LayerSettings) -> Floats:
        """Return the prices under `settings`; shape [2, rows, batches + 4]."""
        prices = np.empty(self.prices.shape[1:])
        for kind in self.kinds:
            prices[:, kind.rows] = kind.under(settings, self.interaction)
        first = self.unit[self.layer]
        prices[:, :, -2] = np.where(first == self.layer, 0.0, prices[:, first, -2])
        prices[:, :, _MS] += self.call_ms
        prices[:, ~self.runs, _MS:-1] = 0.0
        return prices

    def _shared(self, numbers: Ints) -> tuple[Ints, Flags]:
        """Return 1 for layers of ties with equal settings throughout, and which layers encode a copy.

        The noises of the former are not independent. Prices of the latter include no encoding (Rule 3).
        """
        tied, copying = np.zeros_like(numbers), np.zeros(len(numbers), dtype=np.bool_)
        pairs = self.tie_of_sharer * len(self.numbers) + numbers[self.sharers]
        _, first = np.unique(pairs, return_index=True)  # of each copy that a tie needs, its first layer
        copies = np.bincount(self.tie_of_sharer[first])
        tied[self.sharers] = copies[self.tie_of_sharer] == 1
        copying[self.sharers[first]] = True
        return tied, copying


@dataclass(frozen=True)
class _Kind:
    """Rows with the same options.

    `rows`: their numbers. `example`: one of them. `options`: values of the options of each row, shape
    [rows, options + 1, batches + 4]; the last option is unknown.
    """

    rows: Ints
    example: HasOptions
    options: Floats
    hooked: bool
    exact: bool
    samples: bool
    valued: bool

    @staticmethod
    def of(
        rows: Sequence[tuple[HasOptions, Tie]], numbers: Sequence[int], batches: int, flags: tuple[bool, ...]
    ) -> _Kind:
        """Return the kind of `rows`, each with its tie; `flags`: whether hooked, exact, sampling, valued."""
        example = rows[0][0]
        values = np.full((len(rows), len(example.options) + 1, batches + _COLUMNS), np.nan)
        for target, (row, tie) in zip(values, rows, strict=True):
            for position, option in enumerate(row.complete):
                if ratios := option.price_ratios:
                    known = ratios[:batches] if len(ratios) >= batches else statistics.fmean(ratios)
                    target[position, :-_COLUMNS] = known if any(ratios) else 0.0
                    target[position, -_COLUMNS] = option.gradient_error
                target[position, _MS:] = option.ms, option.encode_ms, tie.ratio(position)
        return _Kind(_ints(numbers), example, values, *flags)

    def used(self, settings: LayerSettings) -> LayerSettings:
        """Return the settings that take effect."""
        return possible(settings, LayerTraits(self.hooked, False, 0, self.samples, self.valued))

    def under(self, settings: LayerSettings, interaction: Mapping[int, float]) -> Floats:
        """Return the prices of the rows under `settings`; shape [2, rows, batches + 4]."""
        stored = stored_as(self.used(settings))
        position = self.example.nearest(stored)
        values = np.stack([self.options[:, -1 if position is None else position]] * 2)
        errors, joint = values[:, :, : 1 - _COLUMNS], values[0, :, -1].copy()
        if self.exact or stored.exact or stored.store == "offload":
            errors[:] = 0.0
        elif position is not None:
            errors *= self.example.options[position].scale(stored)
            errors[_TIED] *= joint[:, None]
        if self.exact:
            values[:, :, _MS] = 0.0
        values[:, :, -1] = interaction.get(stored.bits, 0.0) * values[:, :, :-_COLUMNS].mean(-1)
        return values


_NO_TIE = Tie(())


def _batches(row: HasOptions) -> int:
    """Return on how many batches a layer was priced; 0 if it has no error under any option."""
    if not any(any(option.ratios) for option in row.options):
        return 0
    return max(len(option.price_ratios) for option in row.options)


def _ints(values: Iterable[int]) -> Ints:
    return np.fromiter(values, dtype=np.int64)
