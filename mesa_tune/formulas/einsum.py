"""y = Σ a b along named dimensions (`einsum`). Saved: each operand whose partner wants a gradient.

da = Σ g b along the dimensions of y and b that a does not have, spread along those that only a has. Linear in
each copy, so unbiased. Equations of two operands; an operand's diagonal (`ii`) has no formula.
"""

from string import ascii_letters
from typing import Any

import torch
from torch import Tensor

from mesa_tune.engine.call import Call
from mesa_tune.engine.formula import Formula, Grads, Needs, Result, Route, Routes, Saved, Static
from mesa_tune.engine.tensors import like

_ELLIPSIS = "..."


def forward(static: Static, needs: Needs, a: Tensor, b: Tensor) -> Result:
    first, second, out = static[0]
    y = torch.einsum(f"{first},{second}->{out}", a, b)
    return Result(y, ((a,) if needs[1] else ()) + ((b,) if needs[0] else ()))


def backward(saved: Saved, grad: Tensor) -> Grads:
    ((first, second, out), a, b), needs, lossy, _ = saved
    da = _gradient(grad, out, lossy[-1].whole(), second, first, a) if needs[0] else None
    return da, _gradient(grad, out, lossy[0].whole(), first, second, b) if needs[1] else None


def _gradient(grad: Tensor, out: str, partner: Tensor, other: str, own: str, operand: Any) -> Tensor:
    """Return the gradient of an `operand` (shape and dtype) with letters `own`; `other` are its partner's."""
    shape, dtype = operand
    shared = "".join(letter for letter in own if letter in out + other)
    result = torch.einsum(f"{out},{other}->{shared}", grad, partner.to(grad.dtype))
    for dim, letter in enumerate(own):
        if letter not in shared:
            result = result.unsqueeze(dim)
    # A dimension of size 1 was repeated to the partner's size.
    repeated = [dim for dim, size in enumerate(shape) if size == 1 and result.shape[dim] != 1]
    return (result.sum(repeated, keepdim=True) if repeated else result).expand(shape).to(dtype)


EINSUM = Formula("einsum", forward, backward, "each operand whose partner wants a gradient", views=True)


def spelled_out(equation: str, ranks: tuple[int, ...]) -> tuple[str, ...] | None:
    """Return the letters of each operand and of the result, ellipses and an implied result spelled out.

    None for an operand that has a letter twice. `ranks`: the operands' numbers of dimensions.
    """
    operands, arrow, out = equation.replace(" ", "").partition("->")
    terms = operands.split(",")
    letters = [term.replace(_ELLIPSIS, "") for term in terms]
    if any(len(set(own)) < len(own) for own in letters):
        return None
    hidden = [rank - len(own) for rank, own in zip(ranks, letters, strict=True)]
    free = "".join([letter for letter in ascii_letters if letter not in equation][: max(hidden)])
    if not arrow:
        flat = "".join(letters)
        out = _ELLIPSIS + "".join(sorted(letter for letter in flat if flat.count(letter) == 1))
    spelled = [
        term.replace(_ELLIPSIS, free[len(free) - count :]) for term, count in zip(terms, hidden, strict=True)
    ]
    return (*spelled, out.replace(_ELLIPSIS, free))


def einsum(call: Call, equation: Any, *operands: Any) -> Any:
    """Route of `torch.einsum` of an equation."""
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    wanted = any(isinstance(operand, Tensor) and operand.requires_grad for operand in operands)
    if len(operands) < 2 or not wanted:
        return call.plain()
    if not isinstance(equation, str) or len(operands) > 2:
        return call.leave("einsum has a formula only for an equation of two operands")
    a, b = operands
    letters = spelled_out(equation, (a.dim(), b.dim()))
    if letters is None:
        return call.leave("einsum has no formula for a diagonal")
    return call.apply(EINSUM, (letters, like(a), like(b)), a, b)


ROUTES: Routes = {torch.einsum: Route("einsum", "matmul", einsum)}
