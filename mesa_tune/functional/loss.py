"""Cross-entropy, −Σ q log p with p = softmax(z), and its two halves. Kept: p; exact: targets, class weights.

dz = p Σ q − q, where q holds what each class counts: class weight × (smoothed) target × the incoming
gradient, over the mean's divisor. For class indices q is (1 − ε) w at the target and ε w / C everywhere,
zero where the target is ignored. The gradient is linear in the copy of p, hence unbiased, and what is sure
stays sure: with the logits kept instead, the rounding of a large logit is exponentiated (at 4 bits and logits
of standard deviation 8 the error is 40 times larger for 10 classes, 120 times for 32,000). Only
where the targets themselves want a gradient, log p, are the logits kept.

Where PyTorch makes log p on the way, p is made of that, while it is encoded. A log-softmax likewise keeps p,
not its output:  dz = g − p Σ g. What follows it, nll_loss, keeps indices.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mesa_tune import maps
from mesa_tune.functional.activation import along, functional_along
from mesa_tune.functional.formula import Formula, Layers, Needs, Result, Route, Routes, Static, cast
from mesa_tune.functional.held import Held
from mesa_tune.fused_ops import by_target

if TYPE_CHECKING:
    from mesa_tune.functional.call import Call


def forward(static: Static, needs: Needs, logits: Tensor, target: Tensor, weight: Tensor | None) -> Result:
    reduction, ignore, smoothing = static
    how: Any = {"ignore_index": ignore, "reduction": reduction}
    axis = _class_axis(logits.dim())
    if logits.dtype == torch.float32 and smoothing == 0 and not target.is_floating_point():
        # PyTorch takes the same two steps; those of other dtypes differ under autocast.
        logs = torch.log_softmax(logits, axis)
        kept = maps.kept(logs, "exp", logs.exp)
        return Result(F.nll_loss(logs, target, weight, **how), lossy=(kept,), exact=(target, weight))
    y = F.cross_entropy(logits, target, weight, label_smoothing=smoothing, **how)
    kept = logits if needs[1] else torch.softmax(logits, axis).to(logits.dtype)
    return Result(y, lossy=(kept,), exact=(target, weight))


def backward(
    static: Static, needs: Needs, lossy: list[Tensor], exact: tuple[Tensor | None, ...], grad: Tensor
) -> tuple[Tensor | None, ...]:
    target, weight = exact
    assert target is not None
    given = lossy[0]
    wide = given.to(torch.promote_types(given.dtype, torch.float32))
    weight = None if weight is None else weight.to(wide.dtype)
    if target.is_floating_point():
        return (*_probabilities(static, needs, wide, target, weight, grad, given.dtype), None)
    dz = _indices(static, tuple(wide.shape), lambda total: wide * total, target, weight, grad.to(wide.dtype))
    return dz.to(given.dtype), None, None


def piecewise(
    static: Static, needs: Needs, held: list[Held], exact: tuple[Tensor | None, ...], grad: Tensor
) -> tuple[Tensor | None, ...] | None:
    """dz for class indices, in one pass, or p decoded some samples at a time."""
    target, weight = exact
    assert target is not None
    if target.is_floating_point():
        return None
    reduction, ignore, smoothing = static
    shape = held[0].meta.shape
    if smoothing == 0 and _class_axis(len(shape)) == len(shape) - 1:
        found = held[0].cross_entropy_backward(target, weight, grad, ignore, reduction == "mean")
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

    weight = None if weight is None else weight.to(torch.float32)
    return _indices(static, shape, product, target, weight, grad.to(torch.float32)), None, None


def _indices(
    static: Static,
    shape: tuple[int, ...],
    times: Callable[[Tensor], Tensor],
    target: Tensor,
    weight: Tensor | None,
    grad: Tensor,
) -> Tensor:
    """dz for class indices; `times` multiplies p, of this shape."""
    reduction, ignore, smoothing = static
    axis = _class_axis(len(shape))
    index, at_target, grad = by_target(target, weight, ignore, reduction == "mean", grad)
    index, at_target = index.unsqueeze(axis), at_target.unsqueeze(axis)
    if smoothing == 0:
        return times(at_target).scatter_add_(axis, index, -at_target)
    at_target, classes = at_target * (1 - smoothing), shape[axis]
    everywhere = (smoothing / classes * grad).unsqueeze(axis)
    dz = times(everywhere * (classes if weight is None else weight.sum()) + at_target)
    dz.scatter_add_(axis, index, -at_target)
    dz -= everywhere if weight is None else everywhere * _along(weight, len(shape))
    return dz


def _probabilities(
    static: Static,
    needs: Needs,
    kept: Tensor,
    target: Tensor,
    weight: Tensor | None,
    grad: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor | None, Tensor | None]:
    reduction, _, smoothing = static
    axis = _class_axis(kept.dim())
    classes = kept.shape[axis]
    grad = grad.to(kept.dtype)
    grad = grad / (kept.numel() // classes) if reduction == "mean" else grad
    counts = grad.unsqueeze(axis) if grad.dim() else grad
    counts = counts if weight is None else counts * _along(weight, kept.dim())
    dz = dt = None
    if needs[0]:
        q = counts * (target * (1 - smoothing) + smoothing / classes)
        p = torch.softmax(kept, axis) if needs[1] else kept
        dz = (p * q.sum(axis, keepdim=True) - q).to(dtype)
    if needs[1]:
        dt = (-(1 - smoothing) * counts * torch.log_softmax(kept, axis)).to(target.dtype)
    return dz, dt


def _class_axis(dims: int) -> int:
    return 0 if dims == 1 else 1


def _along(weight: Tensor, dims: int) -> Tensor:
    """Class weights, shaped to multiply logits of so many dimensions."""
    return weight if dims == 1 else weight.view([1, -1] + [1] * (dims - 2))


CROSS_ENTROPY = Formula(
    forward, backward, "the probabilities; exact: targets and class weights", piecewise=piecewise
)


def log_softmax_forward(static: Static, needs: Needs, x: Tensor) -> Result:
    dim, dtype, _ = static
    y = torch.log_softmax(x, dim, dtype=dtype)
    return Result(y, lossy=(maps.kept(y, "exp", y.exp),))


def log_softmax_backward(
    static: Static, needs: Needs, lossy: list[Tensor], exact: Any, grad: Tensor
) -> tuple[Tensor | None]:
    dim, _, given = static
    return (cast(torch.addcmul(grad, lossy[0], grad.sum(dim, keepdim=True), value=-1), given),)


LOG_SOFTMAX = Formula(log_softmax_forward, log_softmax_backward, "the probabilities")


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
    nll_forward, nll_backward, "nothing lossy; exact: targets and class weights", lossless=True
)


def cross_entropy(
    call: "Call",
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
    return call.apply("cross_entropy", (reduction, ignore_index, label_smoothing), input, target, weight)


log_softmax = partial(along, "log_softmax")
functional_log_softmax = partial(functional_along, "log_softmax")


def nll_loss(
    call: "Call",
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
    return call.apply("nll_loss", static, input, target, weight)


FORMULAS = {"cross_entropy": CROSS_ENTROPY, "log_softmax": LOG_SOFTMAX, "nll_loss": NLL_LOSS}
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
