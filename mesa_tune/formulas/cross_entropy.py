"""Cross-entropy, −Σ q log p with p = softmax(z), and its two halves.

For class indices t without smoothing, dz = g (p − 1[t]), where g is the incoming gradient times the class
weight, over the mean's divisor. Saved: p with 0 for the target, and exactly p − 1 of the target. A confident
model has p near 1 at its targets: their p − 1 is nearly all of the gradient, and would be lost in the
rounding of p. Soft targets and smoothed ones save the difference p Σq − q, which is small for the same model,
and exactly the largest of each row; only where the targets themselves want a gradient, log p as well.

The gradient is linear in what is saved, hence unbiased, and what is sure stays sure: with the logits saved
instead, the rounding of a large logit is exponentiated (at 4 bits and logits of standard deviation 8 the
error is 40 times larger for 10 classes, 120 times for 32,000).

A log-softmax saves p, not its output: dz = g − p Σg. It knows no target, so the largest p of each row is the
one that is saved exactly. What follows it, nll_loss, saves indices. Where PyTorch computes log p on the way,
p is made of that, while it is encoded.
"""

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mesa_tune.engine.call import Call
from mesa_tune.engine.formula import Formula, Grads, Layers, Needs, Result, Route, Routes, Saved, Static
from mesa_tune.engine.saved import SavedTensor
from mesa_tune.engine.tensors import cast, like, narrowed
from mesa_tune.formulas.softmax import OWNERS, along, functional_along
from mesa_tune.ops import maps
from mesa_tune.ops.fused import CROSS_ENTROPY_BACKWARD, by_target


def forward(static: Static, needs: Needs, logits: Tensor, target: Tensor, weight: Tensor | None) -> Result:
    reduction, ignore = static
    options: Any = {"ignore_index": ignore, "reduction": reduction}
    axis = class_axis(logits.dim())
    if logits.dtype == torch.float32:  # PyTorch takes the same two steps
        logs = torch.log_softmax(logits, axis)
        y = F.nll_loss(logs, target, weight, **options)
    else:  # in the dtype of the result, under autocast that of no logits: p - 1 may be too small for 16 bits
        y = F.cross_entropy(logits, target, weight, **options)
        logs = torch.log_softmax(logits, axis, dtype=y.dtype)
    index = torch.where(target != ignore, target, 0).unsqueeze(axis)
    surplus = logs.gather(axis, index).to(wide_dtype(logs.dtype)).expm1().squeeze(axis)
    return Result(y, (_others(logs, axis, index, logits.dtype),), (target, weight, surplus))


def _others(logs: Tensor, axis: int, index: Tensor, dtype: torch.dtype) -> Tensor | maps.Deferred:
    """Return the probabilities, but 0 at `index`, of their logarithms, which are overwritten."""
    logs.scatter_(axis, index, -math.inf)
    same = dtype == logs.dtype
    return maps.Deferred(logs, "exp", logs.exp).if_dense() if same else logs.exp_().to(dtype)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of what stays exact: at least 32 bits."""
    return torch.promote_types(dtype, torch.float32)


def backward(saved: Saved, grad: Tensor) -> Grads:
    """In one pass where the classes are the last dimension; else some samples of a large p at a time."""
    (reduction, ignore), _, (p,), (target, weight, surplus) = saved
    axis, mean = class_axis(len(p.shape)), reduction == "mean"
    if axis == len(p.shape) - 1 and p.is_row_major() and target.dtype == torch.int64:
        others = (target, surplus, weight, grad, p.shape[-1], ignore, mean)
        dz = p.fused(CROSS_ENTROPY_BACKWARD, *others)
        if dz is not None:
            return dz, None, None
    wide = wide_dtype(p.dtype)
    weight = None if weight is None else weight.to(wide)
    index, at_target, _ = by_target(target, weight, ignore, mean, grad.to(wide))
    dz = _product(p, at_target.unsqueeze(axis) if at_target.dim() else at_target, wide)
    dz.scatter_(axis, index.unsqueeze(axis), (at_target * surplus).unsqueeze(axis))
    return dz.to(p.dtype), None, None


def _product(tensor: SavedTensor, factor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return `tensor`, cast to `dtype`, times a number or one for each sample; a large one is decoded in
    slices.
    """
    slices = tensor.slices(torch.float32)
    if slices is None:
        return tensor.whole(dtype) * factor
    product = factor.new_empty(tensor.shape)
    for part, values in slices:
        torch.mul(values, factor[part] if factor.dim() else factor, out=product[part])
    return product


def class_axis(dims: int) -> int:
    return 0 if dims == 1 else 1


def _along(weight: Tensor, dims: int) -> Tensor:
    """Return class weights, shaped to multiply logits of so many dimensions."""
    return weight if dims == 1 else weight.view([1, -1] + [1] * (dims - 2))


CROSS_ENTROPY = Formula(
    "cross_entropy",
    forward,
    backward,
    "the probabilities of all classes but the target; exact: targets, p − 1 of each, and class weights",
)


def soft_forward(
    static: Static, needs: Needs, logits: Tensor, target: Tensor, weight: Tensor | None
) -> Result:
    reduction, ignore, smoothing = static
    options: Any = {"ignore_index": ignore, "reduction": reduction, "label_smoothing": smoothing}
    y = F.cross_entropy(logits, target, weight, **options)
    axis, dtype = class_axis(logits.dim()), wide_dtype(logits.dtype)
    logs = torch.log_softmax(logits.to(dtype), axis)
    weight = None if weight is None else weight.to(dtype)
    lossy: tuple[Tensor, ...] = ()
    index = largest = None
    if needs[0]:
        q = soft_counts(static, logs, target, weight)
        excess = torch.addcmul(q.neg(), logs.exp(), q.sum(axis, keepdim=True))
        index = excess.abs().argmax(axis, keepdim=True)
        largest = excess.gather(axis, index)
        lossy = (excess.scatter_(axis, index, 0).to(logits.dtype),)
        index = narrowed(index, logits.shape[axis])
    divisor = mean_divisor(ignore, target, weight, logs) if reduction == "mean" else None
    if needs[1]:
        lossy = (*lossy, logs.to(target.dtype))
    return Result(y, lossy, (divisor, weight, index, largest))


def soft_counts(static: Static, logs: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
    """Return q, what each class counts: the smoothed target times the class weight; 0 where it is ignored."""
    _, ignore, smoothing = static
    axis = class_axis(logs.dim())
    least = smoothing / logs.shape[axis]
    if target.is_floating_point():
        q: Tensor = target.to(logs.dtype) * (1 - smoothing) + least
    else:
        counted = (target != ignore).unsqueeze(axis)
        index = torch.where(counted, target.unsqueeze(axis), 0)
        q = torch.full_like(logs, least).scatter_(axis, index, 1 - smoothing + least).mul_(counted)
    return q if weight is None else q.mul_(_along(weight, q.dim()))


def mean_divisor(ignore: int, target: Tensor, weight: Tensor | None, logs: Tensor) -> Tensor:
    """Return what the mean divides by: all samples, or the weights of the targets that are not ignored."""
    if target.is_floating_point():
        return logs.new_full((), logs.numel() // max(1, logs.shape[class_axis(logs.dim())]))
    counted = target != ignore
    own = counted if weight is None else torch.where(counted, weight[torch.where(counted, target, 0)], 0)
    total: Tensor = own.sum()
    return total


def soft_backward(saved: Saved, grad: Tensor) -> Grads:
    (*_, smoothing), needs, lossy, (divisor, weight, index, largest) = saved
    dims = len(lossy[0].shape)
    axis = class_axis(dims)
    grad = grad if divisor is None else grad / divisor
    grad = grad.unsqueeze(axis) if grad.dim() else grad
    dz = dt = None
    if needs[0]:
        dz = _product(lossy[0], grad)
        dz.scatter_(axis, index.long(), (largest * grad).to(dz.dtype))
        dz = dz.to(lossy[0].dtype)
    if needs[1]:
        counts = grad if weight is None else grad * _along(weight, dims)
        dt = (lossy[-1].whole() * counts * (smoothing - 1)).to(lossy[-1].dtype)
    return dz, dt, None


SOFT_CROSS_ENTROPY = Formula(
    "soft_cross_entropy",
    soft_forward,
    soft_backward,
    "the probabilities less the targets, log p where these want a gradient; exact: the largest by row",
)


def log_softmax_forward(static: Static, needs: Needs, x: Tensor) -> Result:
    dim, dtype, _ = static
    y = torch.log_softmax(x, dim, dtype=dtype)
    largest, index = y.max(dim, keepdim=True)
    exact = narrowed(index, y.shape[dim]), largest.to(wide_dtype(y.dtype)).exp_()
    return Result(y, (_others(y.clone(), dim, index, y.dtype),), exact)


def log_softmax_backward(saved: Saved, grad: Tensor) -> Grads:
    (dim, _, dtype), _, (p,), (index, largest) = saved
    total = grad.sum(dim, keepdim=True)
    dx = torch.addcmul(grad, p.whole(), total, value=-1)
    return (cast(dx.scatter_add_(dim, index.long(), (largest * -total).to(dx.dtype)), dtype),)


LOG_SOFTMAX = Formula(
    "log_softmax",
    log_softmax_forward,
    log_softmax_backward,
    "the probabilities but the largest; exact: that one and its index",
)


def nll_forward(static: Static, needs: Needs, logs: Tensor, target: Tensor, weight: Tensor | None) -> Result:
    _, reduction, ignore = static
    y = F.nll_loss(logs, target, weight, ignore_index=ignore, reduction=reduction)
    return Result(y, exact=(target, weight))


def nll_backward(saved: Saved, grad: Tensor) -> Grads:
    ((shape, dtype), reduction, ignore), _, _, (target, weight) = saved
    index, at_target, _ = by_target(target, weight, ignore, reduction == "mean", grad)
    axis = class_axis(len(shape))
    dz = at_target.new_zeros(shape)
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
) -> Any:
    """Route of `F.cross_entropy` without `tile`.

    Class indices or probabilities, `(C,)`, `(N, C)` or `(N, C, d1, …)`.
    """
    trained = weight is not None and weight.requires_grad
    if size_average is not None or reduce is not None or trained:
        return call.refuse("cross_entropy has no formula for size_average, reduce or trained class weights")
    if not call.gains(input):
        return call.plain()
    if label_smoothing == 0 and not target.is_floating_point():
        return call.apply(CROSS_ENTROPY, (reduction, ignore_index), input, target, weight)
    static = (reduction, ignore_index, label_smoothing)
    return call.apply(SOFT_CROSS_ENTROPY, static, input, target, weight)


def log_softmax(call: Call, input: Tensor, dim: Any = None, dtype: torch.dtype | None = None) -> Any:
    """Route of `torch.log_softmax` and the method."""
    if input.numel() and (_is_alone(input, dim) or (dtype is torch.float64 is not input.dtype)):
        return call.plain()
    return along(LOG_SOFTMAX, call, input, dim, dtype)


def _is_alone(x: Tensor, dim: Any) -> bool:
    """Return whether each row along `dim` has one element, whose probability would be saved exactly."""
    return isinstance(dim, int) and -x.dim() <= dim < x.dim() and x.shape[dim] < 2


def nll_loss(
    call: Call,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Any:
    """Route of `F.nll_loss`: log-probabilities `(C,)`, `(N, C)` or `(N, C, d1, …)`."""
    if size_average is not None or reduce is not None:
        return call.refuse("nll_loss has no formula for size_average and reduce")
    # What PyTorch saves of a small tensor exists anyway.
    if not call.gains(input):
        return call.plain()
    return call.apply(NLL_LOSS, (like(input), reduction, ignore_index), input, target, weight)


ROUTES: Routes = {
    F.log_softmax: Route("log_softmax", "softmax", partial(functional_along, log_softmax)),
    **Route("log_softmax", "softmax", log_softmax).spelled("log_softmax", owners=OWNERS),
    F.nll_loss: Route("nll_loss", "loss", nll_loss),
}
LAYERS: Layers = {nn.CrossEntropyLoss: F.cross_entropy, nn.LogSoftmax: F.log_softmax, nn.NLLLoss: F.nll_loss}
