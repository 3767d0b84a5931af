"""Largest and smallest elements: `amax`, `amin`, `max`, `min`, `maximum`, `minimum`. Nothing lossy is saved.

PyTorch saves what it compared, and compares again in backward: rounded, nothing would be equal any more.
Saved: the positions of the extremes: one bit per element for `amax` and its kin (dx = g there, shared evenly
by equal ones), two for `maximum` (half of g where both are equal), and along one dimension the index in few
bytes.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from mesa_tune import ops
from mesa_tune.engine.call import Call
from mesa_tune.engine.formula import Formula, Grads, Needs, Result, Route, Routes, Saved, Static
from mesa_tune.engine.tensors import gathered, like, narrowed

Dims = tuple[int, ...]


def sorted_dims(x: Tensor, dim: Any) -> Dims | None:
    """Return the dimensions that `dim` names, sorted; None where it names none, or one that x lacks."""
    named = tuple(range(x.dim())) if dim is None or dim == () else (dim,) if isinstance(dim, int) else dim
    if not isinstance(named, (tuple, list)) or not all(isinstance(index, int) for index in named):
        return None
    if not all(-x.dim() <= index < x.dim() for index in named):
        return None
    return tuple(sorted(index % x.dim() for index in named))


def restored(reduced: Tensor, dims: Dims, keepdim: bool) -> Tensor:
    """Return the result of a reduction along `dims` with these dimensions back, of one element each."""
    if not keepdim:
        for dim in dims:
            reduced = reduced.unsqueeze(dim)
    return reduced


def reduced_forward(static: Static, needs: Needs, x: Tensor) -> Result:
    function, dims, keepdim, _ = static
    reduce = getattr(torch, function)
    y = reduce(x, dims, keepdim) if function in ("amax", "amin") else reduce(x)
    return Result(y, exact=(ops.pack_bits(x == restored(y, dims, keepdim)),))


def reduced_backward(saved: Saved, grad: Tensor) -> Grads:
    (_, dims, keepdim, shape), (bits,) = saved.static, saved.exact
    extreme = ops.unpack_bits(bits, shape).to(grad.dtype)
    shared = restored(grad, dims, keepdim) / extreme.sum(dims, keepdim=True)
    return (extreme.mul_(shared),)


REDUCED = Formula(
    "reduced_extreme",
    reduced_forward,
    reduced_backward,
    "nothing lossy; exact: where the extremes lie, one bit per element",
    lossless=True,
)


def along_forward(static: Static, needs: Needs, x: Tensor, values: Tensor, indices: Tensor) -> Result:
    shape, dim, _ = static
    return Result(values.detach(), exact=(narrowed(indices, shape[dim]),))  # an input itself would be a view


def along_backward(saved: Saved, grad: Tensor) -> Grads:
    (shape, dim, keepdim), (narrow,) = saved.static, saved.exact
    indices, grad = (restored(tensor, (dim,), keepdim) for tensor in (narrow.long(), grad))
    return grad.new_zeros(shape).scatter_(dim, indices, grad), None, None


ALONG = Formula(
    "extreme_along",
    along_forward,
    along_backward,
    "nothing lossy; exact: the indices of the extremes, in 1 to 4 bytes each",
    lossless=True,
    views=True,
)


def pair_forward(static: Static, needs: Needs, a: Tensor, b: Tensor) -> Result:
    return Result(getattr(torch, static[0])(a, b), exact=(ops.pack_bits(a < b), ops.pack_bits(a > b)))


def pair_backward(saved: Saved, grad: Tensor) -> Grads:
    (function, *operands), needs, _, exact = saved
    less, greater = (ops.unpack_bits(bits, grad.shape) for bits in exact)
    half = torch.where(less | greater, grad, grad / 2)
    losing = (greater, less) if function == "minimum" else (less, greater)
    rows = zip(losing, operands, needs, strict=True)
    return tuple([gathered(half.masked_fill(lost, 0), x) if need else None for lost, x, need in rows])


PAIR = Formula(
    "extreme_pair",
    pair_forward,
    pair_backward,
    "nothing lossy; exact: which one is larger, two bits per element",
    lossless=True,
)


def reduced(function: str, call: Call, input: Tensor, dim: Any = (), keepdim: bool = False) -> Any:
    """Route of `torch.amax`, `torch.amin`, and `torch.max` and `torch.min` of a whole tensor."""
    dims = sorted_dims(input, dim)
    if dims is None or not call.gains_on(input):
        return call.plain()
    return call.apply(REDUCED, (function, dims, keepdim, tuple(input.shape)), input)


def along(function: str, call: Call, input: Tensor, dim: int, keepdim: bool) -> Any:
    """Route of `torch.max` and `torch.min` along a dimension: values and indices."""
    dims = sorted_dims(input, dim)
    if not dims or not input.requires_grad:
        return call.plain()
    if input.numel() <= call.spec.min_elements * input.shape[dims[0]]:
        return call.plain()
    with torch.no_grad():
        values, indices = getattr(torch, function)(input, dim, keepdim)
    values = call.apply(ALONG, (tuple(input.shape), dims[0], keepdim), input, values, indices)
    return getattr(torch.return_types, function)((values, indices))


def pair(function: str, call: Call, input: Tensor, other: Tensor) -> Any:
    """Route of `torch.maximum` and `torch.minimum`."""
    operands = (input, other)
    if not any(tensor.requires_grad for tensor in operands) or not call.gains(*operands):
        return call.plain()
    if all(call.is_static(tensor) for tensor in operands):
        return call.plain()
    return call.apply(PAIR, (function, like(input), like(other)), input, other)


def extreme(
    function: str,
    call: Call,
    input: Tensor,
    dim: Any = None,
    keepdim: bool = False,
    *,
    axis: Any = None,
    other: Tensor | None = None,
) -> Any:
    """Route of `torch.max` and `torch.min` of a tensor, along a dimension, or of two tensors."""
    dim = dim if axis is None else axis
    other = dim if isinstance(dim, Tensor) else other
    if other is not None:
        return pair(f"{function}imum", call, input, other)
    if dim is None:
        return reduced(function, call, input)
    index: Any = dim
    return along(function, call, input, index, keepdim)


def _routes(end: str) -> Routes:
    """Return the routes of `max` or `min`."""
    functions = ((f"a{end}", reduced), (f"{end}imum", pair), (end, extreme))
    routes: Routes = {}
    for name, serve in functions:
        routes |= Route(name, "pointwise", partial(serve, name)).spelled(name)
    return routes


ROUTES: Routes = {**_routes("max"), **_routes("min")}
