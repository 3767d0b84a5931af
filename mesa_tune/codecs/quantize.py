"""Quantization to 1 to 8 bits by groups: ActNN (arXiv 2104.14129), section 4; Mesa (2111.11124)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mesa_tune import ops
from mesa_tune.codecs.spec import Memory, Spec
from mesa_tune.maps import KINDS, Mapped

_QUANTIZE = torch.ops.mesa_tune.quantize.default
_QUANTIZE_MAP = torch.ops.mesa_tune.quantize_map.default
_DEQUANTIZE = torch.ops.mesa_tune.dequantize.default


def encode(x: Tensor, spec: Spec, key: Tensor, memory: Memory | None = None) -> list[Tensor]:
    """Packed levels (uint8) and the range of every group (float32, `[groups, 2]`)."""
    data, ranges = _QUANTIZE(
        x, spec.bits, spec.levels, spec.group_size, spec.quant_groups, spec.stochastic, key
    )
    return [data, ranges]


def encode_mapped(mapped: Mapped, spec: Spec, key: Tensor) -> list[Tensor]:
    """What `encode` makes of a tensor that is made on the way; groups run along its memory."""
    if spec.quant_groups:
        return encode(mapped.make(), spec, key)
    kind, inner = KINDS[mapped.kind], mapped.inner
    data, ranges = _QUANTIZE_MAP(
        mapped.source,
        kind,
        mapped.mean,
        mapped.rstd,
        inner,
        spec.bits,
        spec.levels,
        spec.group_size,
        spec.stochastic,
        key,
    )
    return [data, ranges]


def decode(parts: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype, spec: Spec) -> Tensor:
    """The tensor whose packed levels and ranges `parts` hold."""
    data, ranges = parts
    result: Tensor = _DEQUANTIZE(
        data, ranges, shape, dtype, spec.bits, spec.levels, spec.group_size, spec.quant_groups
    )
    return result


def packed_bytes(shape: Sequence[int], spec: Spec, element_size: int = 4) -> int:
    """Bytes of packed levels and ranges together."""
    return ops.packed_bytes(shape, spec.bits, spec.group_size or 256, spec.quant_groups or None)
