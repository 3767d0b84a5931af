"""`SavedTensor`: a saved tensor in backward, decoded as a whole or in pieces.

What is hard is memory: a decoded copy of a large tensor and the gradient computed from it exist at the same
time, where a step's memory peaks. Some rows or samples at a time fit in one small buffer, mostly in the
processor's cache.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mesa_tune.codecs import CODECS, Spec
from mesa_tune.engine.storage import Packing, as_is, restore
from mesa_tune.engine.tensors import cast
from mesa_tune.ops.devices import on_cpu

LARGE, LARGE_ON_CUDA, PIECES = 1 << 22, 1 << 28, 4
"""A tensor of at least so many elements is decoded in `PIECES` pieces: it never exists as a whole.

On CUDA each piece costs a kernel, a product and an addition; half a gigabyte of 16-bit numbers is worth them.
"""


def _piece(rows: int) -> int | None:
    """Return how many rows of a large matrix are decoded at a time; None: all."""
    size = -(-rows // PIECES)
    return size if size < rows else None


class Total:
    """The sum of the results of pieces; 16-bit numbers are added in 32 bits."""

    def __init__(self) -> None:
        self.sum: Tensor | None = None
        self.dtype: torch.dtype | None = None

    def add(self, part: Tensor | None) -> None:
        """Add the result of one piece, which may be overwritten; None adds nothing."""
        if part is None:
            return
        self.dtype, wide = part.dtype, part.float() if part.element_size() == 2 else part
        self.sum = wide if self.sum is None else self.sum.add_(wide)

    @property
    def value(self) -> Tensor | None:
        """The sum in the dtype of its parts; None if there was none."""
        return None if self.sum is None else self.sum.to(self.dtype)


class SavedTensor:
    """A saved tensor: `parts`, stored as `packing` says under `spec`; decoded by `whole`."""

    __slots__ = ("packing", "parts", "spec")

    def __init__(self, parts: Sequence[Tensor], packing: Packing, spec: Spec | None) -> None:
        self.parts, self.packing, self.spec = parts, packing, spec

    @property
    def codec(self) -> Any:
        """The codec that packed it; None if it was saved as it is or repeated, and in traced code."""
        packed = self.packing.packed and self.packing.expanded is None and self.spec is not None
        return CODECS[self.spec.codec] if packed and not torch.compiler.is_compiling() else None  # type: ignore[union-attr]

    @staticmethod
    def of(tensor: Tensor) -> "SavedTensor":
        """Return a saved tensor that is `tensor` itself."""
        return SavedTensor([tensor], as_is(tensor.shape, tensor.dtype), None)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""
        return self.packing.expanded or self.packing.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensor."""
        return self.packing.dtype

    def whole(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the tensor, decoded; in `dtype` if one is given."""
        made = self.narrowed(dtype)
        return cast(
            made.parts[0] if made.spec is None else restore(made.parts, made.packing, made.spec), dtype
        )

    def cleared(self, zero_rows: Tensor, dtype: torch.dtype | None = None) -> Tensor | None:
        """Return `whole` with zeros in the rows whose bits are set; None if its codec cannot write them."""
        made = self.narrowed(dtype)
        packing, spec = made.packing, made.spec
        if spec is None or not packing.packed or packing.strides is not None or packing.expanded is not None:
            return None
        decode: Any = getattr(CODECS[spec.codec], "decode_cleared", None)
        return decode and cast(decode(made.parts, packing.shape, packing.dtype, spec, zero_rows), dtype)

    def narrowed(self, dtype: torch.dtype | None) -> "SavedTensor":
        """Return a tensor that is decoded in `dtype` without a copy in its own, as that copy cast would be.

        Return itself where `dtype` has no fewer bits, or its codec has one dtype.
        """
        own = self.packing.dtype
        if dtype is None or dtype.itemsize >= own.itemsize or not hasattr(self.codec, "decode_run"):
            return self
        return SavedTensor(self.parts, self.packing._replace(dtype=dtype), self.spec)

    def fused(self, op: Any, *arguments: Any) -> Any:
        """Return `op(data, ranges, *arguments, bits, levels, group_size)`, which decodes while it computes.

        Return None if it does not take these packed parts or arguments (`codec.fused`).
        """
        fused = getattr(self.codec, "fused", None)
        return None if fused is None else fused(op, self.parts, arguments, self.spec)

    def sampled(self) -> tuple[Tensor, Tensor] | None:
        """Return the indices of the stored rows, and the rows `(count, width)`, if rows were left out.

        Return None if all were stored, and for rows that do not lie along the last axis.
        """
        take = getattr(self.codec, "stored_rows", None)
        if take is None or self.spec is None or self.spec.axis != -1:
            return None
        indices, rows = take(self.parts, self.packing.shape, self.packing.dtype, self.spec)
        return indices, rows

    def by_rows(self, op: Any, like: Tensor, *arguments: Any) -> Any:
        """Return `fused(op, like, *arguments)` if the tensor was packed row by row in the shape of `like`."""
        fits = self.packing.shape == like.shape and self.is_row_major()
        return self.fused(op, like, *arguments) if fits else None

    def is_row_major(self) -> bool:
        """Return whether the tensor was packed row by row."""
        return self.packing.strides is None or self._is_packed_along(range(len(self.packing.shape)))

    def has_channels_last(self) -> bool:
        """Return whether it was packed in channels-last order: dimension 1 innermost."""
        return self._is_packed_along((0, *range(2, len(self.packing.shape)), 1))

    def _is_packed_along(self, dims: Sequence[int]) -> bool:
        """Return whether it was packed densely with its dimensions in this order, outermost first."""
        count, strides = 1, self.packing.strides
        if strides is None:
            return False
        for dim in reversed(dims):
            size = self.packing.shape[dim]
            if size > 1 and strides[dim] != count:
                return False
            count *= size
        return True

    def rows(self, dtype: torch.dtype, axes: int = 1) -> Iterator[tuple[int, Tensor]] | None:
        """Yield a large tensor some rows at a time, each time after the number of the first row.

        The last `axes` dimensions are one row. Return None if this is not possible, or not in `dtype`. Each
        piece overwrites the one before.
        """
        if not self._is_in_runs(dtype) or not self._is_large() or not self.is_row_major():
            return None
        shape = self.packing.shape
        width, rows = math.prod(shape[-axes:]), math.prod(shape[:-axes])
        size = _piece(rows)
        return None if size is None else self._decoded(rows, width, size)

    def has_samples(self, dtype: torch.dtype) -> bool:
        """Return whether samples (along dimension 0) can be decoded by themselves."""
        shape, strides = self.packing.shape, self.packing.strides
        if not self._is_in_runs(dtype) or not shape:
            return False
        return strides is None or strides[0] == math.prod(shape[1:])

    def samples(self, size: int, dtype: torch.dtype | None = None) -> Iterator[Tensor]:
        """Yield the tensor in its layout, `size` samples at a time.

        Each piece overwrites the one before. `dtype`: another one to decode it in.
        """
        shape, strides = self.packing.shape, self.packing.strides
        for _, run in self._decoded(shape[0], math.prod(shape[1:]), size, dtype):
            part = (run.shape[0], *shape[1:])
            yield run.view(part) if strides is None else run.as_strided(part, strides)

    def slices(self, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]] | None:
        """Yield a large tensor in its layout, some samples at a time, each time after their slice.

        Return None if this is not possible, or not in `dtype`. Each piece overwrites the one before.
        """
        shape = self.packing.shape
        size = _piece(shape[0]) if shape and self._is_large() else None
        if size is None:
            return None
        if self.has_samples(dtype):
            samples = self.samples(size)
        elif self._has_sampled_rows(dtype):
            samples = self.codec.decode_samples(self.parts, shape, dtype, self.spec, size)
        else:
            return None
        return ((slice(index * size, (index + 1) * size), x) for index, x in enumerate(samples))

    def _has_sampled_rows(self, dtype: torch.dtype) -> bool:
        """Return whether rows within samples were left out, on the CPU, where their number is known."""
        possible = hasattr(self.codec, "decode_samples") and self.packing.dtype == dtype
        axis = -1 if self.spec is None else self.spec.axis
        return possible and on_cpu(self.parts[0]) and len(self.packing.shape) + axis > 0

    def _is_large(self) -> bool:
        large = LARGE if on_cpu(self.parts[0]) else LARGE_ON_CUDA
        return math.prod(self.packing.shape) >= large

    def _is_in_runs(self, dtype: torch.dtype) -> bool:
        """Return whether a part of the memory can be decoded by itself."""
        possible = hasattr(self.codec, "decode_run") and self.packing.dtype == dtype
        return possible and self.spec is not None and not self.spec.quant_groups

    def _decoded(
        self, rows: int, width: int, size: int, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield `size` rows of `width` elements at a time, each time after the number of the first.

        The groups that a piece begins and ends in are decoded whole.
        """
        assert self.spec is not None
        count, group = rows * width, self.spec.group_size
        most = min(count, size * width + (2 * group if size * width % group else 0))
        buffer = self.parts[0].new_empty(most, dtype=dtype or self.packing.dtype)
        for first in range(0, rows, size):
            begin, end = first * width, min(first + size, rows) * width
            start, stop = begin // group * group, min(count, -(-end // group) * group)
            self.codec.decode_run(self.parts, start, stop - start, self.spec, buffer[: stop - start])
            yield first, buffer[begin - start : end - start].view(-1, width)
