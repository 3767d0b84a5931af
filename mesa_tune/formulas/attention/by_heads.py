"""Attention's gradients a head at a time, without running its forward again.

With P = softmax(s q kᵀ + m), and D what dropout multiplies it by:  dv = (P D)ᵀ g,  dP = D (g vᵀ),
dS = P (dP − Σ dP P),  dq = s dS k,  dk = s dSᵀ q (Vaswani et al. 2017, equation 1, differentiated). A fused
backward wants the output and log-sum-exp of its forward, two products more; `fused_ops.attention_backward`
makes whole rows of P instead, of so few queries that they stay in the cache. Packed tensors are decoded some
samples at a time, into memory that the next reuse. So are tensors of 16 bits: their gradients are computed in
32, which without a matrix unit takes less time than a second forward and a backward in 16.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from mesa_tune import ops
from mesa_tune.engine.formula import Grads, Needs
from mesa_tune.engine.saved import SavedTensor
from mesa_tune.ops.devices import on_cpu
from mesa_tune.ops.fused import ATTENTION_BACKWARD

HEADS_A_THREAD = 16
"""So many are decoded at a time, that threads end about together; but no more than half of all samples."""

_NATIVE = ops.native("cpu")

Shape = tuple[int, ...]


class Scores(NamedTuple):
    """What makes P of q and k: a scale, a mask (bool, or added), and dropout.

    `bits` has one for each element of P that dropout, of probability `dropout`, let through.
    """

    scale: float
    causal: bool = False
    mask: Tensor | None = None
    dropout: float = 0.0
    bits: Tensor | None = None

    @property
    def raised(self) -> float:
        """What dropout multiplies by what it lets through."""
        return 1 / (1 - self.dropout) if self.dropout < 1 else 0.0


class Samples(NamedTuple):
    """Queries, keys and values of some samples, the first of which is number `first`."""

    first: int
    q: Tensor
    k: Tensor
    v: Tensor


def serves(shapes: Sequence[Shape], grad: Tensor) -> bool:
    """Whether `gradients` are those of q, k and v of these shapes, for this incoming one."""
    q, k, v = shapes
    alike = len(q) == 4 and q[:2] == k[:2] == v[:2] and k[2] == v[2] and q[3] == k[3]
    if not (_NATIVE and alike and math.prod(q) * k[2] > 0 < v[3]):
        return False
    if torch.compiler.is_compiling():
        # The number of threads cannot be traced; of 16 bits, operations would repeat for some samples each.
        return on_cpu(grad) and grad.dtype == torch.float32
    served = grad.dtype == torch.float32 or (grad.element_size() == 2 and not _has_matrix_unit())
    return on_cpu(grad) and served and q[0] * q[1] >= torch.get_num_threads()


@cache
def _has_matrix_unit() -> bool:
    """Whether products of 16-bit numbers are so fast on this processor that a second forward costs less."""
    return bool(torch.cpu._is_amx_tile_supported())


def packed(tensors: Sequence[SavedTensor]) -> Iterator[Samples] | None:
    """Yield some samples at a time of packed tensors, in float32; None where that is not possible."""
    if not all(tensor.has_samples(tensor.dtype) for tensor in tensors):
        return None
    size = max(1, _at_a_time(tensors[0].shape))
    streams = zip(*(tensor.samples(size, torch.float32) for tensor in tensors), strict=True)
    return (Samples(index * size, *parts) for index, parts in enumerate(streams))


def whole(q: Tensor, k: Tensor, v: Tensor) -> Iterator[Samples]:
    """Yield all samples at once; of 16-bit tensors, which are copied in 32 bits, some at a time."""
    size = q.shape[0] if q.dtype == torch.float32 else max(1, _at_a_time(q.shape))
    for first in range(0, q.shape[0], size):
        part = slice(first, first + size)
        yield Samples(first, q[part], k[part], v[part])


def _at_a_time(shape: Shape) -> int:
    samples, heads = shape[:2]
    return min(-(-HEADS_A_THREAD * torch.get_num_threads() // heads), samples // 2)


def gradients(
    scores: Scores, needs: Needs, shapes: Sequence[Shape], samples: Iterable[Samples], grad: Tensor
) -> Grads:
    """Return the gradients of queries, keys and values, of these `shapes` (batch, heads, tokens, width)."""
    (batch, heads, queries, _), keys = shapes[0], shapes[1][2]
    bias = None
    if scores.mask is not None:
        bias = as_bias(scores.mask, torch.float32).float().expand(batch, heads, queries, keys)
    found = [_laid_out(shape, grad) if want else None for shape, want in zip(shapes, needs, strict=False)]
    for first, q, k, v in samples:
        incoming, others = grad, [bias, *found]
        if q.shape[0] < batch:
            part = slice(first, first + q.shape[0])
            incoming, others = grad[part], [None if each is None else each[part] for each in others]
        results = [None if each is None else _in_32_bits(each) for each in others[1:]]
        ATTENTION_BACKWARD(
            *[_dense(each.float()) for each in (q, k, v, incoming)],
            others[0],
            scores.bits,
            first * heads * queries * keys,
            scores.scale,
            scores.causal,
            scores.raised,
            *results,
        )
        for target, result in zip(others[1:], results, strict=True):
            if target is not None and result is not None and target is not result:
                target.copy_(result)
    return tuple(found)


def as_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask as it is added: a bool one lets through where it is true."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -math.inf)


def _in_32_bits(result: Tensor) -> Tensor:
    """Return `result`, or of 16 bits an empty tensor like it."""
    return result if result.dtype == torch.float32 else torch.empty_like(result, dtype=torch.float32)


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _laid_out(shape: Shape, grad: Tensor) -> Tensor:
    """An empty gradient, heads beside one another as the projections before attention have them."""
    _, heads, tokens, width = shape
    return grad.new_empty_strided(shape, (tokens * heads * width, width, heads * width, 1))
