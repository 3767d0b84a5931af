"""Own noise of parameters, beside which errors count, and other values that errors of layers are made of.

What is hard: see `mesa_tune.measure.errors.noise`, which measures it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mesa_tune.files import typed

Floats = NDArray[np.float64]
Pair = tuple[int, int]
"""Number of the batch's draw, and rounding seed."""
Rows = tuple[tuple[Any, ...], ...]
"""Amplifications as plain values: layer, kind and 1 bit (see `Sensitivity`), pairs of batch and values."""
Shares = tuple[tuple[int, float], ...]
"""Positions of parts, and their own noise ratio over the ratio of the whole gradient; see `shares_of`."""

FLOOR = 1e-3
"""Own noise per element counts as at least this share of the mean noise per element."""
FEW_ELEMENTS = 64
"""Parameters of fewer elements are never called the worst: their noise is not known well enough."""
FEW_SHARE = 0.01
NO_NOISE = 1e-6
"""Batches whose gradients vary less than this, relative to ‖g‖², are all the same: float32 rounds it away.

So a part's own noise counts as at least this share of its own ‖g‖²: only without any gradient it has none.
"""


@dataclass(frozen=True)
class ParameterNoise:
    """Own noise of a trained parameter, or of an equal part of one: Σ‖g_b − ḡ‖² / (n − 1) over batches b."""

    name: str
    elements: int
    noise: float

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> ParameterNoise:
        return typed(ParameterNoise, values)


@dataclass(frozen=True)
class OwnNoise:
    """How errors count: `parameters` beside their own noise.

    Where all batches are equal, `parameters` have the squared norms of their gradients instead of noise, and
    `is_known` is False.
    """

    parameters: tuple[ParameterNoise, ...]
    is_known: bool = True

    @cached_property
    def _elements(self) -> Floats:
        return np.array([one.elements for one in self.parameters], dtype=np.float64)

    @cached_property
    def variances(self) -> Floats:
        """Noise of each part, of at least `FLOOR` of the mean per element; infinite where it is zero."""
        noise = np.array([one.noise for one in self.parameters], dtype=np.float64)
        heard = noise > 0
        floor = FLOOR * noise.sum() / max(1.0, self._elements[heard].sum()) * self._elements
        return np.where(heard, np.maximum(noise, floor), np.inf)

    @property
    def notes(self) -> tuple[str, ...]:
        """A note that names the parameters without any noise, if there are some."""
        silent = [one.name for one in self.parameters if not one.noise > 0]
        if not silent:
            return ()
        more = f" and {len(silent) - 1} more" if len(silent) > 1 else ""
        return (
            f"{silent[0]}{more}: the gradient is exactly zero on all batches, so errors in it do not count",
        )

    @cached_property
    def shares(self) -> Floats:
        """How much the own ratio of each part counts in the noise ratio: half by elements, half by count."""
        heard = np.isfinite(self.variances)
        elements = np.where(heard, self._elements, 0.0)
        shares: Floats = (elements / max(1.0, elements.sum()) + heard / max(1, heard.sum())) / 2
        return shares

    @cached_property
    def weights(self) -> Floats:
        """Factors of squared errors: the part's share over its noise."""
        weights: Floats = self.shares / self.variances
        return weights

    def ratio(self, squares: Floats) -> float:
        """Return the noise ratio, the weighted mean of own ratios; `squares`: ‖ĝ − g‖² of each part."""
        return float(self.weights @ squares)

    def own(self, squares: Floats) -> Floats:
        """Return the own ratio of each part."""
        return squares / self.variances

    def worst(self, squares: Floats) -> tuple[str, float] | None:
        """Return the part of `FEW_ELEMENTS` or more with the largest own ratio; None if no noise is known."""
        return self.largest(self.own(squares))

    def largest(self, own: Floats) -> tuple[str, float] | None:
        """Return the part of `FEW_ELEMENTS` or more with the largest of these own ratios; None if unknown."""
        large = np.where((self._elements >= FEW_ELEMENTS) & np.isfinite(self.variances), own, -1.0)
        if not self.is_known or not len(large) or not large.max() >= 0:  # NaN is not, either
            return None
        return self.parameters[int(large.argmax())].name, float(large.max())


def shares_from(values: Iterable[Sequence[Any]]) -> Shares:
    """Return the shares that are `values` in JSON."""
    return tuple([(int(part), float(share)) for part, share in values])


def summed(rows: Iterable[tuple[Shares, float]], count: int) -> Floats:
    """Return the own ratio of each of `count` parts, where each row's shares have this noise ratio."""
    own = np.zeros(count)
    for shares, ratio in rows:
        for part, share in shares:
            own[part] += share * ratio
    return own


def shares_of(own: OwnNoise, squares: Floats) -> Shares:
    """Return the own ratio of each part where a change of the gradient has the noise ratio 1.

    `squares`: of a change, by part. Parts that bear less than `FEW_SHARE` of the ratio are left out.
    """
    ratio = own.ratio(squares)
    if ratio <= 0:
        return ()
    kept = np.flatnonzero(own.weights * squares >= FEW_SHARE * ratio)
    return tuple(zip(kept.tolist(), (own.own(squares)[kept] / ratio).tolist(), strict=True))


class GradientError(NamedTuple):
    """Error of one gradient: ‖ĝ − g‖² / ‖g‖², and beside the parameters' own noise (NaN: not measured)."""

    error: float
    ratio: float


@dataclass(frozen=True, slots=True)
class AtCheckpoint:
    """Gradient error of a policy, and the noise of the batches, with the weights of a checkpoint.

    `checkpoint`: the path of its file; `gradient_noise`: variance of the gradient from batch to batch over
    ‖g‖², see `Noise`; `gradient_noise_ratio`: beside the parameters' own noise there, None if all batches are
    the same.
    """

    checkpoint: str
    gradient_error: float
    gradient_noise: float
    gradient_noise_ratio: float | None


def rows_from(values: Iterable[Sequence[Any]]) -> Rows:
    """Return the rows that are `values` in JSON. Raise TypeError or ValueError for others."""
    return tuple(
        (
            str(layer),
            tuple(kind) if isinstance(kind, list) else kind,
            bool(one_bit),
            tuple((int(batch), tuple(map(float, values))) for batch, values in pairs),
        )
        for layer, kind, one_bit, pairs in values
    )
