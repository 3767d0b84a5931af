"""y = x Wᵀ + b. Kept: x, if W wants a gradient (and W by reference, or encoded if it is computed, if x does).

dx = g W, dW = gᵀ x, db = Σ g. The gradient of W is linear in the copy of x, so its error is unbiased.

Rows of zeros stay zeros (`zero_rows`).

Bilinear, y_k = a Wₖ bᵀ + b_k, keeps both inputs; the gradient of W multiplies their copies, whose rounding is
independent.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mesa_tune.engine.call import Call
from mesa_tune.engine.formula import (
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
    wanted,
)
from mesa_tune.engine.packed import Held, Total
from mesa_tune.engine.storage import pack_zero_rows
from mesa_tune.formulas.zero_rows import cleared, may_be_lost


def forward(static: Static, needs: Needs, x: Tensor, weight: Tensor, bias: Tensor | None) -> Result:
    dtype, marks_zeros = static
    given = cast(weight, dtype)
    if needs[1] and given is not weight and not torch.compiler.is_compiling():
        given.requires_grad_()  # by which PyTorch chooses how a batch of matrices is multiplied
    y = F.linear(cast(x, dtype), given, None if bias is None else cast(bias, dtype))
    zeros = (pack_zero_rows(x),) if marks_zeros else ()
    return Result(unviewed(y), ((x,) if needs[1] else ()) + ((weight,) if needs[0] else ()), zeros)


def backward(
    static: Static, needs: Needs, lossy: list[Tensor], exact: tuple[Tensor, ...], grad: Tensor
) -> tuple[Tensor | None, ...]:
    kept = [cast(tensor, static[0]) for tensor in lossy]
    dx = grad @ kept[-1] if needs[0] else None
    rows = _rows(grad)
    dw = _where_not_zero(rows, exact).t() @ _rows(kept[0]) if needs[1] else None
    db = rows.sum(0) if needs[2] else None
    return dx, dw, db


def _where_not_zero(rows: Tensor, exact: tuple[Tensor, ...]) -> Tensor:
    """Return the rows of a gradient, 0 where the input's are."""
    return cleared(rows, exact[0]) if exact else rows


def _rows(x: Tensor) -> Tensor:
    return x.unsqueeze(0) if x.dim() == 1 else x.flatten(0, -2)


def piecewise(
    static: Static, needs: Needs, held: list[Held], exact: tuple[Tensor, ...], grad: Tensor
) -> tuple[Tensor | None, ...]:
    """The same in one pass; else x is gone before dx is made, and a part of a large one is decoded at a
    time.
    """
    dtype, rows = static[0], _rows(grad)
    used = _where_not_zero(rows, exact) if needs[1] else rows
    if needs[1] and dtype is None and used is rows:
        found = held[0].linear_backward(grad, held[1].whole() if needs[0] else None, needs[2])
        if found is not None:
            return wanted(found, needs)
    dw = _weight_gradient(used, held[0], dtype) if needs[1] else None
    dx = grad @ cast(held[-1].whole(), dtype) if needs[0] else None
    return dx, dw, rows.sum(0) if needs[2] else None


def _weight_gradient(rows: Tensor, held: Held, dtype: torch.dtype | None) -> Tensor | None:
    pieces = held.rows(rows.dtype)
    if pieces is None:
        return rows.t() @ _rows(cast(held.whole(), dtype))
    dw = Total()
    for first, x in pieces:
        dw.add(rows[first : first + x.shape[0]].t() @ x)
    return dw.value


LINEAR = Formula(
    "linear",
    forward,
    backward,
    "the input, where the weight wants a gradient; exact: which of its rows are zero",
    independent=(0,),
    piecewise=piecewise,
)


def bilinear_forward(
    static: Static, needs: Needs, a: Tensor, b: Tensor, weight: Tensor, bias: Tensor | None
) -> Result:
    lossy = ((a,) if needs[1] or needs[2] else ()) + ((b,) if needs[0] or needs[2] else ())
    return Result(unviewed(F.bilinear(a, b, weight, bias)), lossy=(*lossy, weight))


def bilinear_backward(
    static: Static, needs: Needs, lossy: list[Tensor], exact: Any, grad: Tensor
) -> tuple[Tensor | None, ...]:
    weight, rows = lossy[-1], _rows(grad)
    da = db = dw = None
    if needs[0]:
        da = torch.einsum("nk,kij,nj->ni", rows, weight, _rows(lossy[-2])).view(*grad.shape[:-1], -1)
    if needs[1]:
        db = torch.einsum("nk,kij,ni->nj", rows, weight, _rows(lossy[0])).view(*grad.shape[:-1], -1)
    if needs[2]:
        dw = torch.einsum("nk,ni,nj->kij", rows, _rows(lossy[0]), _rows(lossy[1]))
    return da, db, dw, rows.sum(0) if needs[3] else None


BILINEAR = Formula(
    "bilinear", bilinear_forward, bilinear_backward, "each input whose partner or weight wants a gradient"
)


def linear(call: Call, input: Tensor, weight: Tensor, bias: Tensor | None = None, **unknown: Any) -> Any:
    """`F.linear`: input `(*, in)`, weight `(out, in)`, bias `(out,)`."""
    fits = weight.dim() == 2 and (bias is None or (bias.dim() == 1 and bias.size(0) == weight.size(0)))
    if unknown or not fits:
        return call.refuse("linear has a formula only for a weight (out, in), a bias (out,) and no `out`")
    return call.apply(
        LINEAR,
        (autocast_dtype(input), weight.requires_grad and may_be_lost(call, input)),
        input,
        weight,
        bias,
    )


def bilinear(
    call: Call,
    input1: Tensor,
    input2: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    **unknown: Any,
) -> Any:
    """`F.bilinear`: inputs `(*, in1)` and `(*, in2)`, weight `(out, in1, in2)`, bias `(out,)`."""
    if unknown or weight.dim() != 3:
        return call.refuse("bilinear has a formula only for a weight (out, in1, in2)")
    if call.small(input1, input2):
        return call.plain()
    return call.apply(BILINEAR, (), input1, input2, weight, bias)


_BILINEAR = Route("bilinear", "fc", bilinear)
ROUTES: Routes = {
    F.linear: Route("linear", "fc", linear),
    F.bilinear: _BILINEAR,
    torch.bilinear: _BILINEAR,
}
LAYERS: Layers = {nn.Linear: F.linear, nn.Bilinear: F.bilinear}
