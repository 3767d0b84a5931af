"""y = Σ a b along named dimensions (`einsum`). Kept: each operand whose partner wants a gradient.

da = Σ g b along the dimensions of y and b that a does not have, spread along those that only a has. Linear in
each copy, so unbiased. Equations of two operands; an operand's diagonal (`ii`) has no formula.
"""

from string import ascii_letters
from typing import Any

import torch
from torch import Tensor

from mesa_tune.engine.call import Call
from mesa_tune.engine.formula import Formula, Layers, Needs, Result, Route, Routes, Static, unviewed

_ELLIPSIS = "..."


def forward(static: Static, needs: Needs, a: Tensor, b: Tensor) -> Result:
    first, second, out = static[0]
    y = torch.einsum(f"{first},{second}->{out}", a, b)
    return Result(unviewed(y), ((a,) if needs[1] else ()) + ((b,) if needs[0] else ()))


def backward(
    static: Static, needs: Needs, lossy: list[Tensor], exact: Any, grad: Tensor
) -> tuple[Tensor | None, ...]:
    (first, second, out), like_a, like_b = static
    da = _gradient(grad, out, lossy[-1], second, first, like_a) if needs[0] else None
    db = _gradient(grad, out, lossy[0], first, second, like_b) if needs[1] else None
    return da, db


def _gradient(
    grad: Tensor, out: str, partner: Tensor, other: str, own: str, like: tuple[tuple[int, ...], torch.dtype]
) -> Tensor:
    shape, dtype = like
    found = "".join(letter for letter in own if letter in out + other)
    result = torch.einsum(f"{out},{other}->{found}", grad, partner.to(grad.dtype))
    for place, letter in enumerate(own):
        if letter not in found:
            result = result.unsqueeze(place)
    # A dimension of one stands for as many as the partner has.
    repeated = [d for d, size in enumerate(shape) if size == 1 and result.shape[d] != 1]
    return (result.sum(repeated, keepdim=True) if repeated else result).expand(shape).to(dtype)


EINSUM = Formula("einsum", forward, backward, "each operand whose partner wants a gradient")


def spelled_out(equation: str, ranks: tuple[int, ...]) -> tuple[str, ...] | None:
    """The letters of each operand and of the result, ellipses and an implied result included.

    None for an operand that has a letter twice. `ranks` are the operands' numbers of dimensions.
    """
    given, arrow, out = equation.replace(" ", "").partition("->")
    terms = given.split(",")
    if any(len(set(term.replace(_ELLIPSIS, ""))) < len(term.replace(_ELLIPSIS, "")) for term in terms):
        return None
    letters = [term.replace(_ELLIPSIS, "") for term in terms]
    hidden = [rank - len(own) for rank, own in zip(ranks, letters, strict=True)]
    free = [letter for letter in ascii_letters if letter not in equation][: max(hidden)]
    if not arrow:
        flat = "".join(letters)
        out = _ELLIPSIS + "".join(sorted(letter for letter in flat if flat.count(letter) == 1))
    full = [
        term.replace(_ELLIPSIS, "".join(free[len(free) - count :]))
        for term, count in zip(terms, hidden, strict=True)
    ]
    return (*full, out.replace(_ELLIPSIS, "".join(free)))


def einsum(call: Call, equation: Any, *given: Any) -> Any:
    """`torch.einsum` of an equation."""
    operands = given[0] if len(given) == 1 and isinstance(given[0], (list, tuple)) else given
    if len(operands) < 2 or not any(isinstance(each, Tensor) and each.requires_grad for each in operands):
        return call.plain()
    if not isinstance(equation, str) or len(operands) > 2:
        return call.leave("einsum has a formula only for an equation of two operands")
    a, b = operands
    letters = spelled_out(equation, (a.dim(), b.dim()))
    if letters is None:
        return call.leave("einsum has no formula for a diagonal")
    static = (letters, (tuple(a.shape), a.dtype), (tuple(b.shape), b.dtype))
    return call.apply(EINSUM, static, a, b)


ROUTES: Routes = {torch.einsum: Route("einsum", "matmul", einsum)}
LAYERS: Layers = {}
