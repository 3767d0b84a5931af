"""Times of encoding and decoding without what other work on the machine did to single ones.

What is hard: an option is timed a few times, for fractions of a millisecond. But the times of layers of the
same tag have the same proportions: that of their elements, and that of the settings.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from mesa_tune.profiles.entries import LayerEntry

Floats = NDArray[np.float64]

POLISHES = 3
"""How often the factors of rows and columns of times are found again."""


def form(layer: LayerEntry) -> Hashable:
    """Return what layers have in common that take equal times."""
    return layer.tag, layer.shape, layer.own_bytes


def means(values: Sequence[float | None], forms: Iterable[Hashable]) -> list[float | None]:
    """Return for each value the mean of those of the same form that are known; None where it is None."""
    pairs = list(zip(values, forms, strict=True))
    known: dict[Hashable, list[float]] = defaultdict(list)
    for value, alike in pairs:
        if value is not None:
            known[alike].append(value)
    return [None if value is None else statistics.fmean(known[alike]) for value, alike in pairs]


def smoothed(layers: Sequence[LayerEntry]) -> list[LayerEntry]:
    """Return the layers with smoother times of encoding and decoding.

    Layers of the same tag take times of the same proportions: that of their elements, and that of the
    settings. Medians find both, and what other work on the machine did to single times is left out.
    """
    by_tag: dict[str, list[LayerEntry]] = defaultdict(list)
    for layer in layers:
        by_tag[layer.tag].append(layer)
    smooth = {layer.name: layer for alike in by_tag.values() for layer in _smoothed(alike)}
    return [smooth[layer.name] for layer in layers]


def _smoothed(alike: Sequence[LayerEntry]) -> Iterator[LayerEntry]:
    settings = dict.fromkeys(option.settings for layer in alike for option in layer.options)
    numbers = {one: number for number, one in enumerate(settings)}
    ms = np.zeros((len(alike), len(numbers), 2))
    for row, layer in zip(ms, alike, strict=True):
        for option in layer.options:
            row[numbers[option.settings]] = option.encode_ms, option.decode_ms
    ms = _proportional(ms.reshape(len(alike), -1)).reshape(ms.shape)
    for row, layer in zip(ms, alike, strict=True):
        options = [(option, row[numbers[option.settings]].tolist()) for option in layer.options]
        yield replace(
            layer,
            options=tuple(
                replace(option, encode_ms=encode, decode_ms=decode) for option, (encode, decode) in options
            ),
        )


def _proportional(ms: Floats) -> Floats:
    """Return the products of a factor for each row and one for each column that are nearest to `ms`.

    What is 0 stays 0. Nearest: in the medians of rows and of columns, columns weighted by the rows' factors.
    """
    timed = ms > 0
    if not timed.any():
        return ms
    logs = np.where(timed, np.log(np.where(timed, ms, 1.0)), np.nan)
    rows, columns = np.zeros(ms.shape[0]), np.zeros(ms.shape[1])
    for _ in range(POLISHES):
        rows = np.array([np.nanmedian(row - columns) if (~np.isnan(row)).any() else 0.0 for row in logs])
        columns = np.array([_median(column - rows, np.exp(rows)) for column in logs.T])
    return np.where(timed, np.exp(rows[:, None] + columns), 0.0)


def _median(values: Floats, weights: Floats) -> float:
    """Return the weighted median of the values that are not NaN; 0 if there is none."""
    timed = ~np.isnan(values)
    if not timed.any():
        return 0.0
    order = np.argsort(values[timed])
    total = np.cumsum(weights[timed][order])
    return float(values[timed][order][np.searchsorted(total, total[-1] / 2)])
