"""Choosing between values by a mask: y = a where the mask is set, b elsewhere.

Kept is the mask, one exact bit an element, before it is repeated along other dimensions: da = g where it is
set, db = g elsewhere. PyTorch keeps a byte an element.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from mesa_tune import ops
from mesa_tune.engine.call import Call
from mesa_tune.engine.formula import Formula, Layers, Needs, Result, Route, Routes, Static
from mesa_tune.engine.storage import pack_once


def _dense(mask: Tensor) -> Tensor:
    """`mask` without its repetitions."""
    return mask[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in mask.stride())]


def _unpacked(bits: Tensor, shape: tuple[int, ...]) -> Tensor:
    return ops.unpack_bits(bits, shape)


def where_forward(static: Static, needs: Needs, mask: Tensor, a: Tensor | None, b: Tensor | None) -> Result:
    _, _, number_a, number_b = static
    y = torch.where(mask, number_a if a is None else a, number_b if b is None else b)
    return Result(y, exact=(pack_once(_dense(mask)),))


def where_backward(
    static: Static, needs: Needs, lossy: list[Tensor], exact: tuple[Tensor, ...], grad: Tensor
) -> tuple[Tensor | None, ...]:
    mask_shape, shapes, _, _ = static
    mask = _unpacked(exact[0], mask_shape)
    da = _part(grad, ~mask, shapes[0]) if needs[1] else None
    db = _part(grad, mask, shapes[1]) if needs[2] else None
    return None, da, db


def _part(grad: Tensor, without: Tensor, like: tuple[tuple[int, ...], torch.dtype]) -> Tensor:
    shape, dtype = like
    left = grad.masked_fill(without, 0)
    return (left if left.shape == shape else left.sum_to_size(shape)).to(dtype)


WHERE = Formula(
    "where",
    where_forward,
    where_backward,
    "nothing lossy; exact: the mask, one bit an element",
    lossless=True,
)


def fill_forward(static: Static, needs: Needs, x: Tensor, mask: Tensor, value: Tensor | None) -> Result:
    in_place, number = static[:2]
    kept = pack_once(_dense(mask))
    given = number if value is None else value
    y = x.masked_fill_(mask, given) if in_place else x.masked_fill(mask, given)
    return Result(y, exact=(kept,), in_place=in_place)


def fill_backward(
    static: Static, needs: Needs, lossy: list[Tensor], exact: tuple[Tensor, ...], grad: Tensor
) -> tuple[Tensor | None, ...]:
    _, _, mask_shape, like = static
    return _part(grad, _unpacked(exact[0], mask_shape), like), None, None


FILL = Formula("masked_fill", fill_forward, fill_backward, WHERE.keeps, lossless=True)


def _worth(call: Call, mask: Tensor) -> bool:
    """Whether bits are less than what PyTorch keeps of `mask`: a byte an element, or a reference."""
    return (
        mask.dtype == torch.bool
        and _dense(mask).numel() > max(call.spec.min_elements, 8)
        and not call.is_static(mask)
    )


def where(call: Call, condition: Any, input: Any = None, other: Any = None, **unknown: Any) -> Any:
    """`torch.where` of tensors or numbers."""
    tensors = [each for each in (input, other) if isinstance(each, Tensor)]
    if not any(each.requires_grad for each in tensors) or not _worth(call, condition):
        return call.plain()
    if unknown:
        return call.refuse(f"where has no formula for {sorted(unknown)}")
    a, b = (each if isinstance(each, Tensor) else None for each in (input, other))
    likes = tuple(None if each is None else (tuple(each.shape), each.dtype) for each in (a, b))
    numbers = (None if a is not None else input, None if b is not None else other)
    static = (tuple(_dense(condition).shape), likes, *numbers)
    return call.apply(WHERE, static, condition, a, b)


def where_method(call: Call, self: Tensor, condition: Tensor, other: Any = None) -> Any:
    """`Tensor.where`."""
    return where(call, condition, self, other)


def masked_fill(
    call: Call, input: Tensor, mask: Tensor, value: Any, *, in_place: bool = False, **unknown: Any
) -> Any:
    """`torch.masked_fill`."""
    if not input.requires_grad or not _worth(call, mask):
        return call.plain()
    if unknown or (isinstance(value, Tensor) and value.requires_grad):
        return call.refuse("masked_fill has no formula for a value that wants a gradient")
    if in_place and not call.changes(input):
        return call.plain()
    filled, number = (value, None) if isinstance(value, Tensor) else (None, value)
    static = (in_place, number, tuple(_dense(mask).shape), (tuple(input.shape), input.dtype))
    return call.apply(FILL, static, input, mask, filled)


_FILL = Route("masked_fill", "pointwise", masked_fill)
ROUTES: Routes = {
    torch.where: Route("where", "pointwise", where),
    Tensor.where: Route("where", "pointwise", where_method),
    torch.masked_fill: _FILL,
    Tensor.masked_fill: _FILL,
    Tensor.masked_fill_: Route("masked_fill", "pointwise", partial(masked_fill, in_place=True)),
}
LAYERS: Layers = {}
