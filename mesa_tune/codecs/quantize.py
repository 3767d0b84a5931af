"""Quantization to 1 to 8 bits by groups: ActNN (arXiv 2104.14129), section 4; Mesa (2111.11124).

A group's range is two numbers of 32 bits: its least element and the step between levels. For a tensor of 16
bits the least and the greatest element, of 16 bits each, are stored instead. What is hard is that `decode`
must compute the range from these two ends without loss, for groups with infinities and NaN as well.
"""

import math
from collections.abc import Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from mesa_tune.codecs.spec import Memory, Spec
from mesa_tune.ops import reference
from mesa_tune.ops.flags import none_set
from mesa_tune.ops.fused import QUANTIZE_MAP, Fused
from mesa_tune.ops.maps import KINDS, Deferred

LARGEST_GROUP = 4096
"""Largest group size of the kernels that decode some rows at a time, in elements."""

_QUANTIZE = torch.ops.mesa_tune.quantize.default
_DEQUANTIZE_OUT = torch.ops.mesa_tune.dequantize_out.default
_DEQUANTIZE = torch.ops.mesa_tune.dequantize.default


def encode(x: Tensor, spec: Spec, key: Tensor, memory: Memory | None = None) -> list[Tensor]:
    """Return packed levels (uint8) and ranges `[groups, 2]`: float32, or their ends in 16 bits."""
    parts = [*_QUANTIZE(x, spec.bits, spec.levels, spec.group_size, spec.quant_groups, spec.stochastic, key)]
    if x.element_size() == 2:
        parts[1] = _ends(parts[1], spec.levels, x.dtype)
    return parts


def encode_with_ranges(x: Tensor, spec: Spec, key: Tensor) -> list[Tensor]:
    """Return packed levels and the groups' ranges in float32, whatever the dtype of x."""
    return [*_QUANTIZE(x, spec.bits, spec.levels, spec.group_size, spec.quant_groups, spec.stochastic, key)]


def encode_deferred(deferred: Deferred, spec: Spec, key: Tensor) -> list[Tensor]:
    """Return `encode` of a deferred tensor; groups follow the order of its memory."""
    if spec.quant_groups or not deferred.is_dense:
        return encode(deferred.made(), spec, key)
    source, kind, _, *statistics = deferred
    sizes = (spec.bits, spec.levels, spec.group_size)
    return [*QUANTIZE_MAP(source, KINDS[kind], *statistics, *sizes, spec.stochastic, key)]


def decode(parts: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype, spec: Spec) -> Tensor:
    """Return the tensor that was encoded as `parts`: packed levels and ranges."""
    data, ranges = parts[0], _ranges_of(parts[1], spec.levels)
    sizes = (spec.bits, spec.levels, spec.group_size, spec.quant_groups)
    if torch.compiler.is_compiling():
        result: Tensor = _DEQUANTIZE(data, ranges, shape, dtype, *sizes)
        return result
    # An op of ours that takes a list of sizes would be slower to call.
    out = data.new_empty(shape, dtype=dtype)
    _DEQUANTIZE_OUT(data, ranges, *sizes, out)
    return out


_OTHER_FLOATS = {torch.float16, torch.bfloat16, torch.float64}
_DTYPE, _NONE = repeat("dtype"), repeat(None)


def fused(op: Fused, parts: Sequence[Tensor], arguments: Sequence[Any], spec: Spec) -> Any:
    """Return `op` of the packed parts and these arguments; None if it does not take them.

    It takes float32 and contiguous groups. Ops that are not `everywhere` take groups of up to `LARGEST_GROUP`
    elements, on the CPU.
    """
    data, ranges = parts
    dtypes = map(getattr, (ranges, *arguments), _DTYPE, _NONE)
    if spec.quant_groups or not _OTHER_FLOATS.isdisjoint(dtypes):
        return None
    if not op.everywhere and not (data.is_cpu and spec.group_size <= LARGEST_GROUP):
        return None
    return op.kernel(data, ranges, *arguments, spec.bits, spec.levels, spec.group_size)


def decode_run(parts: Sequence[Tensor], first: int, count: int, spec: Spec, out: Tensor) -> None:
    """Decode elements `[first, first + count)`, which are whole groups, into `out`."""
    data, ranges = parts
    size = spec.group_size
    begin, end = first // size, (first + count + size - 1) // size
    width = spec.bits * reference.plane_bytes(size)
    ranges = _ranges_of(ranges[begin:end], spec.levels)
    _DEQUANTIZE_OUT(data[begin * width : end * width], ranges, spec.bits, spec.levels, size, 0, out)


def _ends(ranges: Tensor, levels: int, dtype: torch.dtype) -> Tensor:
    """Return the values of the lowest and the highest level, `[groups, 2]`.

    Steps were rounded up; the cast to `dtype` makes the value of the highest level the greatest element
    again. Groups with gaps (NaN or Inf) have the highest value first, and then -Inf if it is also the lowest.
    """
    if none_set(ranges.isnan()):
        return _values_of_ends(ranges, levels - 1, dtype)
    gaps = reference.have_gaps(ranges)
    ends = _values_of_ends(reference.revealed(ranges), levels - 1 - gaps.to(ranges.dtype), dtype)
    lowest = torch.where(ends[:, :1] < ends[:, 1:], ends[:, :1], -math.inf)
    return torch.where(gaps, torch.cat([ends[:, 1:], lowest], 1), ends)


def _values_of_ends(ranges: Tensor, top: int | Tensor, dtype: torch.dtype) -> Tensor:
    factor, base, step = reference.unpack_ranges(ranges)
    high = ((base + top * step) / factor).clamp_max(torch.finfo(dtype).max)
    return torch.cat([ranges[:, :1], high], 1).to(dtype)


def _ranges_of(ends: Tensor, levels: int) -> Tensor:
    """Return the ranges with these ends, equal to `reference.ranges_of` except for the last bit of a step.

    In float32, `ends` are ranges already.
    """
    if ends.dtype == torch.float32:
        return ends
    first, second = ends.float().unbind(1)
    gaps = first > second
    if none_set(gaps):
        return _ranges_between(first, second, torch.full_like(first, levels - 1))
    low = torch.where(second.isinf(), first, first.minimum(second))
    ranges = _ranges_between(low, first.maximum(second), levels - 1 - gaps.to(first.dtype))
    return torch.where(gaps[:, None], reference.with_gaps(ranges, levels), ranges)


def _ranges_between(low: Tensor, high: Tensor, top: Tensor) -> Tensor:
    """Return ranges; `top` is the highest level, a tensor: CUDA divides inexactly by a Python number."""
    quarter = high * reference.QUARTER - low * reference.QUARTER
    span = torch.where(quarter > reference.WIDE, -quarter, high - low)
    return torch.stack([low, span / top], 1)


def packed_bytes(shape: Sequence[int], spec: Spec, element_size: int = 4) -> int:
    """Return the bytes of packed levels and ranges; an end has `element_size` bytes, 4 at most."""
    numel = math.prod(shape)
    groups = reference.group_count(numel, spec.group_size, spec.quant_groups)
    data = reference.data_bytes(numel, spec.bits, spec.group_size, spec.quant_groups)
    return data + 2 * min(element_size, 4) * groups
