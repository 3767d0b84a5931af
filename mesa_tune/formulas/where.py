"""Choosing between values by a mask: y = a where the mask is set, b elsewhere.

Saved: the mask, one exact bit per element, before it is repeated along other dimensions: da = g where it is
set, db = g elsewhere. PyTorch saves one byte per element.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from mesa_tune import ops
from mesa_tune.engine.call import Call
from mesa_tune.engine.formula import Formula, Grads, Needs, Result, Route, Routes, Saved, Static
from mesa_tune.engine.storage import pack_once
from mesa_tune.engine.tensors import gathered, like


def _dense(mask: Tensor) -> Tensor:
    """Return `mask` without its repetitions."""
    return mask[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in mask.stride())]


def where_forward(static: Static, needs: Needs, mask: Tensor, a: Tensor | None, b: Tensor | None) -> Result:
    _, _, _, number_a, number_b = static
    y = torch.where(mask, number_a if a is None else a, number_b if b is None else b)
    return Result(y, exact=(pack_once(_dense(mask)),))


def where_backward(saved: Saved, grad: Tensor) -> Grads:
    (shape, a, b, *_), needs, _, (bits,) = saved
    mask = ops.unpack_bits(bits, shape)
    da = gathered(grad.masked_fill(~mask, 0), a) if needs[1] else None
    return None, da, gathered(grad.masked_fill(mask, 0), b) if needs[2] else None


WHERE = Formula(
    "where",
    where_forward,
    where_backward,
    "nothing lossy; exact: the mask, one bit per element",
    lossless=True,
)


def fill_forward(static: Static, needs: Needs, x: Tensor, mask: Tensor, value: Tensor | None) -> Result:
    in_place, number, *_ = static
    bits = pack_once(_dense(mask))
    filler: Any = number if value is None else value
    y = x.masked_fill_(mask, filler) if in_place else x.masked_fill(mask, filler)
    return Result(y, exact=(bits,), in_place=in_place)


def fill_backward(saved: Saved, grad: Tensor) -> Grads:
    _, _, shape, x = saved.static
    mask = ops.unpack_bits(saved.exact[0], shape)
    return gathered(grad.masked_fill(mask, 0), x), None, None


FILL = Formula("masked_fill", fill_forward, fill_backward, WHERE.saves, lossless=True)


def _gains(call: Call, mask: Tensor) -> bool:
    """Return whether bits are less than what PyTorch saves: one byte per element, or a reference."""
    large = mask.dtype == torch.bool and _dense(mask).numel() > max(call.spec.min_elements, 8)
    return large and not call.is_static(mask)


def where(call: Call, condition: Any, input: Any = None, other: Any = None) -> Any:
    """Route of `torch.where` of tensors or numbers."""
    a, b = (value if isinstance(value, Tensor) else None for value in (input, other))
    likes = [None if tensor is None else like(tensor) for tensor in (a, b)]
    wanted = any(tensor is not None and tensor.requires_grad for tensor in (a, b))
    if not wanted or not _gains(call, condition):
        return call.plain()
    numbers = (input if a is None else None, other if b is None else None)
    return call.apply(WHERE, (tuple(_dense(condition).shape), *likes, *numbers), condition, a, b)


def where_method(call: Call, self: Tensor, condition: Tensor, other: Any = None) -> Any:
    """Route of `Tensor.where`."""
    return where(call, condition, self, other)


def masked_fill(in_place: bool, call: Call, input: Tensor, mask: Tensor, value: Any) -> Any:
    """Route of `torch.masked_fill`."""
    if not input.requires_grad or not _gains(call, mask):
        return call.plain()
    filled, number = (value, None) if isinstance(value, Tensor) else (None, value)
    if filled is not None and filled.requires_grad:
        return call.refuse("masked_fill has no formula for a value that wants a gradient")
    if in_place and not call.may_change(input):
        return call.plain()
    static = (in_place, number, tuple(_dense(mask).shape), like(input))
    return call.apply(FILL, static, input, mask, filled)


ROUTES: Routes = {
    torch.where: Route("where", "pointwise", where),
    Tensor.where: Route("where", "pointwise", where_method),
    **Route("masked_fill", "pointwise", partial(masked_fill, False)).spelled("masked_fill"),
    Tensor.masked_fill_: Route("masked_fill", "pointwise", partial(masked_fill, True)),
}
