"""Prices as they become in training: never below a floor, and corrected by what was read of parameters.

Before training some layers hardly feel rounding: a GELU of inputs near zero, a loss of equal probabilities.
They look free, and later they are not. (On a small GPT-2 the noise ratio of GELU's tanh at 1 bit grows
1,400-fold in 800 steps, that of linear layers does not double.) So no layer counts as less sensitive than the
mean of all layers stored alike. The plan for 40 % of that model's peak then has a ratio of at most 0.014 in
training in place of 0.12, that of a small Llama 0.011 in place of 0.69 (`benchmarks/early_plans.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar

import numpy as np

from mesa_tune.profiles.entries import Derivation, LayerEntry, Option
from mesa_tune.profiles.other_entries import ModuleEntry
from mesa_tune.profiles.own_noise import FEW_SHARE, Floats, OwnNoise, Shares
from mesa_tune.profiles.profile import Profile
from mesa_tune.profiles.timeline.packed_sizes import stored_as

Entry = TypeVar("Entry", LayerEntry, ModuleEntry)


def with_floor(profile: Profile) -> Profile:
    """Return the profile in which no option has a lower noise ratio than the mean of layers stored alike.

    Where the ratio is unknown, prices stay as they are.
    """
    if profile.own_noise is None or not profile.own_noise.is_known:
        return profile
    mean = cache(profile.mean_ratio)

    def option(one: Option) -> Option:
        ratio, alike = one.noise_ratio, replace(stored_as(one.settings), tile=1)
        return one.times(max(1.0, mean(alike) / ratio)) if ratio else one

    def entry(one: Any) -> Any:
        return replace(one, options=tuple(map(option, one.options)))

    return _changed(profile, entry, entry)


def _changed(
    profile: Profile, entry: Callable[[Any], Any], derivation: Callable[[Derivation], Derivation]
) -> Profile:
    """Return the profile with other prices of layers and modules, and of what layers derive from."""
    tiled = profile.tiled
    return replace(
        profile,
        layers=tuple(map(entry, profile.layers)),
        modules=tuple(map(entry, profile.modules)),
        tiled=tiled and replace(tiled, modules=tuple(map(entry, tiled.modules))),
        derivations=tuple(map(derivation, profile.derivations)),
    )


def read_over_predicted(noise: OwnNoise, predicted: Floats, read: Floats) -> Floats:
    """Return by how much to correct the own ratio of each part.

    `predicted`, `read`: own ratios of the parts under the policy that was read. A part with less than 1 % of
    either ratio is known badly: its factor is that of the whole ratio. The factor of another part is halfway,
    in logarithms, between this one and its own.
    """
    before, after = noise.shares * predicted, noise.shares * read
    whole = after.sum() / before.sum()
    small = (before < FEW_SHARE * before.sum()) | (after < FEW_SHARE * after.sum())
    own = np.divide(after, before, out=np.full_like(before, whole), where=~small)
    factors: Floats = np.sqrt(own * whole)
    return factors


def corrected(profile: Profile, factors: Mapping[str, float]) -> Profile:
    """Return the profile with the noise ratios of a model whose own ratios are `factors` times as large.

    `factors`: by the name of the part; 1 for others.
    """
    noise = profile.own_noise
    if noise is None or not factors:
        return profile
    values = np.array([factors.get(one.name, 1.0) for one in noise.parameters])
    correction = _Correction(noise, values)
    of_layer = {layer.name: layer.shares for layer in profile.layers}

    def derivation(one: Derivation) -> Derivation:
        return replace(one, options=correction.options(one.options, of_layer[one.layers[0]]))

    return _changed(profile, correction.of, derivation)


@dataclass(frozen=True)
class _Correction:
    """`values`: the factor of each part's own ratio."""

    noise: OwnNoise
    values: Floats

    def of(self, entry: Entry) -> Entry:
        """Return a layer or module with corrected options, and the shares that parts then have."""
        factor = self._factor(entry.shares)
        shares = tuple([(part, share * float(self.values[part]) / factor) for part, share in entry.shares])
        return replace(entry, options=self.options(entry.options, entry.shares), shares=shares)

    def options(self, options: Sequence[Option], shares: Shares) -> tuple[Option, ...]:
        """Return the options of a noise ratio that parts bear by `shares`."""
        factor = self._factor(shares)
        return tuple([option.times(factor) for option in options])

    def _factor(self, shares: Shares) -> float:
        """Return how much a ratio grows; parts that bear less than 1 % of it grow by the mean factor."""
        borne = [(part, share * float(self.noise.shares[part])) for part, share in shares]
        left = max(0.0, 1 - sum(share for _, share in borne))
        mean = float(self.noise.shares @ self.values)
        return sum(share * float(self.values[part]) for part, share in borne) + left * mean
