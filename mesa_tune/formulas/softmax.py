"""Softmax, y = exp(x) / Σ exp(x). Saved: the output y, which a following product saves too, so that both
share one copy:  dx = y (g − Σ g y). It takes nothing but y, so no exact statistic meets a rounded tensor
(Rule 7).

Log-sum-exp, y = log Σ exp(x). Saved: the probabilities p = exp(x − y); dx = g p, linear in p. PyTorch saves
x, whose rounding would be exponentiated.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mesa_tune.engine.call import Call
from mesa_tune.engine.formula import (
    Formula,
    Grads,
    Layers,
    Needs,
    Rebuild,
    Result,
    Route,
    Routes,
    Saved,
    Static,
)
from mesa_tune.engine.tensors import cast
from mesa_tune.formulas.amax import restored, sorted_dims
from mesa_tune.ops import maps
from mesa_tune.ops.fused import SOFTMAX_BACKWARD


def softmax_forward(static: Static, needs: Needs, x: Tensor) -> Result:
    dim, dtype, _ = static
    y = torch.softmax(x, dim, dtype=dtype)
    return Result(y, (maps.definite(y),))


def softmax_backward(saved: Saved, grad: Tensor) -> Grads:
    """In one pass along the last dimension; else in slices of a large tensor, or of the whole."""
    (dim, _, dtype), (y,) = saved.static, saved.lossy
    dim %= max(grad.dim(), 1)
    if dtype == grad.dtype:
        dx = y.by_rows(SOFTMAX_BACKWARD, grad) if dim == grad.dim() - 1 else None
        if dx is not None:
            return (dx,)
        slices = y.slices(grad.dtype) if dim else None
        if slices is not None:
            dx = torch.empty_like(grad)
            for part, probabilities in slices:
                dx[part] = _gradient(grad[part], probabilities, dim)
            return (dx,)
    return (cast(_gradient(grad, y.whole(), dim), dtype),)


def _gradient(grad: Tensor, y: Tensor, dim: int) -> Tensor:
    dx: Tensor = torch.ops.aten._softmax_backward_data(grad, y, dim, y.dtype)
    return dx


SOFTMAX = Formula(
    "softmax",
    softmax_forward,
    softmax_backward,
    "the output",
    rebuild=Rebuild(lambda given: given.lossy[0], when=lambda static, needs: static[1] is None),
)


def logsumexp_forward(static: Static, needs: Needs, x: Tensor) -> Result:
    y = torch.logsumexp(x, *static)
    total = restored(y, *static)
    # Where nothing counts, every exp(x) is 0, and so is the gradient.
    p = (x - total.masked_fill(total == -torch.inf, 0)).exp_().to(x.dtype)
    return Result(y, (p,))


def logsumexp_backward(saved: Saved, grad: Tensor) -> Grads:
    p = saved.lossy[0].whole()
    return ((p * restored(grad, *saved.static)).to(p.dtype),)


LOGSUMEXP = Formula("logsumexp", logsumexp_forward, logsumexp_backward, "the probabilities")


def logsumexp(call: Call, input: Tensor, dim: Any, keepdim: bool = False) -> Any:
    """Route of `torch.logsumexp` and the method."""
    dims = sorted_dims(input, dim)
    if not (dims and input.is_floating_point() and call.gains_on(input)):
        return call.plain()
    return call.apply(LOGSUMEXP, (dims, keepdim), input)


def along(
    formula: Formula, call: Call, input: Tensor, dim: Any = None, dtype: torch.dtype | None = None
) -> Any:
    """Serve `formula` along a dimension, with the parameters of torch's function and the method."""
    if not isinstance(dim, int):
        return call.refuse(f"{formula.name} has a formula only for a numbered `dim`")
    return call.apply(formula, (dim, dtype, input.dtype), input)


def functional_along(
    serve: Callable[..., Any],
    call: Call,
    input: Tensor,
    dim: int | None = None,
    _stacklevel: int = 3,
    dtype: torch.dtype | None = None,
) -> Any:
    """Return what `serve` does, with the parameters of `torch.nn.functional`."""
    return serve(call, input, dim, dtype)


def softmax(call: Call, input: Tensor, dim: Any = None, dtype: torch.dtype | None = None) -> Any:
    """Route of `torch.softmax` and the method."""
    return along(SOFTMAX, call, input, dim, dtype)


OWNERS = (torch, torch.special, Tensor)
# Partial functions, unlike closures, pickle, and a converted model's routes go with it.
ROUTES: Routes = {
    F.softmax: Route("softmax", "softmax", partial(functional_along, softmax)),
    **Route("softmax", "softmax", softmax).spelled("softmax", owners=OWNERS),
    **Route("logsumexp", "softmax", logsumexp).spelled("logsumexp", owners=OWNERS),
}
LAYERS: Layers = {nn.Softmax: F.softmax, nn.Softmax2d: F.softmax}
