"""Correct the prices of a profile by what was read of the model's parameters later in its training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from mesa_tune.profiler.entries import LayerEntry, Option
from mesa_tune.profiler.errors.noise import FEW_SHARE, OwnNoise, Shares
from mesa_tune.profiler.errors.recorded import Floats
from mesa_tune.profiler.profile import Profile
from mesa_tune.profiler.rerun_modules.entry import ModuleEntry

Entry = TypeVar("Entry", LayerEntry, ModuleEntry)


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
    tiled, of_layer = profile.tiled, {layer.name: layer.shares for layer in profile.layers}
    return replace(
        profile,
        layers=tuple(map(correction.of, profile.layers)),
        modules=tuple(map(correction.of, profile.modules)),
        tiled=tiled and replace(tiled, modules=tuple(map(correction.of, tiled.modules))),
        derivations=tuple(
            [
                replace(entry, options=correction.options(entry.options, of_layer[entry.layers[0]]))
                for entry in profile.derivations
            ]
        ),
    )


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
