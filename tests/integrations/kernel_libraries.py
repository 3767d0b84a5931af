"""Stand-ins, for the CPU, of what flash-attn and Liger Kernel call: Functions and operators of their shape.

They save what the originals save (flash-attn 2 and 3, liger-kernel 0.8), and do in place what these do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.step_memory import Composed

VOCABULARY, WIDTH, HEADS = 96, 32, 4


def applied(function: Any, *arguments: Any) -> Tensor:
    """The output of a Function."""
    output: Tensor = function.apply(*arguments)
    return output


def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Causal attention of (batch, length, heads, width): the output, and the logarithm of the sums."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k).float() / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    lse = scores.logsumexp(-1)
    return torch.einsum("bhqk,bkhd->bqhd", (scores - lse[..., None]).exp().to(v.dtype), v), lse


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, from the output and the sums of the forward."""
    scale = 1 / math.sqrt(q.shape[-1])
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k).float() * scale
    scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    weights = (scores - lse[..., None]).exp().to(q.dtype)
    above = torch.einsum("bqhd,bkhd->bhqk", grad, v)
    within = (grad * out).sum(-1).transpose(1, 2)[..., None]
    inner = weights * (above - within) * scale
    return (
        torch.einsum("bhqk,bkhd->bqhd", inner, k),
        torch.einsum("bhqk,bqhd->bkhd", inner, q),
        torch.einsum("bhqk,bqhd->bkhd", weights, grad),
    )


class FlashAttnFunc(torch.autograd.Function):
    """As in flash-attn 2: q, k, v, the output, the sums, and a state of the random generator."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_grad_enabled: bool) -> Tensor:
        """The output; `is_grad_enabled` is asked outside, as it is always False in here."""
        out, lse = attend(q, k, v)
        if is_grad_enabled and any(each.requires_grad for each in (q, k, v)):
            ctx.save_for_backward(q, k, v, out, lse, torch.zeros(2, dtype=torch.int64))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """The gradients of q, k and v."""
        q, k, v, out, lse, _ = ctx.saved_tensors
        return *attend_backward(grads[0], q, k, v, out, lse), None


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """flash-attn's interface."""
    return applied(FlashAttnFunc, q, k, v, torch.is_grad_enabled())


@torch.library.custom_op("standin::flash_attn_forward", mutates_args=())
def flash_attn_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """As in flash-attn 3: an operator of its own, for which a backward is registered."""
    return attend(q, k, v)


@flash_attn_forward.register_fake
def _fake(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    batch, length, heads, _ = q.shape
    return torch.empty_like(q), q.new_empty(batch, heads, length, dtype=torch.float32)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Any) -> Any:
    return attend_backward(grad, *ctx.saved_tensors)


flash_attn_forward.register_autograd(_backward, setup_context=_setup)


class LigerRMSNormFunction(torch.autograd.Function):
    """Saves its input, the weight, and the reciprocal norms; writes the gradient into that of the output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """The normalized rows."""
        rows = x.view(-1, x.shape[-1])
        scale = (rows.float().square().mean(-1) + eps).rsqrt()
        ctx.shape = x.shape
        ctx.save_for_backward(rows, weight, scale)
        return (rows * scale[:, None] * weight).view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """The gradients of input and weight."""
        rows, weight, scale = ctx.saved_tensors
        grad = grads[0].view(rows.shape)
        normal = rows * scale[:, None]
        of_weight = (grad * normal).sum(0)
        grad = grad.mul_(weight)
        grad.sub_(normal * (grad * normal).mean(-1, keepdim=True)).mul_(scale[:, None])
        return grad.view(ctx.shape), of_weight, None


def rms_norm() -> nn.Module:
    """The module that Liger puts in the place of a model's own."""
    weight = nn.Parameter(torch.ones(WIDTH))
    return Composed(lambda m, x: applied(LigerRMSNormFunction, x, m.weight, 1e-6), weight=weight)


class LigerSiLUMulFunction(torch.autograd.Function):
    """Saves both factors, and overwrites them with their gradients."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        """silu(a) * b."""
        ctx.save_for_backward(a, b)
        return F.silu(a) * b

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """The gradients of a and b, in their memory."""
        (grad,), (a, b) = grads, ctx.saved_tensors
        gate = a.sigmoid()
        silu = a * gate
        a.copy_(grad * b * (gate + silu * (1 - gate)))
        b.copy_(grad * silu)
        return a, b


class LigerFusedLinearCrossEntropyFunction(torch.autograd.Function):
    """Computes the gradients in the forward, some rows at a time, and saves these alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        """The mean loss of rows `x` under the head `weight`."""
        of_x, of_weight = torch.empty_like(x), torch.zeros_like(weight)
        total = x.new_zeros((), dtype=torch.float32)
        for rows in torch.arange(len(x)).chunk(4):
            logits = (x[rows] @ weight.t()).float()
            total += F.cross_entropy(logits, target[rows], reduction="sum")
            of_logits = (logits.softmax(-1) - F.one_hot(target[rows], len(weight))).to(x.dtype) / len(x)
            of_x[rows] = of_logits @ weight
            of_weight.addmm_(of_logits.t(), x[rows])
        ctx.save_for_backward(of_x.detach(), of_weight.detach())
        return total / len(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """What the forward has computed, times the gradient of the loss."""
        (grad,), (of_x, of_weight) = grads, ctx.saved_tensors
        if not torch.equal(grad, torch.tensor(1.0)):
            of_x, of_weight = of_x.mul_(grad), of_weight.mul_(grad)
        return of_x, of_weight, None


def block(attend: Callable[..., Tensor]) -> nn.Module:
    """A block of a language model whose attention is of flash-attn, and the rest of Liger."""

    def forward(m: Any, x: Tensor) -> Any:
        q, k, v = m.qkv(m.norm1(x)).unflatten(-1, (3, HEADS, -1)).unbind(2)
        x = x + m.proj(attend(q, k, v).flatten(2))
        hidden = m.norm2(x)
        return x + m.down(applied(LigerSiLUMulFunction, m.gate(hidden), m.up(hidden)))

    norms = {"norm1": rms_norm(), "norm2": rms_norm()}
    attention = {"qkv": nn.Linear(WIDTH, 3 * WIDTH), "proj": nn.Linear(WIDTH, WIDTH)}
    gate, up = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
    return Composed(forward, **norms, **attention, gate=gate, up=up, down=nn.Linear(2 * WIDTH, WIDTH))


class Transformer(nn.Module):
    """A language model that returns its loss; `fused`: by Liger's function, without logits."""

    def __init__(self, fused: bool = True) -> None:
        super().__init__()
        self.fused = fused
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        of_2, of_3 = flash_attn_func, lambda *given: flash_attn_forward(*given)[0]
        self.blocks = nn.ModuleList([block(of_2), block(of_3)])
        self.norm, self.head = rms_norm(), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss of predicting each next token."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        x, target = self.norm(x)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        if not self.fused:
            return F.cross_entropy(self.head(x), target)
        return applied(LigerFusedLinearCrossEntropyFunction, x, self.head.weight, target)
