"""y = x Wᵀ + b. Saved: x, if W wants a gradient (and W by reference, or packed if it is computed, if x does).

dx = g W, dW = gᵀ x, db = Σ g. The gradient of W is linear in the copy of x, so its error is unbiased.

Rows of zeros stay zeros (`pack_zero_rows`).

Bilinear, y_k = a Wₖ bᵀ + b_k, saves both inputs; the gradient of W multiplies their copies, whose rounding is
independent.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mesa_tune.codecs import Spec
from mesa_tune.engine.call import Call, autocast_dtype
from mesa_tune.engine.formula import Formula, Grads, Layers, Needs, Result, Route, Routes, Saved, Static
from mesa_tune.engine.saved import SavedTensor, Total
from mesa_tune.engine.storage import without_zero_rows
from mesa_tune.engine.tensors import cast, wanted
from mesa_tune.ops.devices import on_cpu
from mesa_tune.ops.fused import LINEAR_BACKWARD

LOGITS = 6
"""A layer with more than 6 times as many outputs as inputs may make logits, an MLP's first layer has 4 to 5.4
(SwiGLU's two in one): in a policy that tiles losses, such a layer saves its input as it is.
"""

LARGEST_WEIGHT = 1 << 19
"""Of so many elements at most, a weight's gradient stays in the cache while all rows are added to it."""


def last_axis(_: Static) -> int:
    """Return the axis of a row's elements: the last one."""
    return -1


def forward(static: Static, needs: Needs, x: Tensor, weight: Tensor, bias: Tensor | None) -> Result:
    dtype, marks_zeros = static
    factor = cast(weight, dtype)
    if needs[1] and factor is not weight and not torch.compiler.is_compiling():
        factor.requires_grad_()  # by which PyTorch chooses how a batch of matrices is multiplied
    y = F.linear(cast(x, dtype), factor, None if bias is None else cast(bias, dtype))
    lossy = ((x,) if needs[1] else ()) + ((weight,) if needs[0] else ())
    return Result(y, lossy, marked=1 if marks_zeros else 0)


def backward(saved: Saved, grad: Tensor) -> Grads:
    """In one pass where that is possible; else x, a large one in slices, is gone before dx is made."""
    (dtype, _), needs, lossy, zeros = saved
    zero_rows = zeros[0] if zeros else None
    if needs[1]:
        weight = lossy[1] if needs[0] else None
        grads = fused_backward(lossy[0], grad, weight, zero_rows=zero_rows, bias=needs[2])
        if grads is not None:
            return wanted(grads, needs)
    rows = _rows(grad)
    dw = _weight_gradient(rows, lossy[0], dtype, zero_rows) if needs[1] else None
    dx = grad @ lossy[-1].whole(dtype) if needs[0] else None
    return dx, dw, rows.sum(0) if needs[2] else None


def fused_backward(
    x: SavedTensor,
    grad: Tensor,
    weight: SavedTensor | None,
    *,
    zero_rows: Tensor | None = None,
    bias: bool = False,
    transposed: bool = False,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the gradients of the input `(*, in)`, the weight `(out, in)`, or, `transposed`, `(in, out)`, and
    the bias, in the dtype of `grad`, made in one pass over the packed input; None where that is not possible.
    """
    possible = x.packing.packed and on_cpu(grad) and x.is_row_major()
    if not possible or grad.shape[-1] * x.shape[-1] > LARGEST_WEIGHT:
        return None
    factor = None if weight is None else weight.whole()
    grads: tuple[Tensor, Tensor, Tensor] | None
    grads = x.fused(LINEAR_BACKWARD, grad, factor, zero_rows, x.shape[-1], transposed, bias)
    return grads


def _rows(x: Tensor) -> Tensor:
    return x.unsqueeze(0) if x.dim() == 1 else x.flatten(0, -2)


def _weight_gradient(
    rows: Tensor, x: SavedTensor, dtype: torch.dtype | None, zero_rows: Tensor | None
) -> Tensor | None:
    """Return gᵀ x; in the rows of x that are zero, either x or g is 0."""
    sampled = x.sampled()
    slices = None if sampled is not None else x.narrowed(dtype).rows(rows.dtype)
    if zero_rows is not None:
        cleared = x.cleared(zero_rows, dtype) if sampled is None and slices is None else None
        if cleared is not None:
            return rows.t() @ _rows(cleared)
        rows = without_zero_rows(rows, zero_rows)
    if sampled is not None:
        indices, part = sampled
        return rows[indices].t() @ cast(part, dtype)
    if slices is None:
        return rows.t() @ _rows(x.whole(dtype))
    dw = Total()
    for first, part in slices:
        dw.add(rows[first : first + part.shape[0]].t() @ part)
    return dw.value


LINEAR = Formula(
    "linear",
    forward,
    backward,
    "the input, where the weight wants a gradient; exact: which of its rows are zero",
    independent=(0,),
    views=True,
    row_axis=last_axis,
)


def head_forward(static: Static, needs: Needs, x: Tensor, weight: Tensor, bias: Tensor | None) -> Result:
    return forward((static[0], False), needs, x, weight, bias)._replace(lossy=(), exact=(x, weight))


def head_backward(saved: Saved, grad: Tensor) -> Grads:
    """Only other consumers of the logits have a gradient for them: the loss goes past them."""
    needs, (x, weight) = saved.needs, [SavedTensor.of(tensor) for tensor in saved.exact]
    lossy = ((x,) if needs[1] else ()) + ((weight,) if needs[0] else ())
    return backward(Saved((saved.static[0], False), needs, lossy, ()), grad)


HEAD = Formula(
    "linear_head",
    head_forward,
    head_backward,
    "nothing lossy; exact: the input, which a tiled loss takes too, even for a frozen weight",
    lossless=True,
    views=True,
    row_axis=last_axis,
    is_head=True,
)


def bilinear_forward(
    static: Static, needs: Needs, a: Tensor, b: Tensor, weight: Tensor, bias: Tensor | None
) -> Result:
    lossy = ((a,) if needs[1] or needs[2] else ()) + ((b,) if needs[0] or needs[2] else ())
    return Result(F.bilinear(a, b, weight, bias), lossy=(*lossy, weight))


def bilinear_backward(saved: Saved, grad: Tensor) -> Grads:
    needs, (*inputs, weight) = saved.needs, [tensor.whole() for tensor in saved.lossy]
    rows = _rows(grad)
    da = db = dw = None
    if needs[0]:
        da = torch.einsum("nk,kij,nj->ni", rows, weight, _rows(inputs[-1])).view(*grad.shape[:-1], -1)
    if needs[1]:
        db = torch.einsum("nk,kij,ni->nj", rows, weight, _rows(inputs[0])).view(*grad.shape[:-1], -1)
    if needs[2]:
        dw = torch.einsum("nk,ni,nj->kij", rows, _rows(inputs[0]), _rows(inputs[1]))
    return da, db, dw, rows.sum(0) if needs[3] else None


BILINEAR = Formula(
    "bilinear",
    bilinear_forward,
    bilinear_backward,
    "each input whose partner or weight wants a gradient",
    views=True,
)


def linear(call: Call, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """Route of `F.linear`: input `(*, in)`, weight `(out, in)`, bias `(out,)`."""
    fits = weight.dim() == 2 and (bias is None or (bias.dim() == 1 and bias.size(0) == weight.size(0)))
    if not fits:
        return call.refuse("linear has a formula only for a weight (out, in) and a bias (out,)")
    if call.spec.feeds_tiled and not torch.compiler.is_compiling():
        if _may_make_logits(call.spec, weight):
            return call.apply(HEAD, (autocast_dtype(input),), input, weight, bias)
        if call.spec.levels == 0:
            return call.plain()
    marks_zeros = weight.requires_grad and call.may_lose_zeros(input)
    return call.apply(LINEAR, (autocast_dtype(input), marks_zeros), input, weight, bias)


def _may_make_logits(spec: Spec, weight: Tensor) -> bool:
    """Return whether a tiled loss may go past this layer's output; its input is then saved as it is.

    If it is anyway, more outputs than inputs are enough.
    """
    outputs, inputs = weight.shape
    return outputs > inputs * (LOGITS if spec.levels else 1)


def bilinear(call: Call, input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """Route of `F.bilinear`: inputs `(*, in1)` and `(*, in2)`, weight `(out, in1, in2)`, bias `(out,)`."""
    if weight.dim() != 3:
        return call.refuse("bilinear has a formula only for a weight (out, in1, in2)")
    if not call.gains(input1, input2):
        return call.plain()
    return call.apply(BILINEAR, (), input1, input2, weight, bias)


ROUTES: Routes = {
    F.linear: Route("linear", "fc", linear),
    F.bilinear: Route("bilinear", "fc", bilinear),  # the same object as torch.bilinear
}
LAYERS: Layers = {nn.Linear: F.linear, nn.Bilinear: F.bilinear}
