"""`Spec`, a layer's settings as a flat, hashable tuple for traced code, and `Codec`, the codecs' protocol."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from mesa_tune.notice import warn_once
from mesa_tune.policy.settings import HOOKED_LEVELS, LayerSettings

STATEFUL = {"running", "mixed"}
"""Codecs that need a memory from step to step."""


class Codebook(NamedTuple):
    """Fixed values of a tensor's elements, ascending, and the boundaries between them."""

    boundaries: tuple[float, ...]
    values: tuple[float, ...]


class Spec(NamedTuple):
    """How one layer stores the tensors it saves. `levels` 0 stores them exactly (the profiler's exact run).

    `derive`: do not store a tensor that can be rematerialized from what other layers save. `exposes`: other
    layers may rematerialize this layer's output. `exact`: store elements in full precision. `tile`: number of
    slices in which a loss goes backward. `feeds_tiled`: a tiled loss may go backward past the layer's output.
    `rows`: fraction of rows that are stored. `axis`: the axis along which the elements of a row lie, counted
    from the end, where the backward is linear in the saved tensors; 0: it is not, or this is unknown.
    `row`: a group never crosses the end of a row of so many elements (0: groups ignore rows). `codebook`: the
    values that elements of the saved tensor may have (`store: levels`).
    """

    codec: str
    bits: int
    levels: int
    group_size: int
    quant_groups: int
    stochastic: bool
    min_elements: int
    drop: float = 0.0
    ema_decay: float = 0.0
    exact: bool = False
    derive: bool = False
    exposes: bool = False
    tile: int = 1
    feeds_tiled: bool = False
    rows: float = 1.0
    axis: int = 0
    row: int = 0
    codebook: Codebook | None = None

    @property
    def alone(self) -> "Spec":
        """The spec without the fields about other layers; layers share a copy where this is equal."""
        axis = self.axis if self.rows < 1 else 0
        return self._replace(derive=False, exposes=False, tile=1, feeds_tiled=False, axis=axis, row=0)

    @staticmethod
    def plain(min_elements: int, tile: int = 1) -> "Spec":
        """Return the spec of a layer that saves what PyTorch saves, but runs our formula."""
        return Spec("quantize", 8, 0, 256, 0, True, min_elements, tile=tile)

    @staticmethod
    def of(settings: LayerSettings, min_elements: int) -> "Spec | None":
        """Return the spec of `settings`; None if the layer saves what PyTorch saves."""
        if settings.exact:
            return None
        if settings.store == "exact" and not settings.omits:
            return Spec.plain(min_elements, settings.tile)
        if keys := overruled(settings):
            warn_once(f"mesa-tune: {', '.join(keys)} has no effect in the settings `{settings.label}`.")
        return Spec(
            codec_of(settings),
            settings.bits,
            settings.level,
            settings.group_size or 0,
            settings.quant_groups or 0,
            settings.rounding == "stochastic",
            min_elements,
            settings.drop,
            settings.ema_decay,
            settings.store in ("exact", "offload"),
            settings.store == "derive",
            tile=settings.tile,
            rows=settings.rows,
        )

    def within(self, row: int) -> "Spec":
        """Return this spec with groups that divide rows of `row` elements; `quant_groups` stays.

        `_replace` cannot be traced, so this calls the constructor.
        """
        size = fitting_size(self.group_size, row)
        return Spec(*self[:3], size, *self[4:-2], row, self.codebook)  # type: ignore[arg-type] # `_replace` cannot be traced

    def along(self, axis: int) -> "Spec":
        """Return this spec for a function whose saved rows lie along `axis`; 0: it stores all rows."""
        if axis == self.axis and (axis or self.rows == 1):
            return self
        if self.rows < 1 and not axis:
            return self._of_all_rows()
        return Spec(*self[:-3], axis, self.row, self.codebook)  # `_replace` cannot be traced

    def valued(self, codebook: Codebook | None) -> "Spec":
        """Return this spec for a function whose saved tensor has this codebook; None: it is quantized."""
        if self.codec != "levels":
            return self
        return Spec("quantize" if codebook is None else "levels", *self[1:-1], codebook)

    def _of_all_rows(self) -> "Spec":
        if self.exact:
            return Spec.plain(self.min_elements, self.tile)
        return Spec("quantize", *self[1:-4], 1.0, 0, self.row)

    @property
    def hooked(self) -> "Spec | None":
        """This spec for a layer stored by hooks, as in `LayerSettings.hooked`; None: saved as by PyTorch."""
        if self.exact:
            return self if self.codec == "offload" else None
        return self._replace(
            codec="quantize",
            bits=8,
            levels=HOOKED_LEVELS,
            drop=0.0,
            ema_decay=0.0,
            rows=1.0,
            codebook=None,
        )


def fitting_size(size: int, row: int) -> int:
    """Return the largest group size of at most `size` that divides `row`; `size` itself if either is 0."""
    if size == 0 or row % size == 0:
        return size
    return max(divisor for divisor in range(1, min(size, row) + 1) if row % divisor == 0)


def codec_of(settings: LayerSettings) -> str:
    """Return the name in `CODECS` of the codec that `settings` choose.

    If they ask for several codecs, the first in the order of this function is used; `Spec.of` warns about the
    others.
    """
    if settings.store not in ("quantize", "exact", "derive", "recompute"):
        return settings.store
    if settings.drop:
        return "drop"
    if settings.rows < 1:
        return "rows"
    if settings.allocation == "sample":
        return "mixed"
    return "running" if settings.ema_decay else "quantize"


def overruled(settings: LayerSettings) -> list[str]:
    """Return the keys of `settings` that have no effect because others choose the codec."""
    requested = {"offload": settings.store == "offload", "drop": settings.drop > 0}
    requested |= {"mixed": settings.allocation == "sample", "running": settings.ema_decay > 0}
    keys = {"drop": "drop", "mixed": "allocation", "running": "ema_decay"}
    return [keys[codec] for codec, wanted in requested.items() if wanted and codec != codec_of(settings)]


Memory = dict[str, Tensor]
"""A codec's state for one saved tensor of one layer from step to step (as in running ranges); eager only."""


class Codec(Protocol):
    """A way to store a tensor. Modules of this package implement it with plain functions."""

    def encode(self, x: Tensor, spec: Spec, key: Tensor, memory: Memory | None = None) -> list[Tensor]:
        """Return the packed parts of `x` (any shape); their number depends only on its shape and dtype.

        `key`: an int64 tensor, the seed of rounding noise. `memory`: this saved tensor's own, updated in
        place; None where no state is possible.
        """
        ...

    def decode(self, parts: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype, spec: Spec) -> Tensor:
        """Return the decoded tensor of `shape` and `dtype`, an approximation of the encoded one."""
        ...

    # Three optional functions: `refuses(tensor, spec)`, why a tensor cannot be stored, instead of the
    # quantizer's reasons; `memory_bytes(shape, spec)`, the size of the memory for one tensor; and
    # `encode_deferred(deferred, spec, key)`, for tensors computed while they are encoded (`ops/maps.py`).

    def packed_bytes(self, shape: Sequence[int], spec: Spec, element_size: int = 4) -> int:
        """Return the device bytes of all packed parts of a tensor of `element_size` bytes per element."""
        ...
