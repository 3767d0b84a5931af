"""The codecs' ops. Compilers cannot see inside them, so compiled code saves only their packed results.

Importing this module defines `torch.ops.mesa_tune.{extents, quantize_within, sparsify, densify,
pack_windows, unpack_windows, quantize_samples, dequantize_samples, choose_rows, sample_rows, pack_levels,
unpack_levels, pack_positions, unpack_positions}`. They are pure. Their default kernels are in
`mesa_tune.ops.reference`: `codecs`, `windows`, `sampling`, `levels` and `positions`. The native library has
CPU kernels for all but those of samples and `sample_rows`, and CUDA kernels for all but these and
`choose_rows`, which sorts.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mesa_tune import ops
from mesa_tune.ops import reference
from mesa_tune.ops.reference import codecs as reference_codecs
from mesa_tune.ops.reference import levels as reference_levels
from mesa_tune.ops.reference import positions as reference_positions
from mesa_tune.ops.reference import sampling as reference_sampling
from mesa_tune.ops.reference import windows as reference_windows

_GROUPS = "int group_size, int quant_groups"
_SIZES = f"int bits, int levels, {_GROUPS}"
_SAMPLES = "(Tensor data, Tensor ranges, Tensor widths)"
_NOISE = "bool stochastic, Tensor? seed"
_SCHEMAS = (
    f"extents(Tensor x, {_GROUPS}) -> Tensor",
    f"quantize_within(Tensor x, Tensor ranges, {_SIZES}, {_NOISE}) -> Tensor",
    "sparsify(Tensor x, SymInt count) -> (Tensor bitmap, Tensor survivors)",
    "densify(Tensor bitmap, Tensor survivors, SymInt[] shape) -> Tensor",
    f"quantize_samples(Tensor x, int bits, {_GROUPS}, {_NOISE}, Tensor? sensitivity) -> {_SAMPLES}",
    "pack_windows(Tensor indices, SymInt[] windows) -> Tensor",
    "unpack_windows(Tensor data, SymInt[] windows, SymInt[] shape) -> Tensor",
    f"dequantize_samples({_SAMPLES[1:-1]}, SymInt[] shape, ScalarType dtype, {_GROUPS}) -> Tensor",
    "choose_rows(Tensor norms, SymInt count, Tensor key) -> (Tensor index, Tensor inverse)",
    "sample_rows(Tensor x, int axis, SymInt count, Tensor key) -> (Tensor index, Tensor rows)",
    "pack_levels(Tensor x, float[] boundaries, int map) -> (Tensor data, Tensor offset)",
    "unpack_levels(Tensor data, Tensor offset, float[] values, SymInt[] shape, ScalarType dtype) -> Tensor",
    "pack_positions(Tensor bitmap, SymInt numel, SymInt count, int low) -> Tensor",
    "unpack_positions(Tensor data, SymInt numel, SymInt count, int low) -> Tensor",
)


def sample_bytes(shape: Sequence[int], bits: int) -> int:
    """Return the bytes of the packed codes of `quantize_samples`."""
    samples, elements = reference_codecs.sample_shape(shape)
    return samples * bits * reference.plane_bytes(elements)


def _fake_extents(x: Tensor, group_size: int, quant_groups: int) -> Tensor:
    return x.new_empty(reference.group_count(x.numel(), group_size, quant_groups), 2, dtype=torch.float32)


def _fake_quantize_within(
    x: Tensor, ranges: Tensor, bits: int, levels: int, group_size: int, quant_groups: int, *noise: object
) -> Tensor:
    size = reference.data_bytes(x.numel(), bits, group_size, quant_groups)
    return x.new_empty(size, dtype=torch.uint8)


def _fake_sparsify(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    return x.new_empty(reference.plane_bytes(x.numel()), dtype=torch.uint8), x.new_empty(count)


def _fake_densify(bitmap: Tensor, survivors: Tensor, shape: Sequence[int]) -> Tensor:
    return survivors.new_empty(shape)


def _fake_pack_windows(indices: Tensor, windows: Sequence[int]) -> Tensor:
    size = reference_windows.offset_bits(windows) * reference.plane_bytes(indices.numel())
    return indices.new_empty(size, dtype=torch.uint8)


def _fake_unpack_windows(data: Tensor, windows: Sequence[int], shape: Sequence[int]) -> Tensor:
    return data.new_empty(shape, dtype=torch.int64)


def _fake_quantize_samples(
    x: Tensor, bits: int, group_size: int, quant_groups: int, *noise: object
) -> tuple[Tensor, Tensor, Tensor]:
    rows = reference_codecs.sample_rows(x.shape, group_size, quant_groups)
    return (
        x.new_empty(sample_bytes(x.shape, bits), dtype=torch.uint8),
        x.new_empty(rows, 2, dtype=torch.float32),
        x.new_empty(reference_codecs.sample_shape(x.shape)[0], dtype=torch.uint8),
    )


def _fake_dequantize_samples(
    data: Tensor,
    ranges: Tensor,
    widths: Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
    *groups: int,
) -> Tensor:
    return data.new_empty(shape, dtype=dtype)


def as_rows(x: Tensor, axis: int) -> Tensor:
    """Return a view of x, `(*, width)`, whose last dimension is a row; a vector is one row."""
    return x.reshape(1, -1) if x.dim() < 2 else x.movedim(axis, -1)


def sample_rows(x: Tensor, axis: int, count: int, key: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices (int32, ascending) of `count` rows of x, and the rows, each divided by its p_i.

    The elements of a row lie along `axis` (below 0). The rows have shape `(count, width)` and the dtype of x.
    A row with NaN or Inf is stored for certain, if `count` allows.
    """
    rows = as_rows(x.detach(), axis)
    if count == 0:
        return x.new_empty(0, dtype=torch.int32), x.new_empty(0, rows.shape[-1])
    norms = torch.linalg.vector_norm(rows, dim=-1).reshape(-1).to(torch.float32)
    index, inverse = RAW.choose_rows(norms, count, key.to(x.device, non_blocking=True))
    if rows.is_contiguous():
        values = rows.flatten(0, -2).index_select(0, index)
    else:
        values = rows[torch.unravel_index(index, rows.shape[:-1])]
    return index, values.mul_(inverse[:, None])


def _fake_choose_rows(norms: Tensor, count: int, key: Tensor) -> tuple[Tensor, Tensor]:
    return norms.new_empty(count, dtype=torch.int32), norms.new_empty(count)


def _fake_sample_rows(x: Tensor, axis: int, count: int, key: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(count, dtype=torch.int32), x.new_empty(count, as_rows(x, axis).shape[-1])


def _fake_pack_levels(x: Tensor, boundaries: Sequence[float], map: int) -> tuple[Tensor, Tensor]:
    size = reference_levels.level_bits(len(boundaries) + 1) * reference.plane_bytes(x.numel())
    return x.new_empty(size, dtype=torch.uint8), x.new_empty(1, dtype=torch.float32)


def _fake_unpack_levels(
    data: Tensor, offset: Tensor, values: Sequence[float], shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    return data.new_empty(shape, dtype=dtype)


def _fake_pack_positions(bitmap: Tensor, numel: int, count: int, low: int) -> Tensor:
    return bitmap.new_empty(reference_positions.position_bytes(numel, count, low))


def _fake_unpack_positions(data: Tensor, numel: int, count: int, low: int) -> Tensor:
    return data.new_empty(reference.plane_bytes(numel))


_KERNELS: ops.Kernels = {
    "extents": (reference_codecs.extents, _fake_extents),
    "quantize_within": (reference_codecs.quantize_within, _fake_quantize_within),
    "sparsify": (reference_codecs.sparsify, _fake_sparsify),
    "densify": (reference_codecs.densify, _fake_densify),
    "pack_windows": (reference_windows.pack_windows, _fake_pack_windows),
    "unpack_windows": (reference_windows.unpack_windows, _fake_unpack_windows),
    "quantize_samples": (reference_codecs.quantize_samples, _fake_quantize_samples),
    "dequantize_samples": (reference_codecs.dequantize_samples, _fake_dequantize_samples),
    "choose_rows": (reference_sampling.choose_rows, _fake_choose_rows),
    "sample_rows": (sample_rows, _fake_sample_rows),
    "pack_levels": (reference_levels.pack_levels, _fake_pack_levels),
    "unpack_levels": (reference_levels.unpack_levels, _fake_unpack_levels),
    "pack_positions": (reference_positions.pack_positions, _fake_pack_positions),
    "unpack_positions": (reference_positions.unpack_positions, _fake_unpack_positions),
}


_library = ops.define("FRAGMENT", _SCHEMAS, _KERNELS)

RAW = torch.ops.mesa_tune
"""The namespace `torch.ops.mesa_tune`. Import it from here, so that its ops are defined."""
