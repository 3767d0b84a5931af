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
    Layers,
    Needs,
    Rebuild,
    References,
    Result,
    Route,
    Routes,
    Static,
    Tensors,
    cast,
)
from mesa_tune.engine.packed import Held
from mesa_tune.formulas.amax import restored, sorted_dims
from mesa_tune.ops import maps


def softmax_forward(static: Static, needs: Needs, x: Tensor) -> Result:
    dim, dtype, _ = static
    y = torch.softmax(x, dim, dtype=dtype)
    return Result(y, lossy=(maps.definite(y),))


def softmax_backward(
    static: Static, needs: Needs, lossy: list[Tensor], exact: Any, grad: Tensor
) -> tuple[Tensor | None]:
    dim, _, given = static
    y = lossy[0]
    return (cast(torch.ops.aten._softmax_backward_data(grad, y, dim, y.dtype), given),)


def softmax_piecewise(
    static: Static, needs: Needs, held: list[Held], exact: Any, grad: Tensor
) -> tuple[Tensor | None] | None:
    """In one pass along the last dimension, else dx of some samples at a time."""
    dim, _, given = static
    if given != grad.dtype or not grad.dim():
        return None
    dim %= grad.dim()
    found = held[0].softmax_backward(grad) if dim == grad.dim() - 1 else None
    if found is not None:
        return (found,)
    pieces = held[0].parts_of(grad.dtype) if dim else None
    if pieces is None:
        return None
    dx = torch.empty_like(grad)
    for part, y in pieces:
        dx[part] = torch.ops.aten._softmax_backward_data(grad[part], y, dim, y.dtype)
    return (dx,)


def _output(
    static: Static, lossy: Tensors, exact: Tensors, references: References, inputs: Tensors
) -> Tensor:
    """What is kept is the output."""
    return lossy[0]


def _keeps_output(static: Static, needs: Needs) -> bool:
    return static[1] is None


SOFTMAX = Formula(
    "softmax",
    softmax_forward,
    softmax_backward,
    "the output",
    piecewise=softmax_piecewise,
    rebuild=Rebuild(_output, when=_keeps_output),
)


def logsumexp_forward(static: Static, needs: Needs, x: Tensor) -> Result:
    dims, keepdim = static
    y = torch.logsumexp(x, dims, keepdim)
    total = restored(y, dims, keepdim)
    # Where nothing counts, every exp(x) is 0, and so is the gradient.
    p = (x - total.masked_fill(total == -torch.inf, 0)).exp_().to(x.dtype)
    return Result(y, lossy=(p,))


def logsumexp_backward(
    static: Static, needs: Needs, lossy: list[Tensor], exact: Any, grad: Tensor
) -> tuple[Tensor | None]:
    dims, keepdim = static
    return ((lossy[0] * restored(grad, dims, keepdim)).to(lossy[0].dtype),)


LOGSUMEXP = Formula("logsumexp", logsumexp_forward, logsumexp_backward, "the probabilities")


def logsumexp(call: Call, input: Tensor, dim: Any, keepdim: bool = False, **unknown: Any) -> Any:
    """`torch.logsumexp` and the method."""
    dims = sorted_dims(input, dim)
    if unknown or not dims or not input.is_floating_point() or call.is_static(input) or call.small(input):
        return call.plain()
    return call.apply(LOGSUMEXP, (dims, keepdim), input)


def along(
    formula: Formula,
    call: Call,
    input: Tensor,
    dim: Any = None,
    dtype: torch.dtype | None = None,
    **unknown: Any,
) -> Any:
    """`formula` along a dimension, as torch and the method are called."""
    if unknown or not isinstance(dim, int):
        return call.refuse(f"{formula.name} has a formula only for a numbered `dim`, and none with `out`")
    return call.apply(formula, (dim, dtype, input.dtype), input)


def functional_along(
    serve: Callable[..., Any],
    call: Call,
    input: Tensor,
    dim: int | None = None,
    _stacklevel: int = 3,
    dtype: torch.dtype | None = None,
    **unknown: Any,
) -> Any:
    """What `serve` does as torch calls it, as `torch.nn.functional` is called."""
    return serve(call, input, dim, dtype, **unknown)


def softmax(
    call: Call, input: Tensor, dim: Any = None, dtype: torch.dtype | None = None, **unknown: Any
) -> Any:
    """`torch.softmax` and the method."""
    return along(SOFTMAX, call, input, dim, dtype, **unknown)


# Partial functions, unlike closures, pickle, and a converted model's routes go with it.
functional_softmax = partial(functional_along, softmax)

_LOGSUMEXP = Route("logsumexp", "softmax", logsumexp)
_SOFTMAX = Route("softmax", "softmax", softmax)
ROUTES: Routes = {
    F.softmax: Route("softmax", "softmax", functional_softmax),
    torch.softmax: _SOFTMAX,
    torch.special.softmax: _SOFTMAX,
    Tensor.softmax: _SOFTMAX,
    torch.logsumexp: _LOGSUMEXP,
    torch.special.logsumexp: _LOGSUMEXP,
    Tensor.logsumexp: _LOGSUMEXP,
}
LAYERS: Layers = {nn.Softmax: F.softmax, nn.Softmax2d: F.softmax}
