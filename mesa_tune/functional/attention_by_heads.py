"""Attention's gradients some heads at a time, without running its forward again.

With P = softmax(s q kᵀ):  dv = Pᵀ g,  dP = g vᵀ,  dS = P (dP − Σ dP P),  dq = s dS k,  dk = s dSᵀ q (Vaswani
et al. 2017, equation 1, differentiated). A fused backward wants the output and log-sum-exp of its forward,
two products more; here P is made whole, of so few heads that it stays in the cache. Packed tensors are
decoded by the sample, into memory that the next samples reuse.
"""

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from mesa_tune.functional.formula import Needs
from mesa_tune.functional.keeping import Held

SCORES = 1 << 19
"""Elements of P at a time: of all that are tried, these are the fastest for 49 to 512 tokens on two cores."""

_MOST = 1 << 20
"""Beyond so many scores a head, a fused kernel is as fast."""


class Samples(NamedTuple):
    """Queries, keys and values of some samples, the first of which has number `first`."""

    first: int
    q: Tensor
    k: Tensor
    v: Tensor


def serves(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> bool:
    """Whether `gradients` are those of attention over these, without mask and dropout."""
    shapes = [tuple(each.shape) for each in (q, k, v)]
    return _fits(*shapes) and all(each.is_cpu and each.dtype == torch.float32 for each in (q, k, v, grad))


def _fits(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> bool:
    alike = len(q) == 4 and q[:2] == k[:2] == v[:2] and k[2] == v[2] and q[3] == k[3]
    return alike and 0 < q[2] * k[2] <= _MOST and math.prod(q) > 0 < v[3]


def whole(q: Tensor, k: Tensor, v: Tensor) -> Iterator[Samples]:
    """Some samples at a time of tensors that are there."""
    each = _samples(tuple(q.shape), k.shape[2])
    for first in range(0, q.shape[0], each):
        part = slice(first, first + each)
        yield Samples(first, q[part], k[part], v[part])


def packed(held: list[Held], grad: Tensor) -> Iterator[Samples] | None:
    """Some samples at a time of what is packed; None where that is not possible."""
    shapes = [each.meta.shape for each in held]
    if not (grad.is_cpu and grad.dtype == torch.float32 and _fits(*shapes)):
        return None
    steps = [each.sample_step(grad.dtype) for each in held]
    if None in steps:
        return None
    step = math.lcm(*(each for each in steps if each is not None))
    each = -(-_samples(shapes[0], shapes[1][2]) // step) * step
    streams = zip(*(one.samples(each) for one in held), strict=True)
    return (Samples(place * each, *some) for place, some in enumerate(streams))


def _samples(q: tuple[int, ...], keys: int) -> int:
    return max(1, SCORES // (q[1] * q[2] * keys))


def gradients(
    scale: float | None, needs: Needs, shapes: list[tuple[int, ...]], samples: Iterable[Samples], grad: Tensor
) -> tuple[Tensor | None, ...]:
    """Gradients of queries, keys and values, of these `shapes` (batch, heads, tokens, width)."""
    scale = 1 / math.sqrt(shapes[0][3]) if scale is None else scale
    found = [_laid_out(shape, grad) if want else None for shape, want in zip(shapes, needs, strict=False)]
    for some in samples:
        part = slice(some.first, some.first + some.q.shape[0])
        into = [None if each is None else each[part] for each in found]
        _add(scale, into, some, grad[part])
    return tuple(found)


def _laid_out(shape: tuple[int, ...], grad: Tensor) -> Tensor:
    """An empty gradient, heads beside one another as the projections before attention have them."""
    batch, heads, tokens, width = shape
    return grad.new_empty(batch, tokens, heads, width).transpose(1, 2)


def _add(scale: float, into: list[Tensor | None], some: Samples, grad: Tensor) -> None:
    """The gradients of some samples, some heads at a time."""
    heads, tokens, keys = grad.shape[1], some.q.shape[2], some.k.shape[2]
    each = max(1, SCORES // (tokens * keys * grad.shape[0]))
    for first in range(0, heads, each):
        part = (slice(None), slice(first, first + each))
        q, k, v, g = (x[part].flatten(0, 1) for x in (some.q, some.k, some.v, grad))
        q = q * scale
        p = torch.bmm(q, k.mT).softmax(-1)
        ds = torch.ops.aten._softmax_backward_data(torch.bmm(g, v.mT), p, -1, p.dtype)
        dq, dk, dv = (None if each is None else each[part] for each in into)
        if dq is not None:
            dq.copy_(torch.bmm(ds, k).mul_(scale).view(dq.shape))
        if dk is not None:
            dk.copy_(torch.bmm(ds.mT, q).view(dk.shape))
        if dv is not None:
            dv.copy_(torch.bmm(p.mT, g).view(dv.shape))
