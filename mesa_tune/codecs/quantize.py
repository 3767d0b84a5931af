"""Quantization to 1 to 8 bits by groups: ActNN (arXiv 2104.14129), section 4; Mesa (2111.11124).

A group's range is two numbers of 32 bits. Where the tensor has 16, so have its least and greatest elements:
these two are then stored instead, and nothing is lost but half of the ranges' bytes.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mesa_tune.codecs.spec import Memory, Spec
from mesa_tune.ops import reference
from mesa_tune.ops.fused import QUANTIZE_MAP, Fused
from mesa_tune.ops.maps import KINDS, Deferred, are_single

LARGEST_GROUP = 4096
"""The largest group that kernels take which decode some rows at a time."""

_QUANTIZE = torch.ops.mesa_tune.quantize.default
_DEQUANTIZE_OUT = torch.ops.mesa_tune.dequantize_out.default
_DEQUANTIZE = torch.ops.mesa_tune.dequantize.default


def encode(x: Tensor, spec: Spec, key: Tensor, memory: Memory | None = None) -> list[Tensor]:
    """Packed levels (uint8) and each group's range: float32 `[groups, 2]`; its ends where x has 16 bits."""
    parts = in_single(x, spec, key)
    if x.element_size() == 2:
        parts[1] = _ends(parts[1], spec.levels, x.dtype)
    return parts


def in_single(x: Tensor, spec: Spec, key: Tensor) -> list[Tensor]:
    """Packed levels and each group's range in float32, whatever the dtype of x."""
    data, ranges = _QUANTIZE(
        x, spec.bits, spec.levels, spec.group_size, spec.quant_groups, spec.stochastic, key
    )
    return [data, ranges]


def encode_deferred(deferred: Deferred, spec: Spec, key: Tensor) -> list[Tensor]:
    """Return what `encode` makes of a deferred tensor; groups run along its memory."""
    if spec.quant_groups or not deferred.is_dense:
        return encode(deferred.made(), spec, key)
    data, ranges = QUANTIZE_MAP(
        deferred.source,
        KINDS[deferred.kind],
        deferred.mean,
        deferred.rstd,
        deferred.inner,
        spec.bits,
        spec.levels,
        spec.group_size,
        spec.stochastic,
        key,
    )
    return [data, ranges]


def decode(parts: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype, spec: Spec) -> Tensor:
    """The tensor whose packed levels and ranges `parts` hold."""
    data, ranges = parts[0], _between(parts[1], spec.levels)
    sizes = (spec.bits, spec.levels, spec.group_size, spec.quant_groups)
    if torch.compiler.is_compiling():
        result: Tensor = _DEQUANTIZE(data, ranges, shape, dtype, *sizes)
        return result
    # Handing a list of sizes to an op of ours takes longer than this.
    out = data.new_empty(shape, dtype=dtype)
    _DEQUANTIZE_OUT(data, ranges, *sizes, out)
    return out


def fused(op: Fused, parts: Sequence[Tensor], arguments: Sequence[Any], spec: Spec) -> Any:
    """Return `op` of the packed parts and these arguments; None where they are not of a kind that it takes:
    float32, groups of elements, and what the op itself asks.
    """
    data, ranges = parts
    tensors = [argument for argument in (ranges, *arguments) if isinstance(argument, Tensor)]
    floating = [tensor for tensor in tensors if tensor.is_floating_point()]
    if spec.quant_groups or not are_single(*floating):
        return None
    if not op.everywhere and not (data.is_cpu and spec.group_size <= LARGEST_GROUP):
        return None
    return op(data, ranges, *arguments, spec.bits, spec.levels, spec.group_size)


def decode_run(parts: Sequence[Tensor], first: int, count: int, spec: Spec, out: Tensor) -> None:
    """Elements `[first, first + count)` into `out`; they begin with a group, and end with one or with all."""
    data, ranges = parts
    size = spec.group_size
    begin, end = first // size, (first + count + size - 1) // size
    width = spec.bits * reference.plane_bytes(size)
    own = _between(ranges[begin:end], spec.levels)
    _DEQUANTIZE_OUT(data[begin * width : end * width], own, spec.bits, spec.levels, size, 0, out)


def _ends(ranges: Tensor, levels: int, dtype: torch.dtype) -> Tensor:
    """The values of the lowest and the highest level, `[groups, 2]`.

    Steps were rounded up, and values between an element and the next number of its dtype become the element.
    Groups with gaps have the highest first; and -Inf after it where it is the lowest, too.
    """
    if _is_none(ranges.isnan()):
        return _values_of_ends(ranges, levels - 1, dtype)
    gaps = reference.have_gaps(ranges)
    ends = _values_of_ends(reference.revealed(ranges), levels - 1 - gaps.to(ranges.dtype), dtype)
    other = torch.where(ends[:, :1] < ends[:, 1:], ends[:, :1], -math.inf)
    return torch.where(gaps, torch.cat([ends[:, 1:], other], 1), ends)


def _values_of_ends(ranges: Tensor, top: int | Tensor, dtype: torch.dtype) -> Tensor:
    factor, base, step = reference.unpack_ranges(ranges)
    high = ((base + top * step) / factor).clamp_max(torch.finfo(dtype).max)
    return torch.cat([ranges[:, :1], high], 1).to(dtype)


def _between(ends: Tensor, levels: int) -> Tensor:
    """The ranges from end to end, as `reference.ranges_of` has them but for the last bit of a step.

    What is in float32 are ranges already.
    """
    if ends.dtype == torch.float32:
        return ends
    first, second = ends.float().unbind(1)
    gaps = first > second
    if _is_none(gaps):
        return _ranges_between(first, second, torch.full_like(first, levels - 1))
    low = torch.where(second.isinf(), first, first.minimum(second))
    ranges = _ranges_between(low, first.maximum(second), levels - 1 - gaps.to(first.dtype))
    return torch.where(gaps[:, None], reference.with_gaps(ranges, levels), ranges)


def _ranges_between(low: Tensor, high: Tensor, top: Tensor) -> Tensor:
    """`top`: the highest levels, a tensor, because CUDA divides by a number inexactly."""
    quarter = high * reference.QUARTER - low * reference.QUARTER
    span = torch.where(quarter > reference.WIDE, -quarter, high - low)
    return torch.stack([low, span / top], 1)


def _is_none(flags: Tensor) -> bool:
    """Whether no flag is set, where that can be told without waiting for a device: it saves the operations
    that groups with gaps take.
    """
    here = flags.is_cpu and type(flags) is Tensor and not torch.compiler.is_compiling()
    return here and not flags.any()


def packed_bytes(shape: Sequence[int], spec: Spec, element_size: int = 4) -> int:
    """Bytes of packed levels and ranges together; ends have `element_size` bytes, 4 at most."""
    numel = math.prod(shape)
    groups = reference.group_count(numel, spec.group_size, spec.quant_groups)
    data = reference.data_bytes(numel, spec.bits, spec.group_size, spec.quant_groups)
    return data + 2 * min(element_size, 4) * groups
