"""The quantizer in plain PyTorch: what `mesa_tune.ops` means, bit for bit.

The native kernels must give the same bytes. That rests on three things: every fp32 operation is rounded by
itself and in this order (no fused multiply-add), every random number is a 32-bit hash that int64 arithmetic
reproduces without overflow (multipliers below 2**31), and minimum and maximum do not care about order.

Layout. A group of n elements stores its codes as `bits` planes of ceil(n / 8) bytes. With S = ceil(n / 8),
bit k of byte j of plane p is bit p of the code of element k * S + j: eight strided runs make one plane,
which vectorizes on a CPU, and coalesces on a GPU, at every width. Ranges are two fp32 numbers a group, the
value of code 0 and the step from one code to the next.

Gaps. A group may hold NaN or Inf: its range is that of its finite elements, which have all codes but the top
one. That one decodes to NaN. A step that is NaN says so; the real one hides behind the bits of NaN.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

# Elements worked on at a time: int64 temporaries that stay in a CPU's cache, or that fill a GPU.
CPU_BLOCK, DEVICE_BLOCK = 1 << 18, 1 << 24
QUARTER = 0.25
WIDE = 2.0**124  # a quarter of the widest range whose fp32 arithmetic cannot overflow
SMALLEST_STEP = 2.0**-126  # smallest normal fp32 number: its reciprocal is finite
ROOM = 1 + 2.0**-15  # what a hidden step is raised by, so that no finite element is rounded to the top code
HIDDEN = 9  # bits that a hidden step lacks
NAN = 0x7FC00000
MASK = 0xFFFFFFFF
# Multipliers and shifts of a low-bias 32-bit mixer (C. Wellons, "Prospecting for hash functions", 2018-2022).
MIX_1, MIX_2 = 0x21F0AAAD, 0x735A2D97
LANE_1, LANE_2, CARRY = 0x2545F491, 0x6A09E667, 0x27D4EB2F


def plane_bytes(size: int) -> int:
    """Bytes of one bit plane of a group of `size` elements."""
    return (size + 7) // 8


def split(numel: int, group_size: int, quant_groups: int) -> tuple[int, int, int]:
    """(whole groups, their size, size of the partial group behind them or 0) of `numel` elements."""
    if quant_groups:
        return quant_groups, numel // quant_groups, 0
    return numel // group_size, group_size, numel % group_size


def group_count(numel: int, group_size: int, quant_groups: int) -> int:
    """Number of groups, the partial one included: rows of `ranges`."""
    return quant_groups or (numel + group_size - 1) // group_size


def data_bytes(numel: int, bits: int, group_size: int, quant_groups: int) -> int:
    """Length of `data`. Branch-free in `numel`, so that symbolic sizes stay symbolic."""
    whole, size, rest = split(numel, group_size, quant_groups)
    return bits * (whole * plane_bytes(size) + plane_bytes(rest))


def grouped_shape(shape: Sequence[int], quant_groups: int) -> tuple[int, int, int]:
    """Shape (outer, quant_groups, inner) as which groups along channels or heads are the middle dimension.

    Tensors of 4 and 5 dimensions are grouped along dimension 1, others along the last (Mesa's rule).
    """
    if len(shape) in (4, 5):
        return shape[0], quant_groups, shape[1] // quant_groups * math.prod(shape[2:])
    *outer, last = shape or (1,)
    return math.prod(outer), quant_groups, last // quant_groups


def mix(h: Tensor) -> Tensor:
    """A bijection of 32-bit numbers (held in int64) whose outputs look unrelated."""
    h = ((h ^ (h >> 16)) * MIX_1) & MASK
    h = ((h ^ (h >> 15)) * MIX_2) & MASK
    return h ^ (h >> 15)


def group_keys(seed: Tensor, first: int, ranges: Tensor) -> tuple[Tensor, Tensor]:
    """Two 32-bit keys a group from (seed, group number, stored range), each of shape (groups, 1)."""
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
    """16 random bits (int64) for these elements of every group: of 256, each in the first half shares 32 with
    the one 128 after it.
    """
    one, two = group_keys(seed, first, ranges)
    pair = (element // 256) * 128 + element % 128
    h = (pair + one + (pair >> 32) * CARRY) & MASK
    h = ((h ^ (h >> 16)) * MIX_1 + two) & MASK
    h = ((h ^ (h >> 15)) * MIX_2) & MASK
    h = h ^ (h >> 16)
    return torch.where(element % 256 < 128, h & 0xFFFF, h >> 16)


def round_up(position: Tensor, noise: Tensor) -> Tensor:
    """`position` or the integer above it, as 16 bits of noise say; it counts in units of 2**-16."""
    return ((position * 2.0**16 + 0.5).to(torch.int64) + noise) >> 16


def measure(rows: Tensor, levels: int | Tensor) -> Tensor:
    """Ranges (groups, 2) of fp32 rows, each from its minimum to its maximum; `levels` may be one a row."""
    whole = ranges_of(rows.amin(1) + 0.0, rows.amax(1), levels)  # + 0.0: -0 and 0 are one minimum
    low, high = finite_ends(rows)
    parts = with_gaps(ranges_of(low, high, levels - 1), levels)
    return torch.where(whole[:, 1:].isnan(), parts, whole)


def finite_ends(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Minimum and maximum of what is finite in each row (last dimension); Inf and -Inf where nothing is."""
    finite = rows.isfinite()
    low, high = (torch.where(finite, rows, none) for none in (math.inf, -math.inf))
    return low.amin(-1) + 0.0, high.amax(-1)


def with_gaps(ranges: Tensor, levels: int | Tensor) -> Tensor:
    """What groups that hold NaN or Inf store for `ranges` of their finite elements, to `levels - 1` levels.

    Of two levels, one is not enough for these: then all is NaN, as without anything finite. The step is
    raised a little, and its upper bits are kept, rounded up; shifted as a number, they bring the sign along.
    """
    bits = (ranges[:, 1] * ROOM).view(torch.int32) + ((1 << HIDDEN) - 1)
    hidden = ((bits >> HIDDEN) | NAN).view(torch.float32)
    none = ranges[:, 1].isnan() | (torch.zeros_like(hidden) + levels == 2)
    return torch.where(none[:, None], math.nan, torch.stack([ranges[:, 0], hidden], 1))


def have_gaps(ranges: Tensor) -> Tensor:
    """Which groups hold NaN or Inf beside finite elements, (groups, 1)."""
    return ranges[:, 1:].isnan() & ~ranges[:, :1].isnan()


def ranges_of(low: Tensor, high: Tensor, levels: int | Tensor) -> Tensor:
    """Ranges (groups, 2) from `low` to `high`: the step is rounded up until the top level reaches `high`.

    A range too wide for fp32 is kept as a quarter of its step, negated; NaN or Inf in `low` or `high` makes
    both numbers NaN.
    """
    factor = torch.where(high * QUARTER - low * QUARTER > WIDE, QUARTER, 1.0)
    base, end = low * factor, high * factor
    span = end - base
    top = torch.zeros_like(span) + (levels - 1)  # a tensor: CUDA divides by a Python scalar inexactly
    step = torch.where(span > 0, (span / top).clamp_min(SMALLEST_STEP), 0.0)
    for _ in range(4):
        short = base + top * step < end
        step = torch.where(short, (step.view(torch.int32) + 1).view(torch.float32), step)
    ranges = torch.stack([low, torch.where(factor < 1, -step, step)], 1)
    finite = torch.isfinite(low) & torch.isfinite(high)
    return torch.where(finite[:, None], ranges, math.nan)


def revealed(ranges: Tensor) -> Tensor:
    """Ranges with their steps, where these hide behind NaN."""
    stored = ranges[:, 1:].contiguous()
    steps = (stored.view(torch.int32) << HIDDEN).view(torch.float32).copysign(stored)
    return torch.cat([ranges[:, :1], torch.where(have_gaps(ranges), steps, stored)], 1)


def unpack_ranges(ranges: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(factor, base, step), each (groups, 1): a value is (base + code * step) / factor; without gaps."""
    zero, stored = ranges[:, :1], ranges[:, 1:]
    wide = stored < 0
    factor = torch.where(wide, QUARTER, 1.0)
    return factor, zero * factor, torch.where(wide, -stored, stored)


def round_rows(rows: Tensor, ranges: Tensor, levels: int | Tensor, seed: Tensor | None, first: int) -> Tensor:
    """Codes (groups, size), uint8: stochastic with a seed, else to the nearest level.

    Values outside their range take its nearest end. `levels` may be a tensor (groups, 1).
    """
    codes = _round_finite(rows, ranges, levels, seed, first)
    top = (torch.zeros_like(rows[:, :1]) + (levels - 1)).to(torch.uint8)
    return torch.where(have_gaps(ranges) & ~rows.isfinite(), top, codes)


def _round_finite(
    rows: Tensor, ranges: Tensor, levels: int | Tensor, seed: Tensor | None, first: int
) -> Tensor:
    """Codes of what is finite; others have any."""
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
    """The fp32 values (groups, size) of codes; `levels` may be a tensor (groups, 1)."""
    factor, base, step = unpack_ranges(revealed(ranges))
    gaps = have_gaps(ranges)
    values = base + codes * step
    ended = values.minimum(torch.finfo(torch.float32).max * factor)
    values = torch.where(gaps | (factor < 1), ended, values) / factor
    return torch.where(gaps & (codes == levels - 1), math.nan, values)


def pack_rows(codes: Tensor, bits: int) -> Tensor:
    """Codes (groups, size) as bit planes (groups, bits * plane_bytes(size))."""
    groups, size = codes.shape
    plane = plane_bytes(size)
    runs = torch.nn.functional.pad(codes, (0, 8 * plane - size)).view(groups, 8, plane)
    place = torch.arange(8, dtype=torch.uint8, device=codes.device)[:, None]
    planes = [(((runs >> p) & 1) << place).sum(1, dtype=torch.uint8) for p in range(bits)]
    return torch.stack(planes, 1).view(groups, bits * plane)


def unpack_rows(data: Tensor, bits: int, size: int) -> Tensor:
    """Bit planes (groups, bits * plane_bytes(size)) as codes (groups, size)."""
    planes = data.view(data.shape[0], bits, 1, -1)
    place = torch.arange(8, dtype=torch.uint8, device=data.device)[:, None]
    codes = sum((((planes[:, p] >> place) & 1) << p for p in range(1, bits)), (planes[:, 0] >> place) & 1)
    return codes.view(data.shape[0], -1)[:, :size]


def pieces(
    numel: int, group_size: int, quant_groups: int, bits: int, device: torch.device
) -> Iterator[tuple[int, int, slice, slice]]:
    """(first group, groups, their elements, their bytes) of rectangles that are worked on at a time."""
    whole, size, rest = split(numel, group_size, quant_groups)
    most = max(1, (CPU_BLOCK if device.type == "cpu" else DEVICE_BLOCK) // max(size, 1))
    rectangles = [(first, min(most, whole - first), size) for first in range(0, whole, most)] if numel else []
    if rest:
        rectangles.append((whole, 1, rest))
    for first, groups, length in rectangles:
        element, byte = first * size, first * bits * plane_bytes(size)
        many = groups * bits * plane_bytes(length)
        yield first, groups, slice(element, element + groups * length), slice(byte, byte + many)


def as_groups(x: Tensor, quant_groups: int) -> Tensor:
    """x in one dimension, groups after each other."""
    if quant_groups:
        x = x.reshape(grouped_shape(x.shape, quant_groups)).transpose(0, 1)
    return x.reshape(-1)


def from_groups(flat: Tensor, shape: Sequence[int], quant_groups: int) -> Tensor:
    """Undoes `as_groups`; contiguous."""
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
    """x as (data, ranges): uint8 bit planes, and two fp32 numbers a group."""
    numel = x.numel()
    flat = as_groups(x.detach(), quant_groups)
    data = flat.new_empty(data_bytes(numel, bits, group_size, quant_groups), dtype=torch.uint8)
    ranges = flat.new_zeros(group_count(numel, group_size, quant_groups), 2, dtype=torch.float32)
    for first, groups, elements, place in pieces(numel, group_size, quant_groups, bits, data.device):
        rows = flat[elements].view(groups, -1).to(torch.float32)
        measured = measure(rows, levels)
        codes = round_rows(rows, measured, levels, seed if stochastic else None, first)
        ranges[first : first + groups] = measured
        data[place] = pack_rows(codes, bits).view(-1)
    return data, ranges


def dequantize(
    data: Tensor,
    ranges: Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
    bits: int,
    levels: int,
    group_size: int,
    quant_groups: int,
) -> Tensor:
    """What `quantize` packed, decoded into a contiguous tensor of `shape` and `dtype`."""
    numel = math.prod(shape)
    flat = data.new_empty(numel, dtype=dtype)
    for first, groups, elements, place in pieces(numel, group_size, quant_groups, bits, data.device):
        size = (elements.stop - elements.start) // groups
        codes = unpack_rows(data[place].view(groups, -1), bits, size)
        flat[elements] = values_of(codes, ranges[first : first + groups], levels).view(-1).to(dtype)
    return from_groups(flat, shape, quant_groups)


def pack_bits(mask: Tensor) -> Tensor:
    """A bool tensor at one bit an element, the first element in the lowest bit of the first byte."""
    bits = mask.reshape(-1).to(torch.uint8)
    bits = torch.nn.functional.pad(bits, (0, -bits.numel() % 8)).view(-1, 8)
    return (bits << torch.arange(8, dtype=torch.uint8, device=mask.device)).sum(1, dtype=torch.uint8)


def unpack_bits(data: Tensor, shape: Sequence[int]) -> Tensor:
    """What `pack_bits` packed, as a bool tensor of `shape`."""
    bits = (data[:, None] >> torch.arange(8, dtype=torch.uint8, device=data.device)) & 1
    return bits.view(-1)[: math.prod(shape)].view(tuple(shape)).to(torch.bool)
