"""Largest and smallest elements: `amax`, `amin`, `max`, `min`, `maximum`, `minimum`. Nothing lossy is saved.

PyTorch saves what it compared, and compares again in backward: rounded, nothing would be equal any more.
Saved is where the extremes lie: one bit per element for `amax` and its kin (dx = g there, shared evenly by
equal ones), two for `maximum` (half of g where both are equal), and along one dimension the index in few
bytes.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mesa_tune import ops
from mesa_tune.engine.call import Call
from mesa_tune.engine.formula import (
    Formula,
    Layers,
    Needs,
    Result,
    Route,
    Routes,
    Static,
    gathered,
    like,
    narrowed,
    renewed,
)

Dims = tuple[int, ...]


def sorted_dims(x: Tensor, dim: Any) -> Dims | None:
    """Return the dimensions that `dim` names, sorted; None where it names none, or one that is not there."""
    named = tuple(range(x.dim())) if dim is None or dim == () else (dim,) if isinstance(dim, int) else dim
    if not isinstance(named, (tuple, list)) or not all(isinstance(each, int) for each in named):
        return None
    if not all(-x.dim() <= each < x.dim() for each in named):
        return None
    return tuple(sorted(each % x.dim() for each in named))


def restored(reduced: Tensor, dims: Dims, keepdim: bool) -> Tensor:
    """Return what a reduction along `dims` gave, with these dimensions back, of one element each."""
    if not keepdim:
        for dim in dims:
            reduced = reduced.unsqueeze(dim)
    return reduced


def reduced_forward(static: Static, needs: Needs, x: Tensor) -> Result:
    function, dims, keepdim, _ = static
    y = _REDUCTIONS[function](x, dims, keepdim)
    return Result(y, exact=(ops.pack_bits(x == restored(y, dims, keepdim)),))


def reduced_backward(
    static: Static, needs: Needs, lossy: list[Tensor], exact: tuple[Tensor, ...], grad: Tensor
) -> tuple[Tensor | None]:
    _, dims, keepdim, shape = static
    there = ops.unpack_bits(exact[0], shape).to(grad.dtype)
    shared = restored(grad, dims, keepdim) / there.sum(dims, keepdim=True)
    return (there.mul_(shared),)


_REDUCTIONS: dict[str, Callable[[Tensor, Dims, bool], Tensor]] = {
    "amax": torch.amax,
    "amin": torch.amin,
    "max": lambda x, dims, keepdim: torch.max(x),
    "min": lambda x, dims, keepdim: torch.min(x),
}
REDUCED = Formula(
    "reduced_extreme",
    reduced_forward,
    reduced_backward,
    "nothing lossy; exact: where the extremes lie, one bit per element",
    lossless=True,
)


def along_forward(static: Static, needs: Needs, x: Tensor, values: Tensor, indices: Tensor) -> Result:
    shape, dim, _ = static
    return Result(renewed(values), exact=(narrowed(indices, shape[dim]),))


def along_backward(
    static: Static, needs: Needs, lossy: list[Tensor], exact: tuple[Tensor, ...], grad: Tensor
) -> tuple[Tensor | None, ...]:
    shape, dim, keepdim = static
    indices = exact[0].long()
    dx = grad.new_zeros(shape)
    dx.scatter_(dim, *(restored(each, (dim,), keepdim) for each in (indices, grad)))
    return dx, None, None


ALONG = Formula(
    "extreme_along",
    along_forward,
    along_backward,
    "nothing lossy; exact: the indices of the extremes, in 1 to 4 bytes each",
    lossless=True,
)


def pair_forward(static: Static, needs: Needs, a: Tensor, b: Tensor) -> Result:
    y = getattr(torch, static[0])(a, b)
    return Result(y, exact=(ops.pack_bits(a < b), ops.pack_bits(a > b)))


def pair_backward(
    static: Static, needs: Needs, lossy: list[Tensor], exact: tuple[Tensor, ...], grad: Tensor
) -> tuple[Tensor | None, ...]:
    function, a, b = static
    less, greater = (ops.unpack_bits(each, grad.shape) for each in exact)
    if function == "minimum":
        less, greater = greater, less
    half = torch.where(less | greater, grad, grad / 2)
    da = gathered(half.masked_fill(less, 0), a) if needs[0] else None
    db = gathered(half.masked_fill(greater, 0), b) if needs[1] else None
    return da, db


PAIR = Formula(
    "extreme_pair",
    pair_forward,
    pair_backward,
    "nothing lossy; exact: which one is larger, two bits per element",
    lossless=True,
)


def reduced(function: str, call: Call, input: Tensor, dim: Any = (), keepdim: bool = False) -> Any:
    """`torch.amax`, `torch.amin`, and `torch.max` and `torch.min` of a whole tensor."""
    dims = sorted_dims(input, dim)
    if dims is None or not input.requires_grad or call.is_static(input) or call.small(input):
        return call.plain()
    return call.apply(REDUCED, (function, dims, keepdim, tuple(input.shape)), input)


def along(function: str, call: Call, input: Tensor, dim: int, keepdim: bool) -> Any:
    """`torch.max` and `torch.min` along a dimension: values and indices."""
    dims = sorted_dims(input, dim)
    if not dims or not input.requires_grad:
        return call.plain()
    with torch.no_grad():
        values, indices = getattr(torch, function)(input, dim, keepdim)
    if indices.numel() <= call.spec.min_elements:
        return call.plain()
    static = (tuple(input.shape), dims[0], keepdim)
    values = call.apply(ALONG, static, input, values, indices)
    return getattr(torch.return_types, function)((values, indices))


def pair(function: str, call: Call, input: Tensor, other: Tensor) -> Any:
    """`torch.maximum` and `torch.minimum`."""
    wanted = input.requires_grad or other.requires_grad
    if not wanted or all(call.is_static(each) for each in (input, other)) or call.small(input, other):
        return call.plain()
    return call.apply(PAIR, (function, like(input), like(other)), input, other)


def extreme(
    function: str, call: Call, input: Tensor, dim: Any = None, keepdim: bool = False, **unknown: Any
) -> Any:
    """`torch.max` and `torch.min` of a tensor, along a dimension, or of two tensors."""
    dim, other = unknown.pop("axis", dim), unknown.pop("other", None)
    if unknown:
        return call.plain()
    if isinstance(dim, Tensor) or other is not None:
        return pair(f"{function}imum", call, input, dim if other is None else other)
    if dim is None:
        return reduced(function, call, input)
    return along(function, call, input, dim, keepdim)


def _routes(function: str) -> Routes:
    """Return the routes of `max` or `min`."""
    whole, two = Route(f"a{function}", "pointwise", partial(reduced, f"a{function}")), f"{function}imum"
    other = Route(two, "pointwise", partial(pair, two))
    either = Route(function, "pointwise", partial(extreme, function))
    return {
        **{getattr(at, f"a{function}"): whole for at in (torch, Tensor)},
        **{getattr(at, two): other for at in (torch, Tensor)},
        **{getattr(at, function): either for at in (torch, Tensor)},
    }


ROUTES: Routes = {**_routes("max"), **_routes("min")}
LAYERS: Layers = {}
