"""Small functions of tensors that the engine and several formulas use."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from mesa_tune.ops.devices import on_cpu


def wanted(grads: Sequence[Tensor | None], needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """Return the gradients that are needed, of a kernel that computes them for all inputs at once."""
    if False not in needs:
        return tuple(grads[: len(needs)])
    return tuple([grad if want else None for grad, want in zip(grads, needs, strict=False)])


def cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return `tensor` in `dtype`; itself if that is None (or its own: `to` takes a microsecond)."""
    return tensor if dtype is None or tensor.dtype is dtype else tensor.to(dtype)


_PIECE = 1 << 19
_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default


def scaled_rows(x: Tensor, factors: Tensor) -> Tensor:
    """Return `x` with each of the equal runs of neighbours in it times its factor; in place if contiguous.

    A CPU casts all of x to the factors' dtype and back, in copies. So it gets x in pieces.
    """
    count = factors.numel()
    rows, column = x.reshape(count, x.numel() // max(1, count)), factors.reshape(-1, 1)
    if not on_cpu(x) or x.dtype == factors.dtype or torch.compiler.is_compiling():
        return rows.mul_(column).view(x.shape)
    height = max(1, _PIECE // max(1, rows.shape[1]))
    for part, factor in zip(rows.split(height), column.split(height), strict=True):
        part.mul_(factor)
    return rows.view(x.shape)


Like = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor."""


def like(tensor: Tensor) -> Like:
    """Return the shape and dtype of `tensor`."""
    return tuple(tensor.shape), tensor.dtype


def gathered(grad: Tensor, operand: Like) -> Tensor:
    """Return `grad` summed to the shape that an operand had before broadcasting, in its dtype."""
    shape, dtype = operand
    return cast(grad if grad.shape == shape else grad.sum_to_size(shape), dtype)


def narrowed(index: Tensor, size: int) -> Tensor:
    """Return indices of a dimension of this size in the least number of bytes: 1, 2 or 4."""
    return index.to(torch.uint8 if size <= 1 << 8 else torch.int16 if size <= 1 << 15 else torch.int32)


_SMALL_VIEW = 8
"""A view of a storage at least 8 times as large is copied: saving the view would save the whole storage."""


def views_large_storage(_: Any, tensor: Tensor) -> bool:
    """Return whether `tensor` views a small part of its storage; a question of a `Call`, eager only."""
    if torch.compiler.is_compiling():
        return False
    return is_small_view(tensor, tensor.untyped_storage().nbytes())


def is_small_view(tensor: Tensor, storage_bytes: int) -> bool:
    """Return whether `tensor`, without what is expanded, is a small part of a storage of this size."""
    elements = prod([size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride])
    return 0 < elements * tensor.element_size() * _SMALL_VIEW <= storage_bytes


def layout_of(x: Tensor) -> torch.memory_format:
    """Return the memory format in which backward wants the decoded copy of `x`."""
    for dim, layout in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if x.dim() == dim and x.is_contiguous(memory_format=layout) and not x.is_contiguous():
            return layout
    return torch.contiguous_format


def distinct(tensors: Sequence[Tensor | None]) -> tuple[list[Tensor | None], list[int]]:
    """Return each tensor once, and the position of each original among these."""
    once: list[Tensor | None] = []
    positions = []
    for tensor in tensors:
        index = [i for i, other in enumerate(once) if other is tensor and tensor is not None]
        positions.append(index[0] if index else len(once))
        if not index:
            once.append(tensor)
    return once, positions


def summed(grads: tuple[Tensor | None, ...], positions: tuple[int, ...]) -> tuple[Tensor | None, ...]:
    """Return, for each tensor passed, the sum of its gradients."""
    sums: list[Tensor | None] = [None] * (max(positions) + 1)
    for grad, index in zip(grads, positions, strict=False):
        if grad is not None:
            total = sums[index]
            sums[index] = grad if total is None else total + grad
    return tuple(sums)


def unviewed(tensor: Tensor) -> Tensor:
    """Return `tensor` as no view: an in-place operation on a view that a Function returns would fail.

    In traced code, also return another tensor object: an input must not be returned as it is.
    """
    if torch.compiler.is_compiling():
        renewed: Tensor = _UNSAFE_VIEW(tensor, tensor.shape)
        return renewed
    return tensor if tensor._base is None else tensor.data
