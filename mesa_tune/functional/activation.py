"""Softmax, y = exp(x) / Σ exp(x). Kept: the output y, which a following product keeps too, so that both share
one copy:  dx = y (g − Σ g y). It takes nothing but y, so no exact statistic meets a rounded tensor (Rule 7).
"""

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mesa_tune.functional.formula import Formula, Layers, Needs, Result, Route, Routes, Static, cast
from mesa_tune.functional.held import Held

if TYPE_CHECKING:
    from mesa_tune.functional.call import Call


def softmax_forward(static: Static, needs: Needs, x: Tensor) -> Result:
    dim, dtype, _ = static
    y = torch.softmax(x, dim, dtype=dtype)
    return Result(y, lossy=(y,))


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


SOFTMAX = Formula(softmax_forward, softmax_backward, "the output", piecewise=softmax_piecewise)


def along(
    name: str, call: "Call", input: Tensor, dim: Any = None, dtype: torch.dtype | None = None, **unknown: Any
) -> Any:
    """Formula `name` along a dimension, as torch and the method are called."""
    if unknown or not isinstance(dim, int):
        return call.refuse(f"{name} has a formula only for a numbered `dim`, and none with `out`")
    return call.apply(name, (dim, dtype, input.dtype), input)


def functional_along(
    name: str,
    call: "Call",
    input: Tensor,
    dim: int | None = None,
    _stacklevel: int = 3,
    dtype: torch.dtype | None = None,
    **unknown: Any,
) -> Any:
    """The same, as `torch.nn.functional` is called."""
    return along(name, call, input, dim, dtype, **unknown)


# Partial functions, unlike closures, pickle, and a converted model's routes go with it.
softmax = partial(along, "softmax")
functional_softmax = partial(functional_along, "softmax")

FORMULAS = {"softmax": SOFTMAX}
_SOFTMAX = Route("softmax", "softmax", softmax)
ROUTES: Routes = {
    F.softmax: Route("softmax", "softmax", functional_softmax),
    torch.softmax: _SOFTMAX,
    torch.special.softmax: _SOFTMAX,
    Tensor.softmax: _SOFTMAX,
}
LAYERS: Layers = {nn.Softmax: F.softmax, nn.Softmax2d: F.softmax}
