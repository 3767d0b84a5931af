"""Quantization to 1 to 8 bits by groups: ActNN (arXiv 2104.14129), section 4; Mesa (2111.11124).

A group's range is two numbers of 32 bits: its least element and the step between levels. For a tensor of 16
bits the least and the greatest element, of 16 bits each, are stored instead.
"""

import math
from collections.abc import Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from mesa_tune.codecs.spec import Memory, Spec
from mesa_tune.ops import reference
from mesa_tune.ops.devices import on_cpu
from mesa_tune.ops.fused import QUANTIZE_MAP, Fused
from mesa_tune.ops.maps import KINDS, Deferred

LARGEST_GROUP = 4096
"""Largest group size of the kernels that decode some rows at a time, in elements."""

_QUANTIZE = torch.ops.mesa_tune.quantize.default
_QUANTIZE_ENDS = torch.ops.mesa_tune.quantize_ends.default
_QUANTIZE_ROWS = torch.ops.mesa_tune.quantize_rows.default
_DEQUANTIZE_OUT = torch.ops.mesa_tune.dequantize_out.default
_DEQUANTIZE = torch.ops.mesa_tune.dequantize.default


def encode(x: Tensor, spec: Spec, key: Tensor, memory: Memory | None = None) -> list[Tensor]:
    """Return packed levels (uint8) and ranges `[groups, 2]`: float32, or their ends in 16 bits."""
    op = _QUANTIZE if x.element_size() > 2 else _QUANTIZE_ENDS
    return [*op(x, spec.bits, spec.levels, spec.group_size, spec.quant_groups, spec.stochastic, key)]


def encode_rows(x: Tensor, spec: Spec, key: Tensor) -> list[Tensor]:
    """Return `encode` of x, and one bit per row: whether it is zero; groups follow the last dimension."""
    return [*_QUANTIZE_ROWS(x, spec.bits, spec.levels, spec.group_size, spec.stochastic, key)]


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
    data, ranges = parts
    sizes = (spec.bits, spec.levels, spec.group_size, spec.quant_groups)
    if torch.compiler.is_compiling():
        result: Tensor = _DEQUANTIZE(data, ranges, shape, dtype, *sizes)
        return result
    # An op of ours that takes a list of sizes would be slower to call.
    out = data.new_empty(shape, dtype=dtype)
    _DEQUANTIZE_OUT(data, ranges, *sizes, out)
    return out


def decode_cleared(
    parts: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype, spec: Spec, zero_rows: Tensor
) -> Tensor:
    """Return `decode` with zeros in the rows, along the last dimension, whose bits are set."""
    sizes = (spec.bits, spec.levels, spec.group_size, spec.quant_groups)
    result: Tensor = _DEQUANTIZE(*parts, shape, dtype, *sizes, zero_rows)
    return result


_FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_DTYPE, _NONE = repeat("dtype"), repeat(None)


def fused(op: Fused, parts: Sequence[Tensor], arguments: Sequence[Any], spec: Spec) -> Any:
    """Return `op` of the packed parts and these arguments; None if it does not take them.

    It takes contiguous groups, and of floating-point numbers those of its `dtypes`. Ops that are not for
    `any_size` take groups of up to `LARGEST_GROUP` elements; those that are not `everywhere` run on the CPU.
    """
    data, ranges = parts
    dtypes = map(getattr, (ranges, *arguments), _DTYPE, _NONE)
    if spec.quant_groups or not (_FLOATS - op.dtypes).isdisjoint(dtypes):
        return None
    if not (op.any_size or spec.group_size <= LARGEST_GROUP) or not (op.everywhere or on_cpu(data)):
        return None
    return op.kernel(data, ranges, *arguments, spec.bits, spec.levels, spec.group_size)


def decode_run(parts: Sequence[Tensor], first: int, count: int, spec: Spec, out: Tensor) -> None:
    """Decode elements `[first, first + count)`, which are whole groups, into `out`."""
    data, ranges = parts
    size = spec.group_size
    begin, end = first // size, (first + count + size - 1) // size
    width = spec.bits * reference.plane_bytes(size)
    data, ranges = data[begin * width : end * width], ranges[begin:end]
    _DEQUANTIZE_OUT(data, ranges, spec.bits, spec.levels, size, 0, out)


def packed_bytes(shape: Sequence[int], spec: Spec, element_size: int = 4) -> int:
    """Return the bytes of packed levels and ranges; an end has `element_size` bytes, 4 at most."""
    numel = math.prod(shape)
    groups = reference.group_count(numel, spec.group_size, spec.quant_groups)
    data = reference.data_bytes(numel, spec.bits, spec.group_size, spec.quant_groups)
    return data + 2 * min(element_size, 4) * groups
