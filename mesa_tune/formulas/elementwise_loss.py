"""Losses element by element, l(x, t) summed or averaged. Saved: the derivative d = ∂l/∂x.

dx = g d / n, and dt = −dx for those that take the difference x − t alone: linear in the one tensor saved,
where PyTorch saves both x and t. The L1 loss's d is a sign, saved exactly in two bits per element.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mesa_tune import ops
from mesa_tune.engine.call import Call
from mesa_tune.engine.formula import Formula, Grads, Layers, Needs, Result, Route, Routes, Saved, Static
from mesa_tune.engine.tensors import gathered, like


def _logits(x: Tensor, t: Tensor, weight: Tensor | None, positive: Tensor | None) -> Tensor:
    # l = (1 − t) x − (1 + (p − 1) t) log σ(x) − … has the derivative σ(x) (1 + (p − 1) t) − p t.
    scale = 1 if positive is None else 1 + (positive - 1) * t
    slope = torch.sigmoid(x) * scale - (t if positive is None else positive * t)
    return slope if weight is None else slope * weight


def _probability(x: Tensor, t: Tensor, weight: Tensor | None, _: Tensor | None) -> Tensor:
    slope: Tensor = torch.ops.aten.binary_cross_entropy_backward(torch.ones_like(x), x, t, weight, 0)
    return slope


_SLOPES: dict[str, Callable[..., Tensor]] = {
    "mse_loss": lambda x, t: 2 * (x - t),
    "smooth_l1_loss": lambda x, t, beta: ((x - t) / beta).clamp_(-1, 1),
    "huber_loss": lambda x, t, delta: (x - t).clamp_(-delta, delta),
    "kl_div": lambda x, t, log_target: -t.exp() if log_target else -t,
    "binary_cross_entropy": _probability,
    "binary_cross_entropy_with_logits": _logits,
}


def forward(static: Static, needs: Needs, x: Tensor, t: Tensor) -> Result:
    kind, reduction, _, _, options = static
    y = getattr(F, kind)(x, t, reduction=reduction, **dict(options))
    return Result(y, (_SLOPES[kind](x, t, **dict(options)).to(y.dtype),))


def backward(saved: Saved, grad: Tensor) -> Grads:
    return _gradients(saved, saved.lossy[0].whole(), grad)


def _gradients(saved: Saved, slope: Tensor, grad: Tensor) -> Grads:
    (_, reduction, x, t, *_), needs, _, _ = saved
    if reduction == "mean":
        grad = grad / slope.numel()
    elif reduction == "batchmean" and slope.dim():
        grad = grad / slope.shape[0]
    slope = grad * slope
    return gathered(slope, x) if needs[0] else None, -gathered(slope, t) if needs[1] else None


DIFFERENCE = Formula("difference_loss", forward, backward, "the derivative by the input")


def sign_forward(static: Static, needs: Needs, x: Tensor, t: Tensor) -> Result:
    y = F.l1_loss(x, t, reduction=static[1])
    difference = x - t
    return Result(y, exact=(ops.pack_bits(difference < 0), ops.pack_bits(difference > 0)))


def sign_backward(saved: Saved, grad: Tensor) -> Grads:
    shape = torch.broadcast_shapes(saved.static[2][0], saved.static[3][0])
    below, above = (ops.unpack_bits(bits, shape).to(grad.dtype) for bits in saved.exact)
    return _gradients(saved, above - below, grad)


L1 = Formula(
    "sign_loss",
    sign_forward,
    sign_backward,
    "nothing lossy; exact: the sign of the difference, two bits per element",
    lossless=True,
)


def binary_forward(
    static: Static, needs: Needs, x: Tensor, t: Tensor, weight: Tensor | None, positive: Tensor | None
) -> Result:
    kind, reduction, *_ = static
    options = {} if positive is None else {"pos_weight": positive}
    y = getattr(F, kind)(x, t, weight, reduction=reduction, **options)
    return Result(y, (_SLOPES[kind](x, t, weight, positive).to(y.dtype),))


def binary_backward(saved: Saved, grad: Tensor) -> Grads:
    return (*backward(saved, grad), None, None)


BINARY = Formula("binary_loss", binary_forward, binary_backward, DIFFERENCE.saves)


def _serve(
    call: Call, kind: str, x: Tensor, t: Tensor, reduction: str, legacy: tuple[Any, ...] = (), **options: Any
) -> Any:
    """Run a loss of any two shapes that broadcast."""
    if any(value is not None for value in legacy):
        return call.refuse(f"{kind} has no formula for size_average, reduce and weight")
    if kind == "kl_div" and t.requires_grad:
        return call.refuse("kl_div has no formula for targets that want a gradient")
    # Of a divergence PyTorch saves the targets alone, which may exist anyway.
    if (kind == "kl_div" and call.is_static(t)) or not call.gains(x, t) or options.get("beta") == 0:
        return call.plain()
    static = (kind, reduction, like(x), like(t), tuple(options.items()))
    return call.apply(L1 if kind == "l1_loss" else DIFFERENCE, static, x, t)


def difference(
    kind: str,
    call: Call,
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    weight: Tensor | None = None,
) -> Any:
    """Route of `F.mse_loss` and `F.l1_loss`."""
    return _serve(call, kind, input, target, reduction, (size_average, reduce, weight))


def smooth_l1(
    call: Call,
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    beta: float = 1.0,
) -> Any:
    """Route of `F.smooth_l1_loss`."""
    return _serve(call, "smooth_l1_loss", input, target, reduction, (size_average, reduce), beta=beta)


def huber(
    call: Call,
    input: Tensor,
    target: Tensor,
    reduction: str = "mean",
    delta: float = 1.0,
    weight: Tensor | None = None,
) -> Any:
    """Route of `F.huber_loss`."""
    return _serve(call, "huber_loss", input, target, reduction, (weight,), delta=delta)


def kl(
    call: Call,
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    log_target: bool = False,
) -> Any:
    """Route of `F.kl_div`."""
    return _serve(call, "kl_div", input, target, reduction, (size_average, reduce), log_target=log_target)


def binary(
    kind: str,
    call: Call,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    pos_weight: Tensor | None = None,
) -> Any:
    """Route of `F.binary_cross_entropy` and `F.binary_cross_entropy_with_logits`."""
    trained = any(tensor is not None and tensor.requires_grad for tensor in (target, weight, pos_weight))
    if size_average is not None or reduce is not None or trained:
        return call.refuse(f"{kind} has no formula for size_average, reduce, or trained targets and weights")
    if not call.gains(input) or target.shape != input.shape:
        return call.plain()
    static = (kind, reduction, like(input), like(target))
    return call.apply(BINARY, static, input, target, weight, pos_weight)


ROUTES: Routes = {
    F.mse_loss: Route("mse_loss", "loss", partial(difference, "mse_loss")),
    F.l1_loss: Route("l1_loss", "loss", partial(difference, "l1_loss")),
    F.smooth_l1_loss: Route("smooth_l1_loss", "loss", smooth_l1),
    F.huber_loss: Route("huber_loss", "loss", huber),
    F.kl_div: Route("kl_div", "loss", kl),
    **{
        getattr(F, kind): Route(kind, "loss", partial(binary, kind))
        for kind in ("binary_cross_entropy", "binary_cross_entropy_with_logits")
    },
}
LAYERS: Layers = {
    nn.MSELoss: F.mse_loss,
    nn.L1Loss: F.l1_loss,
    nn.SmoothL1Loss: F.smooth_l1_loss,
    nn.HuberLoss: F.huber_loss,
    nn.KLDivLoss: F.kl_div,
    nn.BCELoss: F.binary_cross_entropy,
    nn.BCEWithLogitsLoss: F.binary_cross_entropy_with_logits,
}
