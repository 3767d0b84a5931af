"""Attention's gradients from q, k and v alone, in operations that torch.compile can trace.

Where a fused kernel serves, its forward gives the output and log-sum-exp that its backward wants; both see
the decoded q, k and v, as Rule 7 asks. Elsewhere it is the formula of `by_heads`, all heads at
once, and dm = dS.
"""

import math
from typing import Any

import torch
from torch import Tensor

from mesa_tune import ops
from mesa_tune.engine.formula import Grads, Needs
from mesa_tune.engine.tensors import wanted
from mesa_tune.formulas.attention.by_heads import Scores


def traced_gradients(scores: Scores, needs: Needs, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Grads:
    """Gradients of q, k, v and the mask that `needs` asks for."""
    if scores.mask is None and scores.bits is None and _fused_serves(scores.causal, q, k, v):
        found = _fused(scores.causal, scores.scale, q, k, v, grad)
        return (*wanted(found, needs), None)
    return written_out(scores, needs, q, k, v, grad)


def _fused_serves(causal: bool, q: Tensor, k: Tensor, v: Tensor) -> bool:
    same = (
        q.dim() == 4 and q.shape[:2] == k.shape[:2] == v.shape[:2] and q.shape[3] == k.shape[3] == v.shape[3]
    )
    if not same or (causal and q.shape[2] != k.shape[2]) or min(q.numel(), k.numel()) == 0:
        return False
    if q.device.type == "cpu":
        return True
    # The CUDA kernels read rows of 16 bytes; PyTorch pads other widths before it calls them.
    return q.device.type == "cuda" and q.shape[3] * q.element_size() % 16 == 0 and q.dtype != torch.float64


def _fused(causal: bool, scale: float | None, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Grads:
    aten: Any = torch.ops.aten
    if q.device.type == "cpu":
        y, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        found: Grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, y, lse, 0.0, causal, scale=scale
        )
        return found
    y, lse, seed, offset = aten._scaled_dot_product_efficient_attention(
        q, k, v, None, True, 0.0, causal, scale=scale
    )
    found = aten._scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, None, y, lse, seed, offset, 0.0, [True, True, True, False], causal, scale=scale
    )
    return found[:3]


def written_out(scores: Scores, needs: Needs, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Grads:
    """The gradients by the formula, all at once: any mask, grouped heads, dropout."""
    wide = torch.promote_types(q.dtype, torch.float32)
    grad, queries = grad.to(wide), q.to(wide)
    keys, values = _spread(k, q).to(wide), _spread(v, q).to(wide)
    p = torch.ops.aten._safe_softmax(_added(scores, queries, keys), -1)
    dp = grad @ values.mT
    dropped = p
    if scores.bits is not None:
        let = ops.unpack_bits(scores.bits, p.shape).to(wide) * scores.raised
        dropped, dp = p * let, dp * let
    ds = p * (dp - (dp * p).sum(-1, keepdim=True))
    dq = (scores.scale * (ds @ keys)).sum_to_size(q.shape) if needs[0] else None
    dk = _gathered(scores.scale * (ds.mT @ queries), k) if needs[1] else None
    dv = _gathered(dropped.mT @ grad, v) if needs[2] else None
    mask = scores.mask
    dm = ds.sum_to_size(mask.shape) if needs[3] and mask is not None else None
    found = (
        None if found is None else found.to(given.dtype)
        for found, given in zip((dq, dk, dv, dm), (q, k, v, q if mask is None else mask), strict=True)
    )
    return (*found, *(None for _ in needs[4:]))


def _added(scores: Scores, q: Tensor, k: Tensor) -> Tensor:
    made = scores.scale * (q @ k.mT)
    if scores.causal:
        allowed = torch.ones(made.shape[-2:], dtype=torch.bool, device=q.device).tril()
        return made.masked_fill(~allowed, -math.inf)
    mask = scores.mask
    if mask is None:
        return made
    return made.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else made + mask


def _spread(x: Tensor, q: Tensor) -> Tensor:
    """Grouped heads: each key or value head stands for several query heads."""
    if x.dim() < 3 or q.dim() < 3 or x.shape[-3] in (1, q.shape[-3]):
        return x
    return x.repeat_interleave(q.shape[-3] // x.shape[-3], -3)


def _gathered(grad: Tensor, x: Tensor) -> Tensor:
    if x.dim() >= 3 and grad.dim() >= 3 and x.shape[-3] not in (1, grad.shape[-3]):
        grad = grad.unflatten(-3, (x.shape[-3], -1)).sum(-3)
    return grad.sum_to_size(x.shape)
