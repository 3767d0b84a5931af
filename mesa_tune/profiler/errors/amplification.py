"""Amplifications of changes of input gradients: measured on some batches, inferred on the others.

What is hard: measuring one costs up to a whole backward, and on a deep model that was most of a profile's
time. Amplifications vary less than errors do (over six batches of small models, the standard deviation of
their logarithms is 0.12 to 0.31), but a part of this belongs to the batch and is common to all layers (0.04
to 0.22). Without that part, intervals would be too narrow. So the batch that screens measures all layers,
each later one a third of them, and the others take their mean of the earlier batches, times what the measured
ones show of this batch. Those of 1 bit are measured on one batch.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Amplified = tuple[str, Any]
"""A layer, and what all options have in common to which its amplification applies."""

Rows = tuple[tuple[Any, ...], ...]
"""Amplifications as plain values: layer, kind and 1 bit (see `Sensitivity`), pairs of batch and value."""

EVERY = 3
"""The first batch measures all amplifications, and each later one those of one group of layers in so many."""
_PRIOR = 4
"""The factor of a batch is averaged with so many ones, because the first few say little."""


class Amplifications:
    """The amplifications that were measured, by batch."""

    def __init__(self, rows: Rows = ()) -> None:
        self.measured: dict[Amplified, dict[int, float]] = {
            (layer, (kind, one_bit)): dict(values) for layer, kind, one_bit, values in rows
        }

    @property
    def rows(self) -> Rows:
        """Plain values, from which an interrupted profile goes on."""
        return tuple(
            [(layer, *common, tuple(values.items())) for (layer, common), values in self.measured.items()]
        )

    def add(self, batch: int, values: Mapping[Amplified, float]) -> None:
        """Add what was measured on `batch`."""
        for key, value in values.items():
            self.measured.setdefault(key, {})[batch] = value

    def inferred(
        self, batch: int, layers: Iterable[str], *, one_bit_only: bool = False
    ) -> dict[Amplified, float]:
        """Return the amplifications of `layers` on `batch`, as far as earlier batches measured them."""
        factor, wanted = self._factor(batch), set(layers)
        return {
            key: factor * statistics.fmean(earlier)
            for key, values in self.measured.items()
            if key[0] in wanted and (earlier := _before(batch, values))
            if key[1][1] or not one_bit_only
        }

    def at(self, batch: int) -> dict[Amplified, float]:
        """Return all amplifications on `batch`, measured or inferred."""
        measured = {key: values[batch] for key, values in self.measured.items() if batch in values}
        return self.inferred(batch, (layer for layer, _ in self.measured)) | measured

    def _factor(self, batch: int) -> float:
        """Return how much larger the amplifications measured on `batch` are than on the earlier ones."""
        means = [
            (values[batch], statistics.fmean(earlier))
            for values in self.measured.values()
            if batch in values and (earlier := _before(batch, values))
        ]
        factors = [value / mean for value, mean in means if mean > 0]
        return (_PRIOR + sum(factors)) / (_PRIOR + len(factors))


def _before(batch: int, values: Mapping[int, float]) -> Sequence[float]:
    return [value for number, value in values.items() if number < batch]


def is_measured(batch: int, group: int) -> bool:
    """Return whether the amplifications of the group of layers with this number are measured on `batch`."""
    return batch == 0 or (batch + group) % EVERY == 0


def rows_from(values: Iterable[Sequence[Any]]) -> Rows:
    """Return the rows that are `values` in JSON. Raise TypeError or ValueError for others."""
    return tuple(
        (
            str(layer),
            tuple(kind) if isinstance(kind, list) else kind,
            bool(one_bit),
            tuple((int(batch), float(value)) for batch, value in pairs),
        )
        for layer, kind, one_bit, pairs in values
    )
