"""Cross-entropy, −Σ q log p with p = softmax(z), and its two halves.

For class indices t without smoothing, dz = g (p − 1[t]), where g is the incoming gradient times the class
weight, over the mean's divisor. Saved are p with 0 in the place of the target, and exactly p − 1 of the
target. A confident model has p near 1 at its targets: their p − 1 is nearly all of the gradient, and would be
lost in the rounding of p. Soft targets and smoothed ones save the difference p Σq − q, which is small for the
same model, and exactly the largest of each row; only where the targets themselves want a gradient, log p is
saved as well.

The gradient is linear in what is saved, hence unbiased, and what is sure stays sure: with the logits saved
instead, the rounding of a large logit is exponentiated (at 4 bits and logits of standard deviation 8 the
error is 40 times larger for 10 classes, 120 times for 32,000).

A log-softmax saves p, not its output: dz = g − p Σg. It knows no target, so the largest p of each row is the
one that is saved exactly. What follows it, nll_loss, saves indices. Where PyTorch makes log p on the way, p
is made of that, while it is encoded.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mesa_tune.engine.call import Call
from mesa_tune.engine.formula import Formula, Layers, Needs, Result, Route, Routes, Static, cast, narrowed
from mesa_tune.engine.packed import Held
from mesa_tune.formulas.softmax import along, functional_along
from mesa_tune.ops import maps
from mesa_tune.ops.fused import by_target


def forward(static: Static, needs: Needs, logits: Tensor, target: Tensor, weight: Tensor | None) -> Result:
    reduction, ignore = static
    how: Any = {"ignore_index": ignore, "reduction": reduction}
    axis = _class_axis(logits.dim())
    logs = torch.log_softmax(logits, axis)
    if logits.dtype == torch.float32:  # PyTorch takes the same two steps
        y = F.nll_loss(logs, target, weight, **how)
    else:  # those of other dtypes differ under autocast
        y = F.cross_entropy(logits, target, weight, **how)
    index = torch.where(target != ignore, target, 0).unsqueeze(axis)
    surplus = logs.gather(axis, index).to(_wide(logs.dtype)).expm1().squeeze(axis)
    return Result(y, (_others(logs, axis, index, logits.dtype),), (target, weight, surplus))


def _others(logs: Tensor, axis: int, index: Tensor, dtype: torch.dtype) -> Tensor | maps.Mapped:
    """Return the probabilities but 0 at `index`, of their logarithms, which are overwritten."""
    logs.scatter_(axis, index, -math.inf)
    return maps.kept(logs, "exp", logs.exp) if dtype == logs.dtype else logs.exp_().to(dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of what stays exact: at least 32 bits."""
    return torch.promote_types(dtype, torch.float32)


def backward(
    static: Static, needs: Needs, lossy: list[Tensor], exact: tuple[Tensor | None, ...], grad: Tensor
) -> tuple[Tensor | None, ...]:
    wide = lossy[0].to(_wide(lossy[0].dtype))
    dz = _at_indices(static, tuple(wide.shape), lambda total: wide * total, exact, grad.to(wide.dtype))
    return dz.to(lossy[0].dtype), None, None


def piecewise(
    static: Static, needs: Needs, held: list[Held], exact: tuple[Tensor | None, ...], grad: Tensor
) -> tuple[Tensor | None, ...] | None:
    """dz in one pass, or p decoded some samples at a time."""
    reduction, ignore = static
    target, weight, surplus = exact
    shape = held[0].meta.shape
    assert target is not None
    assert surplus is not None
    if _class_axis(len(shape)) == len(shape) - 1:
        found = held[0].cross_entropy_backward(target, surplus, weight, grad, ignore, reduction == "mean")
        if found is not None:
            return found, None, None
    pieces = held[0].parts_of(torch.float32)
    if pieces is None:
        return None

    def product(total: Tensor) -> Tensor:
        dz = grad.new_empty(shape, dtype=torch.float32)
        for part, p in pieces:
            torch.mul(p, total[part], out=dz[part])
        return dz

    return _at_indices(static, shape, product, exact, grad.to(torch.float32)), None, None


def _at_indices(
    static: Static,
    shape: tuple[int, ...],
    times: Callable[[Tensor], Tensor],
    exact: tuple[Tensor | None, ...],
    grad: Tensor,
) -> Tensor:
    """Return dz for class indices; `times` multiplies p, of this shape."""
    reduction, ignore = static
    target, weight, surplus = exact
    assert target is not None
    assert surplus is not None
    weight = None if weight is None else weight.to(grad.dtype)
    index, at_target, _ = by_target(target, weight, ignore, reduction == "mean", grad)
    axis = _class_axis(len(shape))
    total, own = at_target.unsqueeze(axis), (at_target * surplus).unsqueeze(axis)
    return times(total).scatter_(axis, index.unsqueeze(axis), own)


def _class_axis(dims: int) -> int:
    return 0 if dims == 1 else 1


def _along(weight: Tensor, dims: int) -> Tensor:
    """Class weights, shaped to multiply logits of so many dimensions."""
    return weight if dims == 1 else weight.view([1, -1] + [1] * (dims - 2))


CROSS_ENTROPY = Formula(
    "cross_entropy",
    forward,
    backward,
    "the probabilities of all classes but the target; exact: targets, p − 1 of each, and class weights",
    piecewise=piecewise,
)


def soft_forward(
    static: Static, needs: Needs, logits: Tensor, target: Tensor, weight: Tensor | None
) -> Result:
    reduction, ignore, smoothing = static
    how: Any = {"ignore_index": ignore, "reduction": reduction}
    y = F.cross_entropy(logits, target, weight, label_smoothing=smoothing, **how)
    axis, dtype = _class_axis(logits.dim()), _wide(logits.dtype)
    logs = torch.log_softmax(logits.to(dtype), axis)
    weight = None if weight is None else weight.to(dtype)
    lossy: tuple[Tensor, ...] = ()
    index = most = None
    if needs[0]:
        q = _counts(static, logs, target, weight)
        excess = torch.addcmul(q.neg(), logs.exp(), q.sum(axis, keepdim=True))
        index, most = _split_largest(excess, axis)
        lossy = (excess.to(logits.dtype),)
    divisor = _divisor(ignore, target, weight, logs) if reduction == "mean" else None
    if needs[1]:
        lossy = (*lossy, logs.to(target.dtype))
    return Result(y, lossy, (divisor, weight, index, most))


def _split_largest(values: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Set the element of largest magnitude in each row to 0; return its index, in few bytes, and value."""
    index = values.abs().argmax(axis, keepdim=True)
    most = values.gather(axis, index)
    values.scatter_(axis, index, 0)
    return narrowed(index, values.shape[axis]), most


def _counts(static: Static, logs: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
    """Return q, what each class counts: the smoothed target times the class weight; 0 where it is ignored."""
    _, ignore, smoothing = static
    axis = _class_axis(logs.dim())
    classes = logs.shape[axis]
    if target.is_floating_point():
        q: Tensor = target.to(logs.dtype) * (1 - smoothing) + smoothing / classes
    else:
        counted = (target != ignore).unsqueeze(axis)
        index = torch.where(counted, target.unsqueeze(axis), 0)
        q = torch.full_like(logs, smoothing / classes).scatter_(
            axis, index, 1 - smoothing + smoothing / classes
        )
        q.mul_(counted)
    return q if weight is None else q.mul_(_along(weight, q.dim()))


def _divisor(ignore: int, target: Tensor, weight: Tensor | None, logs: Tensor) -> Tensor:
    """Return what the mean divides by: all samples, or the weights of the targets that are not ignored."""
    if target.is_floating_point():
        return logs.new_full((), logs.numel() // max(1, logs.shape[_class_axis(logs.dim())]))
    counted = target != ignore
    own = counted if weight is None else torch.where(counted, weight[torch.where(counted, target, 0)], 0)
    total: Tensor = own.sum()
    return total


def soft_backward(
    static: Static, needs: Needs, lossy: list[Tensor], exact: tuple[Tensor | None, ...], grad: Tensor
) -> tuple[Tensor | None, ...]:
    smoothing, (_, weight, _, _), dims = static[-1], exact, lossy[0].dim()
    grad = _by_row(grad, exact, dims)
    dz = _with_largest(lossy[0] * grad, grad, exact).to(lossy[0].dtype) if needs[0] else None
    dt = None
    if needs[1]:
        counts = grad if weight is None else grad * _along(weight, dims)
        dt = (lossy[-1] * counts * (smoothing - 1)).to(lossy[-1].dtype)
    return dz, dt, None


def _by_row(grad: Tensor, exact: tuple[Tensor | None, ...], dims: int) -> Tensor:
    """Return what each row's difference is multiplied by, or all rows'."""
    grad = grad if exact[0] is None else grad / exact[0]
    return grad.unsqueeze(_class_axis(dims)) if grad.dim() else grad


def _with_largest(dz: Tensor, grad: Tensor, exact: tuple[Tensor | None, ...]) -> Tensor:
    """Return `dz` with the element in each row that was saved exactly."""
    *_, index, most = exact
    assert index is not None
    assert most is not None
    return dz.scatter_(_class_axis(dz.dim()), index.long(), (most * grad).to(dz.dtype))


def soft_piecewise(
    static: Static, needs: Needs, held: list[Held], exact: tuple[Tensor | None, ...], grad: Tensor
) -> tuple[Tensor | None, ...] | None:
    """dz of some samples at a time."""
    pieces = None if needs[1] else held[0].parts_of(torch.float32)
    if pieces is None:
        return None
    dz = grad.new_empty(held[0].meta.shape)
    grad = _by_row(grad, exact, dz.dim())
    for part, excess in pieces:
        torch.mul(excess, grad[part] if grad.dim() else grad, out=dz[part])
    return _with_largest(dz, grad, exact), None, None


SOFT_CROSS_ENTROPY = Formula(
    "soft_cross_entropy",
    soft_forward,
    soft_backward,
    "the probabilities less the targets, log p where these want a gradient; exact: the largest by row",
    piecewise=soft_piecewise,
)


def log_softmax_forward(static: Static, needs: Needs, x: Tensor) -> Result:
    dim, dtype, _ = static
    y = torch.log_softmax(x, dim, dtype=dtype)
    most, index = y.max(dim, keepdim=True)
    exact = narrowed(index, y.shape[dim]), most.to(_wide(y.dtype)).exp_()
    return Result(y, (_others(y.clone(), dim, index, y.dtype),), exact)


def log_softmax_backward(
    static: Static, needs: Needs, lossy: list[Tensor], exact: tuple[Tensor, ...], grad: Tensor
) -> tuple[Tensor | None]:
    dim, _, given = static
    index, most = exact
    total = grad.sum(dim, keepdim=True)
    dx = torch.addcmul(grad, lossy[0], total, value=-1)
    return (cast(dx.scatter_add_(dim, index.long(), (most * -total).to(dx.dtype)), given),)


LOG_SOFTMAX = Formula(
    "log_softmax",
    log_softmax_forward,
    log_softmax_backward,
    "the probabilities but the largest; exact: that one and its index",
)


def nll_forward(static: Static, needs: Needs, logs: Tensor, target: Tensor, weight: Tensor | None) -> Result:
    _, _, reduction, ignore = static
    y = F.nll_loss(logs, target, weight, ignore_index=ignore, reduction=reduction)
    return Result(y, exact=(target, weight))


def nll_backward(
    static: Static, needs: Needs, lossy: list[Tensor], exact: tuple[Tensor | None, ...], grad: Tensor
) -> tuple[Tensor | None, ...]:
    shape, dtype, reduction, ignore = static
    target, weight = exact
    assert target is not None
    index, at_target, _ = by_target(target, weight, ignore, reduction == "mean", grad)
    dz = at_target.new_zeros(shape)
    axis = _class_axis(dz.dim())
    dz.scatter_(axis, index.unsqueeze(axis), (-at_target).unsqueeze(axis))
    return dz.to(dtype), None, None


NLL_LOSS = Formula(
    "nll_loss", nll_forward, nll_backward, "nothing lossy; exact: targets and class weights", lossless=True
)


def cross_entropy(
    call: Call,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    **unknown: Any,
) -> Any:
    """`F.cross_entropy`: class indices or probabilities, `(C,)`, `(N, C)` or `(N, C, d1, …)`."""
    if (
        unknown
        or size_average is not None
        or reduce is not None
        or (weight is not None and weight.requires_grad)
    ):
        return call.refuse("cross_entropy has no formula for size_average, reduce or trained class weights")
    if call.small(input):
        return call.plain()
    if label_smoothing == 0 and not target.is_floating_point():
        return call.apply(CROSS_ENTROPY, (reduction, ignore_index), input, target, weight)
    static = (reduction, ignore_index, label_smoothing)
    return call.apply(SOFT_CROSS_ENTROPY, static, input, target, weight)


def log_softmax(
    call: Call, input: Tensor, dim: Any = None, dtype: torch.dtype | None = None, **unknown: Any
) -> Any:
    """`torch.log_softmax` and the method."""
    if input.numel() and (_is_alone(input, dim) or (dtype is torch.float64 is not input.dtype)):
        return call.plain()
    return along(LOG_SOFTMAX, call, input, dim, dtype, **unknown)


def _is_alone(x: Tensor, dim: Any) -> bool:
    """Return whether each row along `dim` has one element, whose probability would be saved exactly."""
    return isinstance(dim, int) and -x.dim() <= dim < x.dim() and x.shape[dim] < 2


functional_log_softmax = partial(functional_along, log_softmax)


def nll_loss(
    call: Call,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    **unknown: Any,
) -> Any:
    """`F.nll_loss`: log-probabilities `(C,)`, `(N, C)` or `(N, C, d1, …)`."""
    if unknown or size_average is not None or reduce is not None:
        return call.refuse("nll_loss has no formula for size_average and reduce")
    # What PyTorch keeps of a small tensor is there anyway.
    if call.small(input):
        return call.plain()
    static = (tuple(input.shape), input.dtype, reduction, ignore_index)
    return call.apply(NLL_LOSS, static, input, target, weight)


_LOG_SOFTMAX = Route("log_softmax", "softmax", log_softmax)
ROUTES: Routes = {
    F.cross_entropy: Route("cross_entropy", "loss", cross_entropy),
    F.log_softmax: Route("log_softmax", "softmax", functional_log_softmax),
    torch.log_softmax: _LOG_SOFTMAX,
    torch.special.log_softmax: _LOG_SOFTMAX,
    Tensor.log_softmax: _LOG_SOFTMAX,
    F.nll_loss: Route("nll_loss", "loss", nll_loss),
}
LAYERS: Layers = {
    nn.CrossEntropyLoss: F.cross_entropy,
    nn.LogSoftmax: F.log_softmax,
    nn.NLLLoss: F.nll_loss,
}
