"""What packing takes under any settings, without packing: bytes of packed tensors, and temporaries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mesa_tune.codecs import CODECS, Spec, codec_of, fitting_size, memory_bytes
from mesa_tune.codecs.drop import has_positions
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

    `samples`: it may leave out rows. `valued`: it may store fixed levels. `channels`: the numbers of
    channels of what it stores; empty: unknown.
    """

    hooked: bool
    small: bool
    row: int
    samples: bool = False
    valued: bool = False
    channels: tuple[int, ...] = ()


def possible(settings: LayerSettings, traits: LayerTraits) -> LayerSettings:
    """Return the settings that such a layer has if it is asked for `settings`."""
    if traits.channels and not any(divides(settings, count) for count in traits.channels):
        return EXACT
    if traits.hooked:
        return settings.hooked
    settings = settings if traits.samples else settings.of_all_rows
    return settings if traits.valued else settings.without_levels


def divides(settings: LayerSettings, channels: int) -> bool:
    """Return whether `quant_groups`, if it is set and takes channels, divides their number."""
    return not settings.quant_groups or settings.drop > 0 or channels % settings.quant_groups == 0


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
    elements: int,
    settings: LayerSettings,
    itemsize: int = 4,
    samples: int = 1,
    width: int = 0,
    channels: int = 0,
) -> int:
    """Return the bytes on the device of a packed tensor whose first dimension has size `samples`.

    What its codec saves from step to step counts, too. `width`: elements per row; 0: no row is left out.
    `channels`: the number that `quant_groups` must divide, else it is stored exactly.
    """
    settings = settings if width else settings.of_all_rows
    spec = Spec.of(settings, 0)
    if spec is None or not divides(settings, channels):
        return elements * itemsize
    shape = _shape(elements, settings, samples, width)
    return CODECS[spec.codec].packed_bytes(shape, spec, itemsize) + memory_bytes(shape, spec)


def _shape(elements: int, settings: LayerSettings, samples: int, width: int) -> tuple[int, int]:
    if settings.rows < 1:
        return elements // width, width
    return (samples, elements // samples) if samples and elements % samples == 0 else (1, elements)


def kept_bytes(
    elements: int, settings: LayerSettings, _: int, samples: int, width: int, channels: int
) -> int:
    """Return those of `settings_bytes` that stay from step to step."""
    spec = Spec.of(settings, 0) if settings.ema_decay and divides(settings, channels) else None
    return 0 if spec is None else memory_bytes(_shape(elements, settings, samples, width), spec)


CASES: Final = ("exact", "packed", "derived", "whole", "dropped", "sampled")
"""The ways to store that are traced: as PyTorch does; in groups of elements; deriving; by a codec that
decodes only whole tensors; dropping a millionth of the elements; leaving out a millionth of the rows."""


@lru_cache(maxsize=1 << 12)
def case_shares(settings: LayerSettings, *, derives: bool = False) -> NDArray[np.float64]:
    """Return the share of each of `CASES` in the temporaries of a layer with such settings; they sum to 1.

    `derives`: it derives, or others derive from what it saves. Survivors of `drop` and the rows of `rows` are
    copied before they are quantized: what this adds is proportional to how many there are.
    """
    shares = dict(_shares(settings))
    if derives and not settings.exact:  # what this adds to storing in groups, it adds to all
        shares |= {"packed": shares.get("packed", 0.0) - 1, "derived": 1.0}
    return np.array([shares.get(case, 0.0) for case in CASES])


def mixed(sizes: NDArray[Any], shares: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return for each slot the sum of its sizes in `CASES` times their shares, rounded up.

    `sizes`: [slots, cases]. `shares`: the same, or [cases].
    """
    rounding = 1e-3  # of sums of shares
    return np.asarray(np.ceil((shares * sizes).sum(axis=1) - rounding), dtype=np.int64)


def _shares(settings: LayerSettings) -> dict[str, float]:
    if settings.exact:
        return {"exact": 1.0}
    codec = codec_of(settings)
    if codec == "drop":
        bitmap = 1 / 32 if has_positions(settings.drop) else 0.0  # of a float32 tensor, beside the positions
        copied = 0.0 if settings.store == "exact" else min(1.0, 1 - settings.drop + bitmap)
        return {"whole": 1 - copied, "dropped": copied}
    if codec == "rows":
        return {"packed": 1 - settings.rows, "sampled": settings.rows}
    return {"whole" if codec in ("mixed", "running") or settings.quant_groups else "packed": 1.0}


class PackedSizes:
    """Bytes of several tensors under any settings.

    `tensors`: elements, bytes per element, samples, elements per row, channels.
    """

    def __init__(self, tensors: Sequence[tuple[int, int, int, int, int]]) -> None:
        self.distinct = list(dict.fromkeys(tensors))
        position = {tensor: number for number, tensor in enumerate(self.distinct)}
        self.positions = np.array([position[tensor] for tensor in tensors], dtype=np.int64)
        self.columns: dict[tuple[Any, LayerSettings], NDArray[np.int64]] = {}

    def under(
        self, settings: Sequence[LayerSettings], bytes_of: Callable[..., int] = settings_bytes
    ) -> NDArray[np.int64]:
        """Return the bytes of each kind of tensors under each of `settings`; shape [settings, kinds].

        `positions`: the kind of each tensor. `bytes_of`: or `kept_bytes`.
        """
        return np.stack([self._column(bytes_of, one) for one in settings])

    def _column(self, bytes_of: Callable[..., int], settings: LayerSettings) -> NDArray[np.int64]:
        if (bytes_of, settings) not in self.columns:
            sizes = [bytes_of(size, settings, *form) for size, *form in self.distinct]
            self.columns[bytes_of, settings] = np.array(sizes, dtype=np.int64)
        return self.columns[bytes_of, settings]
