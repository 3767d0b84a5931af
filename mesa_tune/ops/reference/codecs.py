"""The codecs' ops in plain PyTorch: default kernels, and the reference for the native ones.

What is hard is that no value is read on the host. Sizes follow from shapes and settings alone. What depends
on data (which elements survive, how many bits a sample gets) is computed by sorting and cumulative sums.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mesa_tune.ops import reference
from mesa_tune.ops.reference import (
    CPU_BLOCK,
    DEVICE_BLOCK,
    as_groups,
    group_count,
    grouped_shape,
    plane_bytes,
)

MOST_BITS = 8
_SAMPLES_BLOCK = CPU_BLOCK >> 2
"""Elements that are encoded at a time on the CPU: no tensor's bytes say what their temporaries take."""

_MAGNITUDES = {2: (torch.int16, 0x7FFF), 4: (torch.int32, 0x7FFFFFFF), 8: (torch.int64, 0x7FFFFFFFFFFFFFFF)}


def extents(x: Tensor, group_size: int, quant_groups: int) -> Tensor:
    """Return minimum and maximum of every group of x, fp32 `[groups, 2]`; -0 becomes 0."""
    numel = x.numel()
    flat = as_groups(x.detach(), quant_groups)
    ends = flat.new_zeros(group_count(numel, group_size, quant_groups), 2, dtype=torch.float32)
    for first, groups, elements, _ in reference.pieces(numel, group_size, quant_groups, 1, flat.device):
        rows = flat[elements].view(groups, -1)
        ends[first : first + groups] = torch.stack([rows.amin(1), rows.amax(1)], 1) + 0.0
    return ends


def quantize_within(
    x: Tensor,
    ranges: Tensor,
    bits: int,
    levels: int,
    group_size: int,
    quant_groups: int,
    stochastic: bool,
    seed: Tensor | None,
) -> Tensor:
    """Return the `data` of `reference.quantize` for these ranges; values outside take the nearest end."""
    numel = x.numel()
    flat = as_groups(x.detach(), quant_groups)
    size = reference.data_bytes(numel, bits, group_size, quant_groups)
    data = flat.new_empty(size, dtype=torch.uint8)
    for first, groups, elements, packed in reference.pieces(
        numel, group_size, quant_groups, bits, data.device
    ):
        rows = flat[elements].view(groups, -1).to(torch.float32)
        row_ranges = ranges[first : first + groups]
        codes = reference.round_rows(rows, row_ranges, levels, seed if stochastic else None, first)
        data[packed] = reference.pack_rows(codes, bits).view(-1)
    return data


def sparsify(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return a bitmap (uint8) of the `count` largest magnitudes of the tensor, and their values in order.

    Of equal magnitudes the first ones survive, so the result depends on x alone. NaN is the largest
    magnitude.
    """
    flat = x.detach().reshape(-1)
    if count == 0:
        return reference.pack_bits(torch.zeros_like(flat, dtype=torch.bool)), flat[:0].clone()
    dtype, mask = _MAGNITUDES[flat.element_size()]
    magnitude = flat.view(dtype) & mask
    threshold = magnitude.kthvalue(flat.numel() - count + 1).values
    above, equal = magnitude > threshold, magnitude == threshold
    missing = count - above.sum(dtype=torch.int32)
    survives = above | (equal & (equal.cumsum(0, dtype=torch.int32) <= missing))
    rank = survives.cumsum(0, dtype=torch.int32)
    ranks = torch.arange(1, count + 1, dtype=torch.int32, device=flat.device)
    return reference.pack_bits(survives), flat[torch.searchsorted(rank, ranks)]


def densify(bitmap: Tensor, survivors: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the contiguous tensor of `shape` with these survivors, zero elsewhere."""
    if not survivors.numel():
        return survivors.new_zeros(shape)
    survives = reference.unpack_bits(bitmap, (math.prod(shape),))
    index = survives.cumsum(0, dtype=torch.int32).sub_(1).clamp_min_(0)
    return torch.where(survives, survivors[index], 0).view(tuple(shape))


def sample_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return the number of samples (dimension 0) and the elements of each; a vector is one sample."""
    return (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))


def sample_groups(shape: Sequence[int], group_size: int, quant_groups: int) -> tuple[int, int, int]:
    """Return (number of whole groups, their size, size of the partial last group or 0) of one sample."""
    return reference.split(sample_shape(shape)[1], group_size, quant_groups)


def sample_rows(shape: Sequence[int], group_size: int, quant_groups: int) -> int:
    """Return the number of rows of the ranges of `quantize_samples`."""
    samples, elements = sample_shape(shape)
    return samples * group_count(elements, group_size, quant_groups)


def sample_bits(costs: Tensor, average: int) -> Tensor:
    """Return bits (uint8, 1 to 8) per sample, `average` in the mean, that minimize Σ costs / (2ᵇ - 1)².

    Each further bit of a sample gains less than the bit before. So choosing the bits with the largest gains
    over all samples is optimal, and never chooses a bit of a sample without its earlier bits.
    """
    levels = 2.0 ** torch.arange(1, MOST_BITS + 1, dtype=torch.float64, device=costs.device) - 1
    error = levels**-2
    gain = costs.to(torch.float64)[:, None] * (error[:-1] - error[1:])
    order = gain.view(-1).sort(descending=True, stable=True).indices[: costs.numel() * (average - 1)]
    chosen = torch.zeros(gain.numel(), dtype=torch.uint8, device=costs.device).scatter_(0, order, 1)
    return chosen.view(gain.shape).sum(1, dtype=torch.uint8) + 1


def quantize_samples(
    x: Tensor,
    bits: int,
    group_size: int,
    quant_groups: int,
    stochastic: bool,
    seed: Tensor | None,
    sensitivity: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x as (data, ranges, bits per sample), with the bits of `sample_bits`, `bits` on average.

    data: sample after sample, and within a sample plane after plane of ceil(elements / 8) bytes.
    """
    samples, elements = sample_shape(x.shape)
    rows = _as_samples(x.detach(), quant_groups)
    ranges = rows.new_zeros(sample_rows(x.shape, group_size, quant_groups), 2, dtype=torch.float32)
    if not x.numel():
        return (
            rows.new_empty(0, dtype=torch.uint8),
            ranges,
            rows.new_full((samples,), bits, dtype=torch.uint8),
        )
    parts = list(_parts(x.shape, group_size, quant_groups))
    costs = torch.cat([sample_costs(rows[block], parts) for block in _blocks(rows)])
    widths = sample_bits(costs if sensitivity is None else costs * sensitivity.to(costs), bits)
    starts = widths.cumsum(0, dtype=torch.int32) - widths
    plane = torch.arange(MOST_BITS, dtype=torch.int32, device=rows.device)
    data = rows.new_empty(samples * bits, plane_bytes(elements), dtype=torch.uint8)
    for block in _blocks(rows):
        codes = rows.new_empty(rows[block].shape, dtype=torch.uint8)
        for columns, size, group in _pieces(parts, block):
            values = rows[block, columns].reshape(-1, size).to(torch.float32)
            levels = 2.0 ** widths[block].repeat_interleave(values.shape[0] // codes.shape[0])
            measured = reference.measure(values, levels)
            noise_seed = seed if stochastic else None
            part_codes = reference.round_rows(values, measured, levels[:, None], noise_seed, group)
            ranges[group : group + measured.shape[0]] = measured
            codes[:, columns] = part_codes.view(codes.shape[0], -1)
        planes = reference.pack_rows(codes, MOST_BITS).view(-1, MOST_BITS, plane_bytes(elements))
        # A plane above a sample's bits is its last one once more: no count of planes is read on the host.
        used = torch.minimum(plane, widths[block, None] - 1)
        planes = planes.take_along_dim(used[:, :, None].long(), dim=1)
        data[starts[block, None] + used] = planes
    return data.view(-1), ranges, widths


def dequantize_samples(
    data: Tensor,
    ranges: Tensor,
    widths: Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
    group_size: int,
    quant_groups: int,
) -> Tensor:
    """Decode the result of `quantize_samples` into a contiguous tensor of `shape` and `dtype`."""
    samples, elements = sample_shape(shape)
    rows = data.new_empty(samples, elements, dtype=dtype)
    if not rows.numel():
        return rows.view(tuple(shape))
    stored = data.view(-1, plane_bytes(elements))
    starts = (widths.cumsum(0, dtype=torch.int32) - widths)[:, None]
    plane = torch.arange(MOST_BITS, dtype=torch.int32, device=data.device)
    parts = list(_parts(shape, group_size, quant_groups))
    for block in _blocks(rows):
        planes = stored[(starts[block] + plane).clamp_max(stored.shape[0] - 1)]
        planes = planes * (plane < widths[block, None])[:, :, None]
        codes = reference.unpack_rows(planes.view(planes.shape[0], -1), MOST_BITS, elements)
        for columns, size, group in _pieces(parts, block):
            part_codes = codes[:, columns].reshape(-1, size)
            group_ranges = ranges[group : group + part_codes.shape[0]]
            count = part_codes.shape[0] // codes.shape[0]
            levels = 2 ** widths[block].to(torch.int32).repeat_interleave(count)[:, None]
            values = reference.values_of(part_codes, group_ranges, levels)
            rows[block, columns] = values.view(codes.shape[0], -1).to(dtype)
    return _from_samples(rows, shape, quant_groups)


def sample_costs(rows: Tensor, parts: Sequence[tuple[slice, int, int]]) -> Tensor:
    """Return Σ elements · range² over the groups of each sample, with ranges of the finite elements.

    The variance of stochastic rounding to b bits is costs / (6 · (2ᵇ - 1)²): ActNN, section 4.
    """
    costs = rows.new_zeros(rows.shape[0], dtype=torch.float64)
    for columns, size, _ in parts:
        groups = rows[:, columns].reshape(rows.shape[0], -1, size)
        low, high = reference.finite_ends(groups)
        spans = high.to(torch.float64) - low.to(torch.float64)
        costs += size * spans.square().nan_to_num(0.0, 0.0, 0.0).sum(1)
    return costs


def _parts(shape: Sequence[int], group_size: int, quant_groups: int) -> Iterator[tuple[slice, int, int]]:
    """Yield (slice of each sample's elements, size of their groups, number of the first of these groups)."""
    whole, size, rest = sample_groups(shape, group_size, quant_groups)
    if whole:
        yield slice(0, whole * size), size, 0
    if rest:
        yield slice(whole * size, whole * size + rest), rest, sample_shape(shape)[0] * whole


def _pieces(parts: Sequence[tuple[slice, int, int]], block: slice) -> Iterator[tuple[slice, int, int]]:
    """Yield the parts of a block of samples, each with its first group; of one large sample in pieces."""
    for columns, size, first in parts:
        width = columns.stop - columns.start
        step = width if block.stop - block.start > 1 else max(1, _SAMPLES_BLOCK // size) * size
        for start in range(columns.start, columns.stop, step):
            group = first + block.start * (width // size) + (start - columns.start) // size
            yield slice(start, min(start + step, columns.stop)), size, group


def _blocks(rows: Tensor) -> Iterator[slice]:
    """Yield slices of samples that are processed at a time."""
    step = max(1, (_SAMPLES_BLOCK if rows.device.type == "cpu" else DEVICE_BLOCK) // rows.shape[1])
    for first in range(0, rows.shape[0], step):
        yield slice(first, min(first + step, rows.shape[0]))


def _as_samples(x: Tensor, quant_groups: int) -> Tensor:
    """Return x as (samples, elements), in each sample one group after the other."""
    samples, elements = sample_shape(x.shape)
    if quant_groups and x.numel():
        _, groups, inner = grouped_shape(x.shape, quant_groups)
        x = x.reshape(samples, -1, groups, inner).transpose(1, 2)
    return x.reshape(samples, elements)


def _from_samples(rows: Tensor, shape: Sequence[int], quant_groups: int) -> Tensor:
    if quant_groups:
        _, groups, inner = grouped_shape(shape, quant_groups)
        rows = rows.view(rows.shape[0], groups, -1, inner).transpose(1, 2)
    return rows.reshape(tuple(shape)).contiguous()
