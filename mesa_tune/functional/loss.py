"""Cross-entropy, −Σ q log p with p = softmax(z). Kept: the logits z; exact: targets and class weights.

Backward computes p from the decoded logits (Rule 7), so p sums to one:  dz = p Σ q − q, where q holds what
each class counts: class weight × (smoothed) target × the incoming gradient, over the mean's divisor. For
class indices q is (1 − ε) w at the target and ε w / C everywhere, zero where the target is ignored.
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mesa_tune.functional.formula import Formula, Layers, Needs, Result, Route, Routes, Static

if TYPE_CHECKING:
    from mesa_tune.functional.call import Call


def forward(static: Static, needs: Needs, logits: Tensor, target: Tensor, weight: Tensor | None) -> Result:
    reduction, ignore, smoothing = static
    y = F.cross_entropy(
        logits, target, weight, ignore_index=ignore, reduction=reduction, label_smoothing=smoothing
    )
    return Result(y, lossy=(logits,), exact=(target, weight))


def backward(
    static: Static, needs: Needs, lossy: list[Tensor], exact: tuple[Tensor | None, ...], grad: Tensor
) -> tuple[Tensor | None, ...]:
    target, weight = exact
    assert target is not None
    given = lossy[0]
    logits = given.to(torch.promote_types(given.dtype, torch.float32))
    weight = None if weight is None else weight.to(logits.dtype)
    if target.is_floating_point():
        return (*_probabilities(static, needs, logits, target, weight, grad, given.dtype), None)
    return _indices(static, logits, target, weight, grad).to(given.dtype), None, None


def _indices(static: Static, logits: Tensor, target: Tensor, weight: Tensor | None, grad: Tensor) -> Tensor:
    reduction, ignore, smoothing = static
    axis = _class_axis(logits)
    counted = target != ignore
    index = torch.where(counted, target, 0)
    own = counted.to(logits.dtype) if weight is None else torch.where(counted, weight[index], 0)
    grad = torch.where(counted, grad.to(logits.dtype), 0)
    grad = grad / own.sum() if reduction == "mean" else grad
    at_target = ((1 - smoothing) * own * grad).unsqueeze(axis)
    classes = logits.shape[axis]
    everywhere = (smoothing / classes * grad).unsqueeze(axis)
    total = everywhere * (classes if weight is None else weight.sum()) + at_target
    dz = torch.softmax(logits, axis).mul_(total)
    dz.scatter_add_(axis, index.unsqueeze(axis), -at_target)
    if smoothing > 0:
        dz -= everywhere if weight is None else everywhere * _along(weight, logits)
    return dz


def _probabilities(
    static: Static,
    needs: Needs,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    grad: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor | None, Tensor | None]:
    reduction, _, smoothing = static
    axis = _class_axis(logits)
    classes = logits.shape[axis]
    grad = grad.to(logits.dtype)
    grad = grad / (logits.numel() // classes) if reduction == "mean" else grad
    counts = grad.unsqueeze(axis) if grad.dim() else grad
    counts = counts if weight is None else counts * _along(weight, logits)
    dz = dt = None
    if needs[0]:
        q = counts * (target * (1 - smoothing) + smoothing / classes)
        dz = (torch.softmax(logits, axis) * q.sum(axis, keepdim=True) - q).to(dtype)
    if needs[1]:
        dt = (-(1 - smoothing) * counts * torch.log_softmax(logits, axis)).to(target.dtype)
    return dz, dt


def _class_axis(logits: Tensor) -> int:
    return 0 if logits.dim() == 1 else 1


def _along(weight: Tensor, logits: Tensor) -> Tensor:
    """Class weights, shaped to multiply logits."""
    return weight if logits.dim() == 1 else weight.view([1, -1] + [1] * (logits.dim() - 2))


CROSS_ENTROPY = Formula(forward, backward, "the logits; exact: targets and class weights")


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


FORMULAS = {"cross_entropy": CROSS_ENTROPY}
ROUTES: Routes = {F.cross_entropy: Route("cross_entropy", "loss", cross_entropy)}
LAYERS: Layers = {nn.CrossEntropyLoss: F.cross_entropy}
