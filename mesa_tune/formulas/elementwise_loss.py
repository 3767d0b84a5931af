"""Losses element by element, l(x, t) summed or averaged. Kept: the derivative d = ∂l/∂x.

dx = g d / n, and dt = −dx for those that take the difference x − t alone: linear in the one tensor kept,
where PyTorch keeps both x and t. The L1 loss's d is a sign, kept exactly in two bits an element.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mesa_tune import ops
from mesa_tune.engine.call import Call
from mesa_tune.engine.formula import Formula, Layers, Needs, Result, Route, Routes, Static, like

aten = torch.ops.aten


def _logits(x: Tensor, t: Tensor, weight: Tensor | None, positive: Tensor | None) -> Tensor:
    # l = (1 − t) x − (1 + (p − 1) t) log σ(x) − … has the derivative σ(x) (1 + (p − 1) t) − p t.
    scale = 1 if positive is None else 1 + (positive - 1) * t
    slope = torch.sigmoid(x) * scale - (t if positive is None else positive * t)
    return slope if weight is None else slope * weight


def _probability(x: Tensor, t: Tensor, weight: Tensor | None, _: Tensor | None) -> Tensor:
    slope: Tensor = aten.binary_cross_entropy_backward(torch.ones_like(x), x, t, weight, 0)
    return slope


_LOSSES: dict[str, Callable[..., Tensor]] = {
    "mse_loss": F.mse_loss,
    "smooth_l1_loss": F.smooth_l1_loss,
    "huber_loss": F.huber_loss,
    "l1_loss": F.l1_loss,
    "kl_div": F.kl_div,
    "binary_cross_entropy": F.binary_cross_entropy,
    "binary_cross_entropy_with_logits": F.binary_cross_entropy_with_logits,
}
_SLOPES: dict[str, Callable[..., Tensor]] = {
    "mse_loss": lambda x, t: 2 * (x - t),
    "smooth_l1_loss": lambda x, t, beta: ((x - t) / beta).clamp_(-1, 1),
    "huber_loss": lambda x, t, delta: (x - t).clamp_(-delta, delta),
    "kl_div": lambda x, t, log_target: -t.exp() if log_target else -t,
}
_BINARY: dict[str, Callable[..., Tensor]] = {
    "binary_cross_entropy": _probability,
    "binary_cross_entropy_with_logits": _logits,
}


def forward(static: Static, needs: Needs, x: Tensor, t: Tensor) -> Result:
    kind, reduction, names, values, *_ = static
    y = _LOSSES[kind](x, t, reduction=reduction, **dict(zip(names, values, strict=True)))
    slope = _SLOPES[kind](x, t, *values)
    return Result(y, lossy=(slope.to(y.dtype),))


def backward(
    static: Static, needs: Needs, lossy: list[Tensor], exact: Any, grad: Tensor
) -> tuple[Tensor | None, ...]:
    _, reduction, _, _, x, t = static
    slope = _divided(grad, reduction, lossy[0].shape) * lossy[0]
    dx = slope.sum_to_size(x[0]).to(x[1]) if needs[0] else None
    dt = -slope.sum_to_size(t[0]).to(t[1]) if needs[1] else None
    return dx, dt


def _divided(grad: Tensor, reduction: str, shape: torch.Size) -> Tensor:
    if reduction == "batchmean":
        return grad / shape[0] if len(shape) else grad
    return grad / shape.numel() if reduction == "mean" else grad


DIFFERENCE = Formula("difference_loss", forward, backward, "the derivative by the input")


def sign_forward(static: Static, needs: Needs, x: Tensor, t: Tensor) -> Result:
    y = F.l1_loss(x, t, reduction=static[1])
    difference = x - t
    return Result(y, exact=(ops.pack_bits(difference < 0), ops.pack_bits(difference > 0)))


def sign_backward(
    static: Static, needs: Needs, lossy: list[Tensor], exact: tuple[Tensor, ...], grad: Tensor
) -> tuple[Tensor | None, ...]:
    shape = torch.broadcast_shapes(static[4][0], static[5][0])
    below, above = (ops.unpack_bits(each, shape).to(grad.dtype) for each in exact)
    return backward(static, needs, [above - below], (), grad)


L1 = Formula(
    "sign_loss",
    sign_forward,
    sign_backward,
    "nothing lossy; exact: the sign of the difference, two bits an element",
    lossless=True,
)


def binary_forward(
    static: Static,
    needs: Needs,
    x: Tensor,
    t: Tensor,
    weight: Tensor | None,
    positive: Tensor | None,
) -> Result:
    kind, reduction, *_ = static
    more = {} if positive is None else {"pos_weight": positive}
    y = _LOSSES[kind](x, t, weight, reduction=reduction, **more)
    return Result(y, lossy=(_BINARY[kind](x, t, weight, positive).to(y.dtype),))


def binary_backward(
    static: Static, needs: Needs, lossy: list[Tensor], exact: Any, grad: Tensor
) -> tuple[Tensor | None, ...]:
    return (*backward(static, (True, False), lossy, exact, grad), None, None)


BINARY = Formula("binary_loss", binary_forward, binary_backward, DIFFERENCE.keeps)


def difference(
    kind: str,
    call: Call,
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    weight: Tensor | None = None,
    **parameters: Any,
) -> Any:
    """`F.mse_loss`, `F.l1_loss`, `F.smooth_l1_loss`, `F.kl_div`: any two shapes that broadcast."""
    if size_average is not None or reduce is not None or weight is not None:
        return call.refuse(f"{kind} has no formula for size_average, reduce and weight")
    if kind == "kl_div" and target.requires_grad:
        return call.refuse("kl_div has no formula for targets that want a gradient")
    given = {**_DEFAULTS.get(kind, {}), **parameters}
    # Of a divergence PyTorch keeps the targets alone, which may be there anyway.
    if kind == "kl_div" and call.is_static(target):
        return call.plain()
    if call.small(input, target) or given.get("beta") == 0:
        return call.plain()
    formula = L1 if kind == "l1_loss" else DIFFERENCE
    static = (kind, reduction, tuple(given), tuple(given.values()), like(input), like(target))
    return call.apply(formula, static, input, target)


_DEFAULTS: dict[str, dict[str, Any]] = {
    "smooth_l1_loss": {"beta": 1.0},
    "huber_loss": {"delta": 1.0},
    "kl_div": {"log_target": False},
}


def smooth_l1(
    call: Call,
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    beta: float = 1.0,
) -> Any:
    """`F.smooth_l1_loss`."""
    return difference("smooth_l1_loss", call, input, target, size_average, reduce, reduction, beta=beta)


def huber(
    call: Call,
    input: Tensor,
    target: Tensor,
    reduction: str = "mean",
    delta: float = 1.0,
    weight: Tensor | None = None,
) -> Any:
    """`F.huber_loss`."""
    return difference("huber_loss", call, input, target, None, None, reduction, weight, delta=delta)


def kl(
    call: Call,
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    log_target: bool = False,
) -> Any:
    """`F.kl_div`."""
    return difference("kl_div", call, input, target, size_average, reduce, reduction, log_target=log_target)


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
    """`F.binary_cross_entropy` and `F.binary_cross_entropy_with_logits`."""
    trained = any(each is not None and each.requires_grad for each in (target, weight, pos_weight))
    if size_average is not None or reduce is not None or trained:
        return call.refuse(f"{kind} has no formula for size_average, reduce, or trained targets and weights")
    if call.small(input) or target.shape != input.shape:
        return call.plain()
    static = (kind, reduction, (), (), like(input), like(target))
    return call.apply(BINARY, static, input, target, weight, pos_weight)


ROUTES: Routes = {
    F.mse_loss: Route("mse_loss", "loss", partial(difference, "mse_loss")),
    F.l1_loss: Route("l1_loss", "loss", partial(difference, "l1_loss")),
    F.smooth_l1_loss: Route("smooth_l1_loss", "loss", smooth_l1),
    F.huber_loss: Route("huber_loss", "loss", huber),
    F.kl_div: Route("kl_div", "loss", kl),
    F.binary_cross_entropy: Route("binary_cross_entropy", "loss", partial(binary, "binary_cross_entropy")),
    F.binary_cross_entropy_with_logits: Route(
        "binary_cross_entropy_with_logits", "loss", partial(binary, "binary_cross_entropy_with_logits")
    ),
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
