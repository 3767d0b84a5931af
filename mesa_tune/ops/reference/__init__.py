"""The quantizer in plain PyTorch: the reference for `mesa_tune.ops`, bit for bit.

What is hard is that the native kernels must give the same bytes. Three rules make this possible. Every fp32
operation is rounded separately and in this order (no fused multiply-add). Every random number is a 32-bit
hash that int64 arithmetic computes without overflow (multipliers below 2**31). The result of minimum and
maximum does not depend on the order of elements.

Layout. A group of n elements stores its codes as `bits` planes of S = ceil(n / 8) bytes. Bit k of byte j of
plane p is bit p of the code of element k * S + j. So the elements of a group form eight runs of S consecutive
elements, and byte j of each plane has one bit from each run. This vectorizes on a CPU, and coalesces on a
GPU, for every number of bits. Ranges are two fp32 numbers per group: the value of code 0, and the step from
one code to the next.

Gaps. A group may contain NaN or Inf, its gaps. Its range is then that of its finite elements, which have all
codes but the top one; the top code decodes to NaN. Such a group stores a NaN as step, and the upper bits of
the real step in the payload of that NaN: the step is hidden.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

# Elements processed at a time: their int64 temporaries fit a CPU's cache, or fill a GPU.
CPU_BLOCK, DEVICE_BLOCK = 1 << 18, 1 << 24
QUARTER = 0.25
WIDE = 2.0**124  # a quarter of the widest range whose fp32 arithmetic cannot overflow
SMALLEST_STEP = 2.0**-126  # smallest normal fp32 number: its reciprocal is finite
ROOM = 1 + 2.0**-15  # factor of a hidden step, so that no finite element is rounded to the top code
HIDDEN = 9  # lower bits of the step that a hidden step loses
NAN = 0x7FC00000
MASK = 0xFFFFFFFF
# Multipliers and shifts of a low-bias 32-bit mixer (C. Wellons, "Prospecting for hash functions", 2018-2022).
MIX_1, MIX_2 = 0x21F0AAAD, 0x735A2D97
LANE_1, LANE_2, CARRY = 0x2545F491, 0x6A09E667, 0x27D4EB2F


def plane_bytes(size: int) -> int:
    """Return the bytes of one bit plane of a group of `size` elements."""
    return (size + 7) // 8


def split(numel: int, group_size: int, quant_groups: int) -> tuple[int, int, int]:
    """Return (number of whole groups, their size, size of the partial last group or 0)."""
    if quant_groups:
        return quant_groups, numel // quant_groups, 0
    return numel // group_size, group_size, numel % group_size


def group_count(numel: int, group_size: int, quant_groups: int) -> int:
    """Return the number of groups, including the partial one: the rows of `ranges`."""
    return quant_groups or (numel + group_size - 1) // group_size


def data_bytes(numel: int, bits: int, group_size: int, quant_groups: int) -> int:
    """Return the length of `data`. Without branches on `numel`, so that symbolic sizes stay symbolic."""
    whole, size, rest = split(numel, group_size, quant_groups)
    return bits * (whole * plane_bytes(size) + plane_bytes(rest))


def channels_of(shape: Sequence[int]) -> tuple[int, int]:
    """Return the dimension along which `quant_groups` groups, and its extent.

    Tensors of 4 and 5 dimensions are grouped along dimension 1, others along the last (Mesa's rule).
    """
    axis = 1 if len(shape) in (4, 5) else -1
    return axis, (shape or (1,))[axis]


def grouped_shape(shape: Sequence[int], quant_groups: int) -> tuple[int, int, int]:
    """Return the shape (outer, quant_groups, inner) in which the middle dimension counts the groups."""
    axis, channels = channels_of(shape)
    outer, inner = (shape[:1], shape[2:]) if axis == 1 else (shape[:-1], ())
    return math.prod(outer), quant_groups, channels // quant_groups * math.prod(inner)


def mix(h: Tensor) -> Tensor:
    """Hash 32-bit numbers (in int64) by a bijection."""
    h = ((h ^ (h >> 16)) * MIX_1) & MASK
    h = ((h ^ (h >> 15)) * MIX_2) & MASK
    return h ^ (h >> 15)


def group_keys(seed: Tensor, first: int, ranges: Tensor) -> tuple[Tensor, Tensor]:
    """Return two 32-bit keys per group from (seed, group number, stored range), each of shape (groups, 1)."""
    number = torch.arange(first, first + ranges.shape[0], device=ranges.device)
    stored = ranges.view(torch.int32).to(torch.int64)
    seed = seed.reshape(1).to(ranges.device, non_blocking=True)
    one = torch.full_like(number, LANE_1)
    two = torch.full_like(number, LANE_2)
    for word in (seed, seed >> 32, number, number >> 32, stored[:, 0], stored[:, 1]):
        one = mix(one ^ (word & MASK))
        two = mix(two ^ (word & MASK))
    return one[:, None], two[:, None]


def noise(seed: Tensor, first: int, ranges: Tensor, element: Tensor) -> Tensor:
    """Return 16 random bits (int64) for the elements with these indices of every group.

    Elements i and i + 128 of each block of 256 elements (i < 128) share one 32-bit hash.
    """
    one, two = group_keys(seed, first, ranges)
    pair = (element // 256) * 128 + element % 128
    h = (pair + one + (pair >> 32) * CARRY) & MASK
    h = ((h ^ (h >> 16)) * MIX_1 + two) & MASK
    h = ((h ^ (h >> 15)) * MIX_2) & MASK
    h = h ^ (h >> 16)
    return torch.where(element % 256 < 128, h & 0xFFFF, h >> 16)


def round_up(position: Tensor, noise: Tensor) -> Tensor:
    """Round `position` to a multiple of 2**-16, then down or up to an integer as 16 bits of noise decide."""
    return ((position * 2.0**16 + 0.5).to(torch.int64) + noise) >> 16


def measure(rows: Tensor, levels: int | Tensor) -> Tensor:
    """Return the ranges (groups, 2) of fp32 rows, one group each; `levels` may have one number per row."""
    ranges = ranges_of(rows.amin(1) + 0.0, rows.amax(1), levels)  # + 0.0: -0 becomes 0
    low, high = finite_ends(rows)
    ranges_with_gaps = with_gaps(ranges_of(low, high, levels - 1), levels)
    return torch.where(ranges[:, 1:].isnan(), ranges_with_gaps, ranges)


def finite_ends(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return minimum and maximum of the finite elements of each row (last dimension); of none: Inf, -Inf."""
    finite = rows.isfinite()
    low, high = (torch.where(finite, rows, neutral) for neutral in (math.inf, -math.inf))
    return low.amin(-1) + 0.0, high.amax(-1)


def with_gaps(ranges: Tensor, levels: int | Tensor) -> Tensor:
    """Return what groups with gaps store, from `ranges` of their finite elements to `levels - 1` levels.

    With two levels, one level for the finite elements is not enough: the range is NaN, as without a finite
    element. Else the step is multiplied by ROOM, and its upper bits are stored, rounded up. The arithmetic
    shift preserves the sign.
    """
    bits = (ranges[:, 1] * ROOM).view(torch.int32) + ((1 << HIDDEN) - 1)
    hidden = ((bits >> HIDDEN) | NAN).view(torch.float32)
    invalid = ranges[:, 1].isnan() | (torch.zeros_like(hidden) + levels == 2)
    return torch.where(invalid[:, None], math.nan, torch.stack([ranges[:, 0], hidden], 1))


def have_gaps(ranges: Tensor) -> Tensor:
    """Return which groups contain NaN or Inf beside finite elements, (groups, 1)."""
    return ranges[:, 1:].isnan() & ~ranges[:, :1].isnan()


def ranges_of(low: Tensor, high: Tensor, levels: int | Tensor) -> Tensor:
    """Return ranges (groups, 2) from `low` to `high`: the step is rounded up until the top level is `high`.

    Of a range too wide for fp32, a quarter of the step is stored, negated. NaN or Inf in `low` or `high`
    makes both numbers NaN.
    """
    factor = torch.where(high * QUARTER - low * QUARTER > WIDE, QUARTER, 1.0)
    base, end = low * factor, high * factor
    span = end - base
    top = torch.zeros_like(span) + (levels - 1)  # a tensor: CUDA divides by a Python scalar inexactly
    step = torch.where(span > 0, (span / top).clamp_min(SMALLEST_STEP), 0.0)
    for _ in range(4):
        too_small = base + top * step < end
        step = torch.where(too_small, (step.view(torch.int32) + 1).view(torch.float32), step)
    ranges = torch.stack([low, torch.where(factor < 1, -step, step)], 1)
    finite = torch.isfinite(low) & torch.isfinite(high)
    return torch.where(finite[:, None], ranges, math.nan)


def revealed(ranges: Tensor) -> Tensor:
    """Return the ranges with hidden steps as fp32 numbers."""
    stored = ranges[:, 1:].contiguous()
    steps = (stored.view(torch.int32) << HIDDEN).view(torch.float32).copysign(stored)
    return torch.cat([ranges[:, :1], torch.where(have_gaps(ranges), steps, stored)], 1)


def unpack_ranges(ranges: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (factor, base, step), each (groups, 1), of ranges without hidden steps.

    The value of a code is (base + code * step) / factor.
    """
    zero, stored = ranges[:, :1], ranges[:, 1:]
    wide = stored < 0
    factor = torch.where(wide, QUARTER, 1.0)
    return factor, zero * factor, torch.where(wide, -stored, stored)


def round_rows(rows: Tensor, ranges: Tensor, levels: int | Tensor, seed: Tensor | None, first: int) -> Tensor:
    """Round rows to codes (groups, size), uint8: stochastically with a seed, else to the nearest level.

    Values outside the range take its nearest end. `levels` may be a tensor (groups, 1). `first`: number of
    the first group.
    """
    codes = _round_finite(rows, ranges, levels, seed, first)
    top = (torch.zeros_like(rows[:, :1]) + (levels - 1)).to(torch.uint8)
    return torch.where(have_gaps(ranges) & ~rows.isfinite(), top, codes)


def _round_finite(
    rows: Tensor, ranges: Tensor, levels: int | Tensor, seed: Tensor | None, first: int
) -> Tensor:
    """Return codes that are valid for finite elements."""
    factor, base, step = unpack_ranges(revealed(ranges))
    inverse = torch.where(step > 0, 1.0 / step, 0.0)
    position = ((rows * factor - base) * inverse).clamp_min(0.0)
    top = torch.zeros_like(step) + (levels - 1)
    position = position.minimum(top - have_gaps(ranges).to(top.dtype))
    position = torch.where(step > 0, position, 0.0)
    if seed is None:
        whole = position.trunc()
        return (whole + (position - whole > 0.5)).to(torch.uint8)
    element = torch.arange(rows.shape[1], device=rows.device)
    return round_up(position, noise(seed, first, ranges, element)).to(torch.uint8)


def values_of(codes: Tensor, ranges: Tensor, levels: int | Tensor) -> Tensor:
    """Return the fp32 values (groups, size) of codes; `levels` may be a tensor (groups, 1)."""
    factor, base, step = unpack_ranges(revealed(ranges))
    gaps = have_gaps(ranges)
    values = base + codes * step
    clamped = values.minimum(torch.finfo(torch.float32).max * factor)
    values = torch.where(gaps | (factor < 1), clamped, values) / factor
    return torch.where(gaps & (codes == levels - 1), math.nan, values)


def pack_rows(codes: Tensor, bits: int) -> Tensor:
    """Pack codes (groups, size) into bit planes (groups, bits * plane_bytes(size))."""
    groups, size = codes.shape
    plane = plane_bytes(size)
    runs = torch.nn.functional.pad(codes, (0, 8 * plane - size)).view(groups, 8, plane)
    shift = torch.arange(8, dtype=torch.uint8, device=codes.device)[:, None]
    planes = [(((runs >> p) & 1) << shift).sum(1, dtype=torch.uint8) for p in range(bits)]
    return torch.stack(planes, 1).view(groups, bits * plane)


def unpack_rows(data: Tensor, bits: int, size: int) -> Tensor:
    """Unpack bit planes (groups, bits * plane_bytes(size)) into codes (groups, size)."""
    planes = data.view(data.shape[0], bits, 1, -1)
    shift = torch.arange(8, dtype=torch.uint8, device=data.device)[:, None]
    codes = sum((((planes[:, p] >> shift) & 1) << p for p in range(1, bits)), (planes[:, 0] >> shift) & 1)
    return codes.view(data.shape[0], -1)[:, :size]


def pieces(
    numel: int, group_size: int, quant_groups: int, bits: int, device: torch.device
) -> Iterator[tuple[int, int, slice, slice]]:
    """Yield (first group, number of groups, slice of elements, slice of bytes) of groups processed at a time.

    All groups of a piece have one size.
    """
    whole, size, rest = split(numel, group_size, quant_groups)
    step = max(1, (CPU_BLOCK if device.type == "cpu" else DEVICE_BLOCK) // max(size, 1))
    rectangles = [(first, min(step, whole - first), size) for first in range(0, whole, step)] if numel else []
    if rest:
        rectangles.append((whole, 1, rest))
    for first, groups, length in rectangles:
        element, byte = first * size, first * bits * plane_bytes(size)
        nbytes = groups * bits * plane_bytes(length)
        yield first, groups, slice(element, element + groups * length), slice(byte, byte + nbytes)


def as_groups(x: Tensor, quant_groups: int) -> Tensor:
    """Return x in one dimension, one group after the other."""
    if quant_groups:
        x = x.reshape(grouped_shape(x.shape, quant_groups)).transpose(0, 1)
    return x.reshape(-1)


def from_groups(flat: Tensor, shape: Sequence[int], quant_groups: int) -> Tensor:
    """Return the contiguous tensor of `shape` from the result of `as_groups`."""
    if quant_groups:
        outer, groups, inner = grouped_shape(shape, quant_groups)
        flat = flat.view(groups, outer, inner).transpose(0, 1)
    return flat.reshape(tuple(shape)).contiguous()


def quantize(
    x: Tensor,
    bits: int,
    levels: int,
    group_size: int,
    quant_groups: int,
    stochastic: bool,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return x as (data, ranges): uint8 bit planes, and two fp32 numbers per group."""
    numel = x.numel()
    flat = as_groups(x.detach(), quant_groups)
    data = flat.new_empty(data_bytes(numel, bits, group_size, quant_groups), dtype=torch.uint8)
    ranges = flat.new_zeros(group_count(numel, group_size, quant_groups), 2, dtype=torch.float32)
    for first, groups, elements, packed in pieces(numel, group_size, quant_groups, bits, data.device):
        rows = flat[elements].view(groups, -1).to(torch.float32)
        measured = measure(rows, levels)
        codes = round_rows(rows, measured, levels, seed if stochastic else None, first)
        ranges[first : first + groups] = measured
        data[packed] = pack_rows(codes, bits).view(-1)
    return data, ranges


def quantize_ends(x: Tensor, bits: int, levels: int, *settings: Any) -> tuple[Tensor, Tensor]:
    """Return `quantize` of x, of 16 bits per element, with the ends of the ranges in the dtype of x."""
    data, ranges = quantize(x, bits, levels, *settings)
    return data, ends_of(ranges, levels, x.dtype)


def ends_of(ranges: Tensor, levels: int, dtype: torch.dtype) -> Tensor:
    """Return the values of the lowest and the highest level of ranges, `[groups, 2]`, in 16 bits.

    Steps were rounded up; the cast to `dtype` makes the value of the highest level the greatest element
    again. Groups with gaps have the highest value first, and then -Inf if it is also the lowest.
    """
    gaps = have_gaps(ranges)
    factor, base, step = unpack_ranges(revealed(ranges))
    high = ((base + (levels - 1 - gaps.to(step.dtype)) * step) / factor).clamp_max(torch.finfo(dtype).max)
    low, high = ranges[:, :1].to(dtype), high.to(dtype)
    with_gap = torch.cat([high, torch.where(low < high, low, -math.inf)], 1)
    return torch.where(gaps, with_gap, torch.cat([low, high], 1))


def ranges_between(ends: Tensor, levels: int) -> Tensor:
    """Return the ranges with these ends, equal to those of `ranges_of` except for the last bit of a step."""
    first, second = ends.float().unbind(1)
    gaps = first > second
    low = torch.where(gaps & ~second.isinf(), second, first)
    high = torch.where(gaps, first, second)
    quarter = high * QUARTER - low * QUARTER
    span = torch.where(quarter > WIDE, -quarter, high - low)
    ranges = torch.stack([low, span / (levels - 1 - gaps.to(span.dtype))], 1)
    return torch.where(gaps[:, None], with_gaps(ranges, levels), ranges)


def dequantize(
    data: Tensor,
    ranges: Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
    bits: int,
    levels: int,
    group_size: int,
    quant_groups: int,
    zero_rows: Tensor | None = None,
) -> Tensor:
    """Decode the result of `quantize` or `quantize_ends` into a contiguous tensor of `shape` and `dtype`.

    Rows whose bit is set in `zero_rows` are zero, whatever they are decoded as.
    """
    if ranges.dtype != torch.float32:
        ranges = ranges_between(ranges, levels)
    numel = math.prod(shape)
    flat = data.new_empty(numel, dtype=dtype)
    for first, groups, elements, packed in pieces(numel, group_size, quant_groups, bits, data.device):
        size = (elements.stop - elements.start) // groups
        codes = unpack_rows(data[packed].view(groups, -1), bits, size)
        flat[elements] = values_of(codes, ranges[first : first + groups], levels).view(-1).to(dtype)
    result = from_groups(flat, shape, quant_groups)
    if zero_rows is None:
        return result
    return result.masked_fill_(unpack_bits(zero_rows, shape[:-1]).unsqueeze(-1), 0)


def pack_bits(mask: Tensor) -> Tensor:
    """Pack a bool tensor into one bit per element, the first element in the lowest bit of the first byte."""
    bits = mask.reshape(-1).to(torch.uint8)
    bits = torch.nn.functional.pad(bits, (0, -bits.numel() % 8)).view(-1, 8)
    return (bits << torch.arange(8, dtype=torch.uint8, device=mask.device)).sum(1, dtype=torch.uint8)


def pack_zero_rows(x: Tensor) -> Tensor:
    """Return one bit for each row, along the last dimension: whether all its elements are zero."""
    return pack_bits((x == 0).all(-1))


def quantize_rows(
    x: Tensor, bits: int, levels: int, group_size: int, stochastic: bool, seed: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `quantize` of x, or `quantize_ends` if it has 16 bits, and `pack_zero_rows`."""
    encode = quantize if x.dtype == torch.float32 else quantize_ends
    return *encode(x, bits, levels, group_size, 0, stochastic, seed), pack_zero_rows(x)


def unpack_bits(data: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the bool tensor of `shape` that `pack_bits` packed into `data`."""
    bits = (data[:, None] >> torch.arange(8, dtype=torch.uint8, device=data.device)) & 1
    return bits.view(-1)[: math.prod(shape)].view(tuple(shape)).to(torch.bool)
