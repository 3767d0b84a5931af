"""Attention's gradients some heads at a time, without running its forward again.

With P = softmax(s q kᵀ + m), and D what dropout multiplies it by:  dv = (P D)ᵀ g,  dP = D (g vᵀ),
dS = P (dP − Σ dP P),  dq = s dS k,  dk = s dSᵀ q (Vaswani et al. 2017, equation 1, differentiated). A fused
backward wants the output and log-sum-exp of its forward, two products more; here P is made whole, of so few
heads that it stays in the cache. Packed tensors are decoded by the sample, into memory that the next reuse.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mesa_tune import ops
from mesa_tune.functional.formula import Needs
from mesa_tune.functional.held import Held

SCORES = 1 << 19
"""Elements of P at a time: of all that were tried, the fastest for 49 to 512 tokens on two cores. But no more
than half the queries, so that it never sets the peak of a small layer.
"""

_MOST = 1 << 20
"""Beyond so many scores a head, a fused kernel is as fast."""

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


def serves(shapes: Sequence[Shape], kinds: Sequence[Tensor], masked: bool, dropped: bool) -> bool:
    """Whether `gradients` are those of q, k and v of these shapes, and of the dtype and device of `kinds`.

    Without dropout, what has a mask is left to the fused kernel: its forward is cheap where a mask is causal.
    """
    q, k, v = shapes
    alike = len(q) == 4 and q[:2] == k[:2] == v[:2] and k[2] == v[2] and q[3] == k[3]
    if not alike or not 0 < q[2] * k[2] <= _MOST or not math.prod(q) > 0 < v[3]:
        return False
    return (dropped or not masked) and all(x.is_cpu and x.dtype == torch.float32 for x in kinds)


def whole(q: Tensor, k: Tensor, v: Tensor) -> Iterator[Samples]:
    """Some samples at a time of tensors that are there."""
    each = _samples(tuple(q.shape), k.shape[2], 1)
    for first in range(0, q.shape[0], each):
        part = slice(first, first + each)
        yield Samples(first, q[part], k[part], v[part])


def packed(held: Sequence[Held]) -> Iterator[Samples] | None:
    """Some samples at a time of what is packed; None where that is not possible."""
    steps = [each.sample_step(torch.float32) for each in held]
    if None in steps:
        return None
    step = math.lcm(*(each for each in steps if each is not None))
    each = _samples(held[0].meta.shape, held[1].meta.shape[2], step)
    streams = zip(*(one.contiguous_samples(each) for one in held), strict=True)
    return (Samples(place * each, *some) for place, some in enumerate(streams))


def _samples(q: Shape, keys: int, step: int) -> int:
    """How many samples at a time: a multiple of `step`, so that also their bits begin with a byte."""
    step = math.lcm(step, 8 // math.gcd(8, q[1] * q[2] * keys))
    return -(-max(1, _at_once(q) // (q[1] * q[2] * keys)) // step) * step


def _at_once(q: Shape) -> int:
    return min(SCORES, math.prod(q) // 2)


def gradients(
    scores: Scores, needs: Needs, shapes: Sequence[Shape], samples: Iterable[Samples], grad: Tensor
) -> tuple[Tensor | None, ...]:
    """Gradients of queries, keys and values, of these `shapes` (batch, heads, tokens, width)."""
    bias = _bias(scores, (*shapes[0][:3], shapes[1][2]), grad)
    found = [_laid_out(shape, grad) if want else None for shape, want in zip(shapes, needs, strict=False)]
    for some in samples:
        part = slice(some.first, some.first + some.q.shape[0])
        into = [None if each is None else each[part] for each in found]
        own = scores._replace(mask=None if bias is None else bias[part])
        _add(own, into, some, grad[part], _at_once(shapes[0]))
    return tuple(found)


def _bias(scores: Scores, shape: Shape, grad: Tensor) -> Tensor | None:
    """What is added to the scores, in their shape."""
    if scores.causal:
        return grad.new_full(shape[2:], -math.inf).triu_(1).expand(shape)
    return None if scores.mask is None else as_bias(scores.mask, grad.dtype).expand(shape)


def as_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask as it is added: a bool one lets through where it is true."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -math.inf)


def _laid_out(shape: Shape, grad: Tensor) -> Tensor:
    """An empty gradient, heads beside one another as the projections before attention have them."""
    batch, heads, tokens, width = shape
    return grad.new_empty(batch, tokens, heads, width).transpose(1, 2)


def _add(scores: Scores, into: Sequence[Tensor | None], some: Samples, grad: Tensor, at_once: int) -> None:
    """The gradients of some samples, some heads at a time; the mask is theirs, and is added."""
    shape = (*grad.shape[:3], some.k.shape[2])
    let = None if scores.bits is None else _let_through(scores.bits, some.first, shape)
    each = max(1, at_once // (shape[0] * shape[2] * shape[3]))
    for first in range(0, shape[1], each):
        part = (slice(None), slice(first, first + each))
        q, k, v, g = (x[part].flatten(0, 1) for x in (some.q, some.k, some.v, grad))
        bias, keep = (None if x is None else x[part].flatten(0, 1) for x in (scores.mask, let))
        dq, dk, dv = (None if x is None else x[part] for x in into)
        p, dp = _softmax(scores, q, k, bias), torch.bmm(g, v.mT)
        if keep is not None:
            dp = dp.mul_(keep).mul_(scores.raised)
        ds = torch.ops.aten._softmax_backward_data(dp, p, -1, p.dtype)
        if dq is not None:
            dq.copy_(_scaled(scores, ds, k).view(dq.shape))
        if dk is not None:
            dk.copy_(_scaled(scores, ds.mT, q).view(dk.shape))
        if dv is not None:
            p = p if keep is None else p.mul_(keep).mul_(scores.raised)
            dv.copy_(torch.bmm(p.mT, g).view(dv.shape))


def _softmax(scores: Scores, q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return _scaled(scores, q, k.mT).softmax(-1)
    added = torch.baddbmm(bias, q, k.mT, alpha=scores.scale)
    # A mask may shut out a whole row, which then is zero.
    return added.softmax(-1) if scores.causal else torch.ops.aten._safe_softmax(added, -1)


def _scaled(scores: Scores, a: Tensor, b: Tensor) -> Tensor:
    return torch.baddbmm(a.new_empty(1, 1, 1), a, b, beta=0, alpha=scores.scale)


def _let_through(bits: Tensor, first: int, shape: Shape) -> Tensor:
    """What dropout let through of some samples, as zeros and ones."""
    each = math.prod(shape[1:])
    begin, end = first * each // 8, -(-(first + shape[0]) * each // 8)
    return ops.unpack_bits(bits[begin:end], shape)
