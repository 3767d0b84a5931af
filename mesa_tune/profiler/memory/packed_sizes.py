"""Bytes of packed tensors under any settings, without packing them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mesa_tune.codecs import CODECS, Spec, fitting_size, memory_bytes
from mesa_tune.policy.settings import EXACT, LayerSettings


@lru_cache(maxsize=1 << 12)
def stored_as(settings: LayerSettings) -> LayerSettings:
    """Return the settings for what a layer cannot derive, and for the inputs of a module that runs again."""
    return replace(settings, store="quantize") if settings.store in ("derive", "recompute") else settings


@lru_cache(maxsize=1 << 12)
def within(settings: LayerSettings, row: int) -> LayerSettings:
    """Return the settings of a layer whose groups end where rows of `row` elements end; 0: they do not."""
    if settings.group_size is None or not row:
        return settings
    return replace(settings, group_size=fitting_size(settings.group_size, row))


_SAME = {EXACT: EXACT}


class LayerTraits(NamedTuple):
    """What changes a layer's settings: stored by hooks, all calls too small, elements per row of groups.

    `samples`: it may leave out rows. `valued`: it may store fixed levels.
    """

    hooked: bool
    small: bool
    row: int
    samples: bool = False
    valued: bool = False


def possible(settings: LayerSettings, traits: LayerTraits) -> LayerSettings:
    """Return the settings that such a layer has if it is asked for `settings`."""
    if traits.hooked:
        return settings.hooked
    settings = settings if traits.samples else settings.of_all_rows
    return settings if traits.valued else settings.without_levels


@lru_cache(maxsize=1 << 14)
def in_effect(settings: LayerSettings, traits: LayerTraits) -> LayerSettings:
    """Return the settings in which such a layer stores what it cannot derive; EXACT if exactly.

    Equal settings are the same object.
    """
    used = possible(settings, traits)
    stored = EXACT if traits.small or used.exact else within(stored_as(used), traits.row)
    return _SAME.setdefault(stored, stored)


@lru_cache(maxsize=1 << 16)
def settings_bytes(
    elements: int, settings: LayerSettings, itemsize: int = 4, samples: int = 1, width: int = 0
) -> int:
    """Return the bytes on the device of a packed tensor whose first dimension has size `samples`.

    What its codec saves from step to step counts, too. `width`: elements per row; 0: no row is left out.
    """
    settings = settings if width else settings.of_all_rows
    spec = Spec.of(settings, 0)
    if spec is None:
        return elements * itemsize
    shape = (samples, elements // samples) if samples and elements % samples == 0 else (1, elements)
    shape = (elements // width, width) if settings.rows < 1 else shape
    return CODECS[spec.codec].packed_bytes(shape, spec, itemsize) + memory_bytes(shape, spec)


class PackedSizes:
    """Bytes of several tensors under any settings.

    `tensors`: elements, bytes per element, samples, elements per row.
    """

    def __init__(self, tensors: Sequence[tuple[int, int, int, int]]) -> None:
        self.distinct = list(dict.fromkeys(tensors))
        position = {tensor: number for number, tensor in enumerate(self.distinct)}
        self.positions = np.array([position[tensor] for tensor in tensors], dtype=np.int64)
        self.columns: dict[LayerSettings, NDArray[np.int64]] = {}

    def under(self, settings: Sequence[LayerSettings]) -> NDArray[np.int64]:
        """Return the bytes of each kind of tensors under each of `settings`; shape [settings, kinds].

        `positions`: the kind of each tensor.
        """
        return np.stack([self._column(one) for one in settings])

    def _column(self, settings: LayerSettings) -> NDArray[np.int64]:
        if settings not in self.columns:
            sizes = [settings_bytes(size, settings, *form) for size, *form in self.distinct]
            self.columns[settings] = np.array(sizes, dtype=np.int64)
        return self.columns[settings]
