"""`Spec`: the settings of a layer in the flat, hashable form that traced code carries."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from mesa_tune.settings import LayerSettings


class Spec(NamedTuple):
    """How one layer stores what it keeps. `levels` 0 keeps the tensor as it is (the profiler's exact run)."""

    codec: str
    bits: int
    levels: int
    group_size: int
    quant_groups: int
    stochastic: bool
    min_elements: int
    drop: float = 0.0
    ema_decay: float = 0.0
    derive: bool = False

    @staticmethod
    def of(settings: LayerSettings, min_elements: int) -> "Spec | None":
        """The spec of `settings`; None if the layer keeps what PyTorch keeps."""
        if settings.exact:
            return None
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
            settings.store == "derive",
        )


def codec_of(settings: LayerSettings) -> str:
    """The name in `CODECS` of the way in which `settings` store a tensor that has to be stored."""
    return "quantize"


Memory = dict[str, Tensor]
"""What a codec remembers of one kept tensor of one layer from step to step (running ranges); eager only."""


class Codec(Protocol):
    """A way to store a tensor. Modules of this package implement it with plain functions."""

    def encode(self, x: Tensor, spec: Spec, key: Tensor, memory: Memory | None = None) -> list[Tensor]:
        """The stored parts of `x` (any shape); `key` is the int64 tensor that rounding noise depends on.

        `memory` is this tensor's own, to be changed in place; None where nothing can be remembered.
        """
        ...

    def decode(self, parts: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype, spec: Spec) -> Tensor:
        """A tensor of `shape` and `dtype` near the one that was encoded."""
        ...

    def packed_bytes(self, shape: Sequence[int], spec: Spec) -> int:
        """Bytes of all parts of an encoded tensor of `shape`."""
        ...
