"""y = x Wᵀ + b. Kept: x, if W wants a gradient (and W by reference, or encoded if it is computed, if x does).

dx = g W, dW = gᵀ x, db = Σ g. The gradient of W is linear in the copy of x, so its error is unbiased.
"""

from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor, nn

from mesa_tune.functional.formula import (
    Formula,
    Layers,
    Needs,
    Result,
    Route,
    Routes,
    Static,
    autocast_dtype,
    cast,
    unviewed,
)

if TYPE_CHECKING:
    from mesa_tune.functional.call import Call


def forward(static: Static, needs: Needs, x: Tensor, weight: Tensor, bias: Tensor | None) -> Result:
    (dtype,) = static
    y = F.linear(cast(x, dtype), cast(weight, dtype), None if bias is None else cast(bias, dtype))
    return Result(unviewed(y), lossy=((x,) if needs[1] else ()) + ((weight,) if needs[0] else ()))


def backward(
    static: Static, needs: Needs, lossy: list[Tensor], exact: Any, grad: Tensor
) -> tuple[Tensor | None, ...]:
    (dtype,) = static
    kept = [cast(tensor, dtype) for tensor in lossy]
    dx = grad @ kept[-1] if needs[0] else None
    rows = _rows(grad)
    dw = rows.t() @ _rows(kept[0]) if needs[1] else None
    db = rows.sum(0) if needs[2] else None
    return dx, dw, db


def _rows(x: Tensor) -> Tensor:
    return x.unsqueeze(0) if x.dim() == 1 else x.flatten(0, -2)


LINEAR = Formula(forward, backward, "the input, where the weight wants a gradient", independent=(0,))


def linear(call: "Call", input: Tensor, weight: Tensor, bias: Tensor | None = None, **unknown: Any) -> Any:
    """`F.linear`: input `(*, in)`, weight `(out, in)`, bias `(out,)`."""
    if unknown or weight.dim() != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        return call.refuse("linear has a formula only for a weight (out, in), a bias (out,) and no `out`")
    return call.apply("linear", (autocast_dtype(input),), input, weight, bias)


FORMULAS = {"linear": LINEAR}
ROUTES: Routes = {F.linear: Route("linear", "fc", linear)}
LAYERS: Layers = {nn.Linear: F.linear}
