"""Products and quotients, element by element.

y = a b. Saved: each operand whose partner wants a gradient, as it is before it is repeated along other
dimensions: da = Σ g b and db = Σ g a over those. Linear in each copy, so unbiased. Numbers cost nothing. A
small constant (rotary embeddings' cosines, masks) is saved by reference, as in PyTorch: it exists anyway, and
one rounding of it would repeat in every row. Where two activations are multiplied, rows of zeros stay zeros
(`pack_zero_rows`).

y = a / b. Saved: b by reference, as in PyTorch, and y, which a following product saves too:  da = g / b,
db = −g y / b. Dividing by a rounded b has no bound, and an inverse 1 / b spans as many scales as b does.

A gated unit y = a σ(b). Saved: two derived halves, σ(b) and a σ'(b), again linear: da = g σ(b),
db = g a σ'(b).
"""

from collections.abc import Sequence
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
from mesa_tune.engine.saved import SavedTensor
from mesa_tune.engine.storage import without_zero_rows
from mesa_tune.engine.tensors import gathered, like
from mesa_tune.formulas.norms.composed import REPEATS, aligned, is_repeated, scale
from mesa_tune.ops.fused import DEQUANTIZE_MUL


def times(tensor: SavedTensor, factor: Tensor) -> Tensor:
    """Return `factor` times a saved tensor, multiplied as it is decoded where that is possible."""
    product: Tensor | None = None
    if tensor.dtype == factor.dtype:
        product = tensor.by_rows(DEQUANTIZE_MUL, factor)
    if product is not None:
        return product
    whole = tensor.whole()
    if tensor.codec is None or (whole.shape, whole.dtype) != (factor.shape, factor.dtype):
        return factor * whole
    return whole.mul_(factor)  # a copy of its own


def forward(static: Static, needs: Needs, a: Tensor, b: Tensor) -> Result:
    in_place, *_, marks_zeros = static
    before = a.clone() if in_place and needs[1] else a
    y = a.mul_(b) if in_place else torch.mul(a, b)
    lossy = ((before,) if needs[1] else ()) + ((b,) if needs[0] else ())
    return Result(y, lossy, in_place=in_place, marked=len(lossy) if marks_zeros else 0)


def backward(saved: Saved, grad: Tensor) -> Grads:
    (_, a, b, marks_zeros), needs, lossy, zeros = saved
    of_a, of_b = (without_zero_rows(grad, zeros[i]) if marks_zeros else grad for i in (-1, 0))
    da = gathered(times(lossy[-1], of_a), a) if needs[0] else None
    return da, gathered(times(lossy[0], of_b), b) if needs[1] else None


MUL = Formula(
    "mul",
    forward,
    backward,
    "each operand whose partner wants a gradient",
    rebuild=Rebuild(
        lambda given: given.lossy[0] * given.lossy[1],
        saved=(0, 1),
        saved_is_input=True,
        when=lambda static, needs: needs[0] and needs[1] and not static[0],
    ),
)


def plus_forward(static: Static, needs: Needs, a: Tensor, b: Tensor, c: Tensor) -> Result:
    y = torch.addcmul(c, a, b, value=static[-1])
    return Result(y, ((a,) if needs[1] else ()) + ((b,) if needs[0] else ()))


def plus_backward(saved: Saved, grad: Tensor) -> Grads:
    (a, b, c, value), needs, lossy, exact = saved
    product = Saved((False, a, b, False), needs, lossy, exact)
    da, db = backward(product, grad if value == 1 else grad * value)
    return da, db, gathered(grad, c) if needs[2] else None


MUL_PLUS = Formula("mul_plus", plus_forward, plus_backward, MUL.saves)


def over_forward(static: Static, needs: Needs, a: Tensor, b: Tensor) -> Result:
    y = a.div_(b) if static[0] else torch.div(a, b)
    return Result(y, (y,), (b,), in_place=static[0])


def over_backward(saved: Saved, grad: Tensor) -> Grads:
    (_, a, b), needs, (y,), (divisor,) = saved
    da = grad / divisor
    return gathered(da, a) if needs[0] else None, gathered(-times(y, da), b)


DIV = Formula("div", over_forward, over_backward, "the output; exact: the divisor")


def glu_forward(static: Static, needs: Needs, x: Tensor) -> Result:
    (dim,) = static
    a, b = x.chunk(2, dim)
    gate = torch.sigmoid(b)
    return Result(F.glu(x, dim), (gate, torch.ops.aten.sigmoid_backward(a, gate)))


def glu_backward(saved: Saved, grad: Tensor) -> Grads:
    return (torch.cat([times(derivative, grad) for derivative in saved.lossy], saved.static[0]),)


GLU = Formula("glu", glu_forward, glu_backward, "the derivatives by both halves")


def _is_own(_: Any, tensor: Tensor) -> bool:
    """Return whether `tensor` is neither a leaf nor a view."""
    return not tensor.is_leaf and tensor._base is None


def _is_pair(call: Call, a: Any, b: Any, in_place: bool) -> bool:
    """Return whether a formula may take this pair: two tensors, one of which wants a gradient."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor) and (a.requires_grad or b.requires_grad)):
        return False
    # In place on a view or a leaf, autograd rebuilds or forbids more than a formula could. A factor that is a
    # view of the product changes with it; that is asked each time, as no product in place is cached.
    return not in_place or (call.ask(_is_own, a) and b is not a and b._base is not a)


def mul(in_place: bool, call: Call, input: Any, other: Any) -> Any:
    """Route of `torch.mul` and `*`."""
    if not _is_pair(call, input, other, in_place):
        return call.plain()
    size = max(input.numel(), other.numel())
    pairs = ((input, other), (other, input))
    for statistic, x in pairs:
        if not in_place and statistic.requires_grad and is_repeated(statistic, x):
            return scale(call, x, statistic)
    if not any(partner.requires_grad and _gains(call, x, size) for x, partner in pairs):
        return call.plain()
    call = _aligned(call, pairs)
    both = input.requires_grad and other.requires_grad and input.shape == other.shape
    marks_zeros = both and call.may_lose_zeros(input) and call.may_lose_zeros(other)
    return call.apply(MUL, (in_place, like(input), like(other), marks_zeros), input, other)


def _aligned(call: Call, pairs: Sequence[tuple[Tensor, Tensor]]) -> Call:
    """Return `call` with groups that end with rows, if the product is a square or by a norm's weight."""
    if pairs[0][0] is pairs[0][1]:  # as of a norm by hand: small rows must not have the range of larger ones
        return aligned(call, pairs[0][0])
    for factor, x in pairs:
        # The gradient of a norm's weight must not meet what zeros were rounded to.
        if factor.requires_grad and factor.numel() * REPEATS <= x.numel():
            call = aligned(call, x)
    return call


def _gains(call: Call, x: Tensor, size: int) -> bool:
    """Return whether `x`, saved for a result of `size` elements, is worth packing."""
    return x.numel() * REPEATS > size and call.gains(x) and not call.is_static(x)


def div(in_place: bool, call: Call, input: Any, other: Any, *, rounding_mode: str | None = None) -> Any:
    """Route of `torch.div` and `/`."""
    if rounding_mode is not None or not _is_pair(call, input, other, in_place):
        return call.plain()
    # What PyTorch saves for other gradients is the divisor alone, and the batch or a parameter by reference.
    if not other.requires_grad or call.is_static(input) or not call.gains(input, other):
        return call.plain()
    call = aligned(call, input) if is_repeated(other, input) else call
    return call.apply(DIV, (in_place, like(input), like(other)), input, other)


def addcmul(call: Call, input: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: float = 1) -> Any:
    """Route of `torch.addcmul`."""
    if not (tensor1.requires_grad or tensor2.requires_grad):
        return call.plain()
    static = (like(tensor1), like(tensor2), like(input), value)
    return call.apply(MUL_PLUS, static, tensor1, tensor2, input)


def glu(call: Call, input: Tensor, dim: int = -1) -> Any:
    """Route of `F.glu`."""
    return call.plain() if call.is_static(input) else call.apply(GLU, (dim,), input)


_MUL = Route("mul", "mul", partial(mul, False))
_DIV = Route("div", "mul", partial(div, False))
ROUTES: Routes = {
    **_MUL.spelled("mul", "multiply"),
    **_MUL.spelled("__mul__", "__rmul__", owners=(Tensor,)),
    Tensor.mul_: Route("mul", "mul", partial(mul, True)),
    **_DIV.spelled("div", "divide", "true_divide"),
    Tensor.__truediv__: _DIV,
    Tensor.div_: Route("div", "mul", partial(div, True)),
    **Route("addcmul", "mul", addcmul).spelled("addcmul"),
    F.glu: Route("glu", "mul", glu),
}
LAYERS: Layers = {nn.GLU: F.glu}
