"""Products and quotients, element by element.

y = a b keeps each operand whose partner wants a gradient, as it is before it is repeated along other
dimensions: da = Σ g b and db = Σ g a over those. Linear in each copy, so unbiased. Numbers cost nothing. A
small constant (rotary embeddings' cosines, masks) stays by reference, as in PyTorch: it is there anyway, and
one rounding of it would repeat in every row. Where one activation gates another, rows of zeros stay zeros
(`zero_rows`).

y = a / b keeps b by reference, as PyTorch does, and y, which a following product keeps too:  da = g / b,
db = −g y / b. Dividing by a rounded b has no bound, and an inverse 1 / b spans as many scales as b does.

A gated unit y = a σ(b) keeps two derived halves, σ(b) and a σ'(b), again linear: da = g σ(b), db = g a σ'(b).
"""

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
    gathered,
    like,
)
from mesa_tune.engine.packed import Held
from mesa_tune.engine.storage import pack_zero_rows
from mesa_tune.formulas.norms.composed import REPEATS, aligned, is_repeated, scale
from mesa_tune.formulas.zero_rows import cleared, may_be_lost

Lossy = list[Tensor] | list[Held]


def _times(kept: Tensor | Held, factor: Tensor) -> Tensor:
    """`factor` times what was kept: multiplied as it is decoded, if it is still packed."""
    return kept.times(factor) if isinstance(kept, Held) else factor * kept


def forward(static: Static, needs: Needs, a: Tensor, b: Tensor) -> Result:
    in_place = static[0]
    before = a.clone() if in_place and needs[1] else a
    y = a.mul_(b) if in_place else torch.mul(a, b)
    lossy = ((before,) if needs[1] else ()) + ((b,) if needs[0] else ())
    zeros = tuple([pack_zero_rows(each) for each in lossy]) if static[3] else ()
    return Result(y, lossy, zeros, in_place)


def backward(
    static: Static, needs: Needs, lossy: Lossy, exact: Any, grad: Tensor
) -> tuple[Tensor | None, ...]:
    _, a, b, marks_zeros = static
    of_a, of_b = (cleared(grad, exact[-1]), cleared(grad, exact[0])) if marks_zeros else (grad, grad)
    da = gathered(_times(lossy[-1], of_a), a) if needs[0] else None
    db = gathered(_times(lossy[0], of_b), b) if needs[1] else None
    return da, db


def product(
    static: Static, lossy: Tensors, exact: Tensors, references: References, inputs: Tensors
) -> Tensor:
    """a b."""
    return lossy[0] * lossy[1]


def _keeps_both(static: Static, needs: Needs) -> bool:
    in_place = static[0]
    return needs[0] and needs[1] and not in_place


MUL = Formula(
    "mul",
    forward,
    backward,
    "each operand whose partner wants a gradient",
    piecewise=backward,
    rebuild=Rebuild(product, kept=(0, 1), kept_is_input=True, when=_keeps_both),
)


def plus_forward(static: Static, needs: Needs, a: Tensor, b: Tensor, c: Tensor) -> Result:
    y = torch.addcmul(c, a, b, value=static[-1])
    return Result(y, ((a,) if needs[1] else ()) + ((b,) if needs[0] else ()))


def plus_backward(
    static: Static, needs: Needs, lossy: Lossy, exact: Any, grad: Tensor
) -> tuple[Tensor | None, ...]:
    a, b, c, value = static
    da, db = backward((False, a, b, False), needs, lossy, exact, grad if value == 1 else grad * value)
    return da, db, gathered(grad, c) if needs[2] else None


MUL_PLUS = Formula("mul_plus", plus_forward, plus_backward, MUL.keeps, piecewise=plus_backward)


def over_forward(static: Static, needs: Needs, a: Tensor, b: Tensor) -> Result:
    y = a.div_(b) if static[0] else torch.div(a, b)
    return Result(y, (y,), exact=(b,), in_place=static[0])


def over_backward(
    static: Static, needs: Needs, lossy: Lossy, exact: tuple[Tensor, ...], grad: Tensor
) -> tuple[Tensor | None, ...]:
    _, a, b = static
    da = grad / exact[0]
    return (gathered(da, a) if needs[0] else None), gathered(-_times(lossy[0], da), b)


DIV = Formula("div", over_forward, over_backward, "the output; exact: the divisor", piecewise=over_backward)


def glu_forward(static: Static, needs: Needs, x: Tensor) -> Result:
    (dim,) = static
    a, b = x.chunk(2, dim)
    gate = torch.sigmoid(b)
    return Result(F.glu(x, dim), lossy=(gate, torch.ops.aten.sigmoid_backward(a, gate)))


def glu_backward(
    static: Static, needs: Needs, lossy: Lossy, exact: Any, grad: Tensor
) -> tuple[Tensor | None]:
    return (torch.cat([_times(each, grad) for each in lossy], static[0]),)


GLU = Formula("glu", glu_forward, glu_backward, "the derivatives by both halves", piecewise=glu_backward)


def _worth(call: Call, x: Tensor, size: int) -> bool:
    """Whether `x`, kept for a result of `size` elements, is to be encoded."""
    return not (x.numel() * REPEATS <= size or call.small(x) or call.is_static(x))


def _pair(call: Call, a: Any, b: Any, in_place: bool) -> bool:
    """Whether our functions could take this pair: two tensors, one of which wants a gradient."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor) and (a.requires_grad or b.requires_grad)):
        return False
    # In place on a view or a leaf, autograd rebuilds or forbids more than a formula of ours could. What is
    # changed as well is no factor any more.
    return not (in_place and (a.is_leaf or a._base is not None or a is b or b._base is a))


def mul(call: Call, input: Any, other: Any, *, in_place: bool = False, **unknown: Any) -> Any:
    """`torch.mul` and `*`."""
    if not _pair(call, input, other, in_place):
        return call.plain()
    if unknown:
        return call.refuse(f"mul has no formula for {sorted(unknown)}")
    size = max(input.numel(), other.numel())
    kept = ((input, other), (other, input))
    for statistic, x in kept:
        if not in_place and statistic.requires_grad and is_repeated(statistic, x):
            return scale(call, x, statistic)
    if not any(partner.requires_grad and _worth(call, x, size) for x, partner in kept):
        return call.plain()
    gates = input.requires_grad and other.requires_grad and input.shape == other.shape
    marks_zeros = gates and may_be_lost(call, input) and may_be_lost(call, other)
    static = (in_place, like(input), like(other), marks_zeros)
    return _in_groups(call, kept).apply(MUL, static, input, other)


def _in_groups(call: Call, kept: tuple[tuple[Tensor, Tensor], ...]) -> Call:
    """`call` with groups that end with rows where a norm's weight multiplies them.

    Its gradient must not meet what zeros were rounded to.
    """
    for factor, x in kept:
        call = aligned(call, x) if factor.requires_grad and factor.numel() * REPEATS <= x.numel() else call
    return call


def div(
    call: Call,
    input: Any,
    other: Any,
    *,
    rounding_mode: str | None = None,
    in_place: bool = False,
    **unknown: Any,
) -> Any:
    """`torch.div` and `/`."""
    if rounding_mode is not None or not _pair(call, input, other, in_place):
        return call.plain()
    if unknown:
        return call.refuse(f"div has no formula for {sorted(unknown)}")
    # What PyTorch saves for other gradients is the divisor alone, and the batch or a parameter by reference.
    if not other.requires_grad or call.is_static(input) or call.small(input, other):
        return call.plain()
    call = aligned(call, input) if is_repeated(other, input) else call
    return call.apply(DIV, (in_place, like(input), like(other)), input, other)


def addcmul(
    call: Call, input: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: float = 1, **unknown: Any
) -> Any:
    """`torch.addcmul`."""
    if unknown:
        return call.refuse(f"addcmul has no formula for {sorted(unknown)}")
    if not any(each.requires_grad for each in (tensor1, tensor2)):
        return call.plain()
    static = (like(tensor1), like(tensor2), like(input), value)
    return call.apply(MUL_PLUS, static, tensor1, tensor2, input)


def glu(call: Call, input: Tensor, dim: int = -1) -> Any:
    """`F.glu`."""
    return call.plain() if call.is_static(input) else call.apply(GLU, (dim,), input)


_MUL = Route("mul", "mul", mul)
_DIV = Route("div", "mul", div)
_ADDCMUL = Route("addcmul", "mul", addcmul)
ROUTES: Routes = {
    **dict.fromkeys((torch.mul, Tensor.mul, torch.multiply, Tensor.multiply), _MUL),
    **dict.fromkeys((Tensor.__mul__, Tensor.__rmul__), _MUL),
    Tensor.mul_: Route("mul", "mul", partial(mul, in_place=True)),
    **dict.fromkeys((torch.div, Tensor.div, torch.divide, Tensor.divide, Tensor.__truediv__), _DIV),
    **dict.fromkeys((torch.true_divide, Tensor.true_divide), _DIV),
    Tensor.div_: Route("div", "mul", partial(div, in_place=True)),
    **dict.fromkeys((torch.addcmul, Tensor.addcmul), _ADDCMUL),
    F.glu: Route("glu", "mul", glu),
}
LAYERS: Layers = {nn.GLU: F.glu}
