"""Attention's gradients a head at a time, without running its forward again.

With P = softmax(s q kᵀ + m), and D what dropout multiplies it by:  dv = (P D)ᵀ g,  dP = D (g vᵀ),
dS = P (dP − Σ dP P),  dq = s dS k,  dk = s dSᵀ q (Vaswani et al. 2017, equation 1, differentiated). A fused
backward wants the output and log-sum-exp of its forward, two products more; `fused_ops.attention_backward`
makes whole rows of P instead, of so few queries that they stay in the cache. Packed tensors are decoded some
samples at a time, into memory that the next reuse.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mesa_tune import ops
from mesa_tune.engine.formula import Grads, Needs
from mesa_tune.engine.saved import SavedTensor
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
    return grad.is_cpu and grad.dtype == torch.float32 and q[0] * q[1] >= torch.get_num_threads()


def packed(tensors: Sequence[SavedTensor]) -> Iterator[Samples] | None:
    """Yield some samples at a time of packed tensors; None where that is not possible."""
    steps = [tensor.sample_step(torch.float32) for tensor in tensors]
    if None in steps:
        return None
    samples, heads = tensors[0].shape[:2]
    step = math.lcm(*(step for step in steps if step is not None))
    size = min(-(-HEADS_A_THREAD * torch.get_num_threads() // heads), samples // 2)
    size = max(1, -(-size // step)) * step
    streams = zip(*(tensor.samples(size) for tensor in tensors), strict=True)
    return (Samples(index * size, *parts) for index, parts in enumerate(streams))


def gradients(
    scores: Scores, needs: Needs, shapes: Sequence[Shape], samples: Iterable[Samples], grad: Tensor
) -> Grads:
    """Return the gradients of queries, keys and values, of these `shapes` (batch, heads, tokens, width)."""
    (batch, heads, queries, _), keys = shapes[0], shapes[1][2]
    bias = None
    if scores.mask is not None:
        bias = as_bias(scores.mask, grad.dtype).expand(batch, heads, queries, keys)
    found = [_laid_out(shape, grad) if want else None for shape, want in zip(shapes, needs, strict=False)]
    for first, q, k, v in samples:
        incoming, others = grad, [bias, *found]
        if q.shape[0] < batch:
            part = slice(first, first + q.shape[0])
            incoming, others = grad[part], [None if each is None else each[part] for each in others]
        ATTENTION_BACKWARD(
            *[_dense(each) for each in (q, k, v, incoming)],
            others[0],
            scores.bits,
            first * heads * queries * keys,
            scores.scale,
            scores.causal,
            scores.raised,
            *others[1:],
        )
    return tuple(found)


def as_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask as it is added: a bool one lets through where it is true."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -math.inf)


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _laid_out(shape: Shape, grad: Tensor) -> Tensor:
    """An empty gradient, heads beside one another as the projections before attention have them."""
    _, heads, tokens, width = shape
    return grad.new_empty_strided(shape, (tokens * heads * width, width, heads * width, 1))
