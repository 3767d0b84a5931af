"""A kept tensor in its packed form, and ways to use it without decoding it as a whole.

A decoded copy of a large tensor would stand beside the gradient that is made of it, where a step's memory
peaks. What is decoded some rows or samples at a time lies in one small buffer instead, mostly in the cache.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mesa_tune.codecs import CODECS, Spec
from mesa_tune.engine.rematerialize import restored
from mesa_tune.engine.storage import Meta

LARGE, PIECES = 1 << 22, 4
"""An input of at least so many elements is decoded in so many pieces: it is never there as a whole."""


def _piece(rows: int, step: int) -> int | None:
    """How many rows of a `LARGE` matrix are decoded at a time, a multiple of `step`; None: it stays whole."""
    each = -(-rows // (PIECES * step)) * step
    return each if each < rows else None


class Total:
    """The sum of what pieces give; that of 16-bit numbers is made in 32 bits."""

    def __init__(self) -> None:
        self.sum: Tensor | None = None
        self.dtype: torch.dtype | None = None

    def add(self, more: Tensor | None) -> None:
        """Adds one piece's part, a tensor that nobody else needs, or nothing."""
        if more is None:
            return
        self.dtype, wide = more.dtype, more.float() if more.element_size() == 2 else more
        self.sum = wide if self.sum is None else self.sum.add_(wide)

    @property
    def value(self) -> Tensor | None:
        """The sum in the dtype of its parts; None if there was none."""
        return None if self.sum is None else self.sum.to(self.dtype)


class Held(NamedTuple):
    """A kept tensor that is still packed; with a recipe in place of `meta`, only to be had as a `whole`."""

    parts: Sequence[Tensor]
    meta: Meta
    spec: Spec

    @property
    def codec(self) -> Any:
        """The codec that packed it; None if it was kept raw, expanded, or by a rule of its own."""
        return CODECS[self.spec.codec] if self.meta.coded and self.meta.expanded is None else None

    def whole(self) -> Tensor:
        """The tensor, decoded."""
        return restored(self.meta, self.parts, self.spec)

    def times(self, factor: Tensor) -> Tensor:
        """`factor` times the tensor, in one pass where it has the same shape and the codec can."""
        times = self._by_rows("decode_times", factor) if self.meta.dtype == factor.dtype else None
        product: Tensor | None = None if times is None else times(self.parts, factor, self.spec)
        return factor * self.whole() if product is None else product

    def norm_backward(
        self, grad: Tensor, rstd: Tensor, weight: Tensor, centered: bool
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Gradients of the input, the weight and the bias of a norm over rows, whose x̂ this is, in one pass.

        None where that is not possible.
        """
        decode = self._by_rows("decode_norm", grad)
        if decode is None:
            return None
        found: tuple[Tensor, Tensor, Tensor] | None
        found = decode(self.parts, grad, rstd, weight, centered, self.spec)
        return found

    def batch_norm_backward(
        self, grad: Tensor, rstd: Tensor, weight: Tensor | None, fixed: bool
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Gradients of the input, the weight and the bias of a batch norm, whose x̂ this is, in one pass;
        `fixed`: by statistics that are no part of the batch.

        None where that is not possible.
        """
        decode = getattr(self.codec, "decode_batch_norm", None)
        last = not self._is_row_major()
        if decode is None or self.meta.shape != grad.shape or (last and not self._has_channels_last()):
            return None
        found: tuple[Tensor, Tensor, Tensor] | None
        laid_out = grad.movedim(1, -1) if last else grad
        found = decode(self.parts, laid_out, rstd, weight, last, fixed, self.spec)
        return (found[0].movedim(-1, 1), *found[1:]) if last and found is not None else found

    def softmax_backward(self, grad: Tensor) -> Tensor | None:
        """The gradient of a softmax along the last dimension, whose output this is, in one pass; None where
        that is not possible.
        """
        decode = self._by_rows("decode_softmax", grad)
        dx: Tensor | None = None if decode is None else decode(self.parts, grad, self.spec)
        return dx

    def cross_entropy_backward(
        self,
        target: Tensor,
        surplus: Tensor,
        weight: Tensor | None,
        grad: Tensor,
        ignore: int,
        mean: bool,
    ) -> Tensor | None:
        """The gradient of a cross-entropy for class indices, whose probabilities `(*, classes)` this is, in
        one pass; None where that is not possible.
        """
        decode = getattr(self.codec, "decode_cross_entropy", None)
        if decode is None or not self._is_row_major():
            return None
        dx: Tensor | None
        classes = self.meta.shape[-1]
        dx = decode(self.parts, target, surplus, weight, grad, classes, ignore, mean, self.spec)
        return dx

    def linear_backward(
        self, grad: Tensor, weight: Tensor | None, bias: bool, transposed: bool = False
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Gradients of the input, the weight and the bias of a linear layer, whose input `(*, in)` this is,
        in one pass: of the input if the weight is given, `(out, in)` or `transposed`, of the bias if there is
        one.

        None where that is not possible.
        """
        decode = getattr(self.codec, "decode_linear", None)
        if decode is None or not self._is_row_major():
            return None
        found: tuple[Tensor, Tensor, Tensor] | None
        found = decode(self.parts, grad, weight, self.meta.shape[-1], transposed, bias, self.spec)
        return found

    def rows(self, dtype: torch.dtype, axes: int = 1) -> Iterator[tuple[int, Tensor]] | None:
        """A `LARGE` tensor as a matrix whose rows are its last `axes` dimensions, some rows at a time, each
        time with the first one's number.

        None where that is not possible, or not in `dtype`. What is given out is overwritten by the next.
        """
        if not self._is_large() or not self._is_in_runs(dtype) or not self._is_row_major():
            return None
        width, rows = math.prod(self.meta.shape[-axes:]), math.prod(self.meta.shape[:-axes])
        each = _piece(rows, self._groups_begin(width))
        return None if each is None else self._decoded(rows, width, each)

    def sample_step(self, dtype: torch.dtype) -> int | None:
        """Each so many samples (along its first dimension) can be decoded by themselves; None: only all."""
        width, strides = math.prod(self.meta.shape[1:]), self.meta.strides
        if (
            not self.meta.shape
            or not self._is_in_runs(dtype)
            or (strides is not None and strides[0] != width)
        ):
            return None
        return self._groups_begin(width)

    def samples(self, each: int) -> Iterator[Tensor]:
        """The tensor laid out as it was, `each` samples at a time: a multiple of `sample_step`.

        What is given out is overwritten by the next.
        """
        shape, strides = self.meta.shape, self.meta.strides
        for _, run in self._decoded(shape[0], math.prod(shape[1:]), each):
            part = (run.shape[0], *shape[1:])
            yield run.view(part) if strides is None else run.as_strided(part, strides)

    def parts_of(self, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]] | None:
        """A `LARGE` tensor some samples at a time, each time with these samples' place, laid out as it was.

        None where that is not possible, or not in `dtype`. What is given out is overwritten by the next.
        """
        step = self.sample_step(dtype) if self._is_large() else None
        each = None if step is None else _piece(self.meta.shape[0], step)
        if each is None:
            return None
        return ((slice(place * each, (place + 1) * each), x) for place, x in enumerate(self.samples(each)))

    def _is_large(self) -> bool:
        return math.prod(self.meta.shape) >= LARGE

    def _is_in_runs(self, dtype: torch.dtype) -> bool:
        """Whether a part of the memory can be decoded by itself."""
        known = self.meta.dtype == dtype and not self.spec.quant_groups
        return known and hasattr(self.codec, "decode_run")

    def _groups_begin(self, width: int) -> int:
        """Each so many rows of `width` elements begin with a group."""
        return self.spec.group_size // math.gcd(self.spec.group_size, width)

    def _decoded(self, rows: int, width: int, each: int) -> Iterator[tuple[int, Tensor]]:
        """The tensor as a matrix, `each` of its rows at a time, with the first one's number."""
        buffer = self.parts[0].new_empty(min(each, rows), width, dtype=self.meta.dtype)
        for first in range(0, rows, each):
            part = buffer[: min(each, rows - first)]
            self.codec.decode_run(self.parts, first * width, part.numel(), self.spec, part)
            yield first, part

    def _by_rows(self, name: str, like: Tensor) -> Any:
        """The codec's function of that name, if this lies row by row in the shape of `like`; else None."""
        decode = getattr(self.codec, name, None)
        return decode if self.meta.shape == like.shape and self._is_row_major() else None

    def _is_row_major(self) -> bool:
        """Whether it lies in memory row by row."""
        return self.meta.strides is None or self._is_packed_along(range(len(self.meta.shape)))

    def _has_channels_last(self) -> bool:
        """Whether dimension 1 lies innermost in memory, the others row by row."""
        return self._is_packed_along((0, *range(2, len(self.meta.shape)), 1))

    def _is_packed_along(self, dims: Sequence[int]) -> bool:
        """Whether its memory is dense, and its dimensions lie there in this order, the outermost first."""
        count, strides = 1, self.meta.strides
        assert strides is not None
        for dim in reversed(dims):
            size = self.meta.shape[dim]
            if size > 1 and strides[dim] != count:
                return False
            count *= size
        return True
