"""y = x Wᵀ + b. Kept: x, if W wants a gradient (and W by reference, or encoded if it is computed, if x does).

dx = g W, dW = gᵀ x, db = Σ g. The gradient of W is linear in the copy of x, so its error is unbiased.
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mesa_tune.functional.formula import Formula, Needs, Result, Static, autocast_dtype, cast

if TYPE_CHECKING:
    from mesa_tune.functional.call import Call


def forward(static: Static, needs: Needs, x: Tensor, weight: Tensor, bias: Tensor | None) -> Result:
    (dtype,) = static
    y = F.linear(cast(x, dtype), cast(weight, dtype), None if bias is None else cast(bias, dtype))
    # The result of F.linear may be a view, on which a later in-place operation would fail.
    y = torch.ops.aten._unsafe_view(y, y.shape)
    return Result(y, lossy=((x,) if needs[1] else ()) + ((weight,) if needs[0] else ()))


def backward(
    static: Static, needs: Needs, lossy: list[Tensor], exact: Any, grad: Tensor
) -> tuple[Tensor | None, ...]:
    (dtype,) = static
    kept = [cast(tensor, dtype) for tensor in lossy]
    rows = grad.reshape(-1, grad.shape[-1])
    dx = grad @ kept[-1] if needs[0] else None
    dw = rows.t() @ kept[0].reshape(-1, kept[0].shape[-1]) if needs[1] else None
    if dw is not None and grad.dim() == 1:
        dw = torch.outer(grad, kept[0])
    db = rows.sum(0) if needs[2] else None
    return dx, dw, db


LINEAR = Formula(forward, backward, "the input, where the weight wants a gradient", independent=(0,))


def linear(call: "Call", input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """`F.linear`: input `(*, in)`, weight `(out, in)` or `(in,)`, bias `(out,)`."""
    if weight.dim() != 2:
        return call.refuse("its weight is a vector")
    return call.apply("linear", (autocast_dtype(input),), input, weight, bias)
