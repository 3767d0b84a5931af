"""The raw work of the codecs in plain PyTorch, beside `mesa_tune.ops.reference`: what their ops mean.

Nothing here reads a value on the host: sizes follow from shapes and settings alone, and what depends on data
(which elements survive, how many bits a sample gets) is found by sorting and running sums.
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
_MAGNITUDES = {2: (torch.int16, 0x7FFF), 4: (torch.int32, 0x7FFFFFFF), 8: (torch.int64, 0x7FFFFFFFFFFFFFFF)}


def extents(x: Tensor, group_size: int, quant_groups: int) -> Tensor:
    """Minimum and maximum of every group of x, fp32 `[groups, 2]`; zeros are positive."""
    numel = x.numel()
    flat = as_groups(x.detach(), quant_groups)
    found = flat.new_zeros(group_count(numel, group_size, quant_groups), 2, dtype=torch.float32)
    for first, groups, elements, _ in reference.pieces(numel, group_size, quant_groups, 1, flat.device):
        rows = flat[elements].view(groups, -1)
        found[first : first + groups] = torch.stack([rows.amin(1), rows.amax(1)], 1) + 0.0
    return found


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
    """The `data` of `reference.quantize` for given ranges; values outside take the nearest end."""
    numel = x.numel()
    flat = as_groups(x.detach(), quant_groups)
    size = reference.data_bytes(numel, bits, group_size, quant_groups)
    data = flat.new_empty(size, dtype=torch.uint8)
    for first, groups, elements, place in reference.pieces(
        numel, group_size, quant_groups, bits, data.device
    ):
        rows = flat[elements].view(groups, -1).to(torch.float32)
        own = ranges[first : first + groups]
        codes = reference.round_rows(rows, own, levels, seed if stochastic else None, first)
        data[place] = reference.pack_rows(codes, bits).view(-1)
    return data


def sparsify(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """A bitmap (uint8) of the `count` largest magnitudes of the whole tensor, and their values in order.

    Of equal magnitudes the first ones are taken, so the result is a function of x alone. NaN is the largest.
    """
    flat = x.detach().reshape(-1)
    if count == 0:
        return reference.pack_bits(torch.zeros_like(flat, dtype=torch.bool)), flat[:0].clone()
    kind, mask = _MAGNITUDES[flat.element_size()]
    magnitude = flat.view(kind) & mask
    threshold = magnitude.kthvalue(flat.numel() - count + 1).values
    above, equal = magnitude > threshold, magnitude == threshold
    missing = count - above.sum(dtype=torch.int32)
    survives = above | (equal & (equal.cumsum(0, dtype=torch.int32) <= missing))
    found = survives.cumsum(0, dtype=torch.int32)
    wanted = torch.arange(1, count + 1, dtype=torch.int32, device=flat.device)
    return reference.pack_bits(survives), flat[torch.searchsorted(found, wanted)]


def densify(bitmap: Tensor, survivors: Tensor, shape: Sequence[int]) -> Tensor:
    """The tensor of `shape` whose survivors these are, zero elsewhere; contiguous."""
    if not survivors.numel():
        return survivors.new_zeros(shape)
    survives = reference.unpack_bits(bitmap, (math.prod(shape),))
    place = survives.cumsum(0, dtype=torch.int32).sub_(1).clamp_min_(0)
    return torch.where(survives, survivors[place], 0).view(tuple(shape))


def sample_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Samples along dimension 0, and the elements of each; a vector is one sample."""
    return (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))


def sample_groups(shape: Sequence[int], group_size: int, quant_groups: int) -> tuple[int, int, int]:
    """(whole groups, their size, size of the partial group behind them or 0) of one sample."""
    return reference.split(sample_shape(shape)[1], group_size, quant_groups)


def sample_rows(shape: Sequence[int], group_size: int, quant_groups: int) -> int:
    """Rows of the ranges of `quantize_samples`."""
    samples, elements = sample_shape(shape)
    return samples * group_count(elements, group_size, quant_groups)


def sample_bits(costs: Tensor, average: int) -> Tensor:
    """Bits (uint8, 1 to 8) of each sample, `average` a sample in all, least in sum of costs / (2ᵇ - 1)².

    Each further bit gains less than the one before, so the most gainful bits of all samples are the best
    choice, and they hold every sample's earlier bits before its later ones.
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
    """x as (data, ranges, bits a sample): every sample with as many bits as pay most, `bits` on average.

    Planes of a sample lie behind each other, ceil(elements / 8) bytes each, and samples behind each other.
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
    costs = sample_costs(rows, parts)
    widths = sample_bits(costs if sensitivity is None else costs * sensitivity.to(costs), bits)
    planes = rows.new_empty(samples, MOST_BITS, plane_bytes(elements), dtype=torch.uint8)
    for one in _blocks(rows):
        codes = rows.new_empty(rows[one].shape, dtype=torch.uint8)
        for place, size, first in parts:
            count = (place.stop - place.start) // size
            values = rows[one, place].reshape(-1, size).to(torch.float32)
            levels = 2.0 ** widths[one].repeat_interleave(count)
            own = reference.measure(values, levels)
            number = first + one.start * count
            noise = seed if stochastic else None
            found = reference.round_rows(values, own, levels[:, None], noise, number)
            ranges[number : number + own.shape[0]] = own
            codes[:, place] = found.view(-1, count * size)
        planes[one] = reference.pack_rows(codes, MOST_BITS).view(-1, MOST_BITS, plane_bytes(elements))
    ends = widths.cumsum(0, dtype=torch.int32)
    row = torch.arange(samples * bits, dtype=torch.int32, device=rows.device)
    sample = torch.searchsorted(ends, row, right=True)
    plane = row - (ends - widths)[sample]
    return planes[sample, plane].view(-1), ranges, widths


def dequantize_samples(
    data: Tensor,
    ranges: Tensor,
    widths: Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
    group_size: int,
    quant_groups: int,
) -> Tensor:
    """What `quantize_samples` packed, decoded into a contiguous tensor of `shape` and `dtype`."""
    samples, elements = sample_shape(shape)
    rows = data.new_empty(samples, elements, dtype=dtype)
    if not rows.numel():
        return rows.view(tuple(shape))
    stored = data.view(-1, plane_bytes(elements))
    starts = (widths.cumsum(0, dtype=torch.int32) - widths)[:, None]
    plane = torch.arange(MOST_BITS, dtype=torch.int32, device=data.device)
    parts = list(_parts(shape, group_size, quant_groups))
    for one in _blocks(rows):
        found = stored[(starts[one] + plane).clamp_max(stored.shape[0] - 1)]
        found = found * (plane < widths[one, None])[:, :, None]
        codes = reference.unpack_rows(found.view(found.shape[0], -1), MOST_BITS, elements)
        for place, size, first in parts:
            count = (place.stop - place.start) // size
            number = first + one.start * count
            own = ranges[number : number + codes.shape[0] * count]
            levels = 2 ** widths[one].to(torch.int32).repeat_interleave(count)[:, None]
            values = reference.values_of(codes[:, place].reshape(-1, size), own, levels)
            rows[one, place] = values.view(-1, count * size).to(dtype)
    return _from_samples(rows, shape, quant_groups)


def sample_costs(rows: Tensor, parts: Sequence[tuple[slice, int, int]]) -> Tensor:
    """Σ elements · range² over the groups of each sample, of what is finite in them.

    Stochastic rounding to b bits then has the variance costs / (6 · (2ᵇ - 1)²): ActNN, section 4.
    """
    costs = rows.new_zeros(rows.shape[0], dtype=torch.float64)
    for place, size, _ in parts:
        groups = rows[:, place].reshape(rows.shape[0], -1, size)
        low, high = reference.finite_ends(groups)
        spans = high.to(torch.float64) - low.to(torch.float64)
        costs += size * spans.square().nan_to_num(0.0, 0.0, 0.0).sum(1)
    return costs


def _parts(shape: Sequence[int], group_size: int, quant_groups: int) -> Iterator[tuple[slice, int, int]]:
    """(elements of each sample, size of their groups, number of their first group in all samples)."""
    whole, size, rest = sample_groups(shape, group_size, quant_groups)
    if whole:
        yield slice(0, whole * size), size, 0
    if rest:
        yield slice(whole * size, whole * size + rest), rest, sample_shape(shape)[0] * whole


def _blocks(rows: Tensor) -> Iterator[slice]:
    """Samples that are worked on at a time."""
    most = max(1, (CPU_BLOCK if rows.device.type == "cpu" else DEVICE_BLOCK) // rows.shape[1])
    for first in range(0, rows.shape[0], most):
        yield slice(first, min(first + most, rows.shape[0]))


def _as_samples(x: Tensor, quant_groups: int) -> Tensor:
    """x as (samples, elements), the groups of a sample after each other."""
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
