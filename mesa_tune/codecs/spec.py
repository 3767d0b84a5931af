"""`Spec`: the settings of a layer in the flat, hashable form that traced code carries."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from mesa_tune.notice import warn_once
from mesa_tune.policy.settings import HOOKED_LEVELS, LayerSettings


class Spec(NamedTuple):
    """How one layer stores what it keeps. `levels` 0 keeps the tensor as it is (the profiler's exact run).

    `derive`: what can be made again from what other layers keep is not stored. `exposes`: other layers may
    make this one's output again. `exact`: what is stored is stored as it is. `row`: groups end where
    rows of so many elements do (0: anywhere).
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
    row: int = 0

    @property
    def alone(self) -> "Spec":
        """The same way to store, whatever other layers keep; two layers share a copy by this."""
        if not (self.derive or self.exposes or self.row):
            return self
        return self._replace(derive=False, exposes=False, row=0)

    @staticmethod
    def of(settings: LayerSettings, min_elements: int) -> "Spec | None":
        """The spec of `settings`; None if the layer keeps what PyTorch keeps."""
        if settings.exact:
            return None
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
        )

    def within(self, row: int) -> "Spec":
        """Return this spec with groups that end where rows of `row` elements do; groups by channels or heads
        stay.
        """
        size = fitting_size(self.group_size, row)
        return Spec(*self[:3], size, *self[4:-1], row)  # type: ignore[arg-type] # `_replace` cannot be traced

    @property
    def remembers(self) -> bool:
        """Whether the codec wants a memory from step to step."""
        return self.codec in ("running", "mixed")

    @property
    def hooked(self) -> "Spec | None":
        """This spec for a layer stored by hooks, as `LayerSettings.hooked`; None: as PyTorch stores it."""
        if self.exact:
            return None if self.codec == "drop" else self
        return self._replace(codec="quantize", bits=8, levels=HOOKED_LEVELS, drop=0.0, ema_decay=0.0)


def fitting_size(size: int, row: int) -> int:
    """The largest group of at most `size` elements that divides a row; 0 (no such groups) stays."""
    if size == 0 or row == 0 or row % size == 0:
        return size
    return max(each for each in range(1, min(size, row) + 1) if row % each == 0)


def codec_of(settings: LayerSettings) -> str:
    """The name in `CODECS` of the way in which `settings` store a tensor that has to be stored.

    Of settings that ask for several at once the first here takes effect; `Spec.of` warns of the others.
    """
    if settings.store not in ("quantize", "exact", "derive", "recompute"):
        return settings.store
    if settings.drop:
        return "drop"
    if settings.allocation == "sample":
        return "mixed"
    return "running" if settings.ema_decay else "quantize"


def overruled(settings: LayerSettings) -> list[str]:
    """The keys of `settings` that have no effect beside the others."""
    asked = {"offload": settings.store == "offload", "drop": settings.drop > 0}
    asked |= {"mixed": settings.allocation == "sample", "running": settings.ema_decay > 0}
    keys = {"drop": "drop", "mixed": "allocation", "running": "ema_decay"}
    return [keys[codec] for codec, wanted in asked.items() if wanted and codec != codec_of(settings)]


Memory = dict[str, Tensor]
"""What a codec remembers of one kept tensor of one layer from step to step (running ranges); eager only."""


class Codec(Protocol):
    """A way to store a tensor. Modules of this package implement it with plain functions."""

    def encode(self, x: Tensor, spec: Spec, key: Tensor, memory: Memory | None = None) -> list[Tensor]:
        """The stored parts of `x` (any shape), as many for every tensor of that shape and dtype; `key` is the
        int64 tensor that rounding noise depends on.

        `memory` is this tensor's own, to be changed in place; None where nothing can be remembered.
        """
        ...

    def decode(self, parts: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype, spec: Spec) -> Tensor:
        """A tensor of `shape` and `dtype` near the one that was encoded."""
        ...

    # Three more are for those that need them: `refuses(tensor, spec)`, why a tensor cannot be stored so, in
    # place of the quantizer's reasons; `memory_bytes(shape, spec)`, what it remembers of a tensor; and
    # `encode_deferred(deferred, spec, key)`, for tensors computed while they are encoded (`ops/maps.py`).

    def packed_bytes(self, shape: Sequence[int], spec: Spec, element_size: int = 4) -> int:
        """Bytes on the device of all parts of an encoded tensor, `element_size` bytes an element."""
        ...
