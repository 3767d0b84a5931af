"""Amplifications of changes of input gradients: measured on some batches, inferred on the others.

What is hard: measuring one costs up to a whole backward, and on a deep model that was most of a profile's
time. Amplifications vary less than errors do (over six batches of small models, the standard deviation of
their logarithms is 0.12 to 0.31), but a part of this belongs to the batch and is common to all layers (0.04
to 0.22). Without that part, intervals would be too narrow. So the batch that screens measures all layers,
each later one a few of them, however deep the model is, and the others take their mean of the earlier
batches, times what the measured ones show of this batch. Those of 1 bit are measured once at most, for the
same few layers; the others take theirs of more bits, times what the measured ones show of 1 bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mesa_tune.profiles.own_noise import Floats, Rows

Amplified = tuple[str, Any]
"""A layer, and what all options have in common to which its amplification applies."""

LAYERS = 4
"""The first batch measures the amplifications of all groups of layers, each later one of so many or more."""
_PRIOR = 4
"""A factor is averaged with so many ones, because the first few ratios say little."""


class Amplifications:
    """The amplifications that were measured, by batch."""

    def __init__(self, rows: Rows = ()) -> None:
        self.measured: dict[Amplified, dict[int, Floats]] = {
            (layer, (kind, one_bit)): {batch: np.array(pair) for batch, pair in values}
            for layer, kind, one_bit, values in rows
        }

    @property
    def rows(self) -> Rows:
        """Plain values, from which an interrupted profile goes on."""
        return tuple(
            [
                (layer, *common, tuple([(batch, tuple(pair.tolist())) for batch, pair in values.items()]))
                for (layer, common), values in self.measured.items()
            ]
        )

    def add(self, batch: int, values: Mapping[Amplified, Floats]) -> None:
        """Add what was measured on `batch`."""
        for key, value in values.items():
            self.measured.setdefault(key, {})[batch] = value

    def inferred(self, batch: int, layers: Iterable[str], *, due: bool = False) -> dict[Amplified, Floats]:
        """Return the amplifications of `layers` on `batch` that follow from what earlier batches measured.

        `due`: they are to be measured on this batch. Then only measured ones of 1 bit are returned.
        """
        factor, wanted = self._factor(batch), set(layers)
        known = {
            key: factor * np.mean(earlier, axis=0)
            for key, values in self.measured.items()
            if key[0] in wanted and (earlier := _before(batch, values))
        }
        if due:
            return {key: value for key, value in known.items() if key[1][1]}
        one_bit = self._one_bit()
        return {(layer, (kind, True)): one_bit * value for (layer, (kind, _)), value in known.items()} | known

    def at(self, batch: int) -> dict[Amplified, Floats]:
        """Return all amplifications on `batch`, measured or inferred."""
        measured = {key: values[batch] for key, values in self.measured.items() if batch in values}
        return self.inferred(batch, (layer for layer, _ in self.measured)) | measured

    def _factor(self, batch: int) -> float:
        """Return how much larger the amplifications measured on `batch` are than on the earlier ones."""
        return _factor(
            (values[batch], np.mean(earlier, axis=0))
            for values in self.measured.values()
            if batch in values and (earlier := _before(batch, values))
        )

    def _one_bit(self) -> float:
        """Return how much larger the amplifications of 1 bit are than those of more bits."""
        return _factor(
            (value, self.measured[layer, (kind, False)].get(batch, np.zeros(2)))
            for (layer, (kind, one_bit)), values in self.measured.items()
            if one_bit and (layer, (kind, False)) in self.measured
            for batch, value in values.items()
        )


def _factor(pairs: Iterable[tuple[Floats, Floats]]) -> float:
    """Return the mean ratio of the first to the second of each pair, drawn to one where pairs are few.

    That of errors beside own noise, for both errors: what is common to all layers belongs to the batch.
    """
    factors = [float(value[1] / mean[1]) for value, mean in pairs if mean[1] > 0]
    return (_PRIOR + sum(factors)) / (_PRIOR + len(factors))


def _before(batch: int, values: Mapping[int, Floats]) -> Sequence[Floats]:
    return [value for number, value in values.items() if number < batch]


def is_measured(batch: int, group: int, count: int) -> bool:
    """Return whether the amplifications of this one of `count` groups of layers are measured on `batch`."""
    return batch == 0 or (batch + group) % max(1, count // LAYERS) == 0
