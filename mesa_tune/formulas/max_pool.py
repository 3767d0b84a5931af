"""Max pools, y = max over each window. Saved: the maxima's positions in their windows, exact; dx is g there.

A window of n positions takes ceil(log2 n) bits per output (3 × 3: 4 bits), where PyTorch saves an int64 and
the input itself, whose shape is all that backward wants of it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mesa_tune.engine.call import Call
from mesa_tune.engine.formula import Formula, Grads, Layers, Needs, Result, Routes, Saved, Static
from mesa_tune.engine.tensors import layout_of
from mesa_tune.formulas.convolution import Size, layers, per_dimension, routes
from mesa_tune.ops.codecs import RAW
from mesa_tune.ops.reference.windows import Windows, flattened

_BACKWARDS: dict[tuple[str, int], Callable[..., Tensor]] = {
    (kind, dims): getattr(torch.ops.aten, f"{kind}{dims}d{suffix}_backward")
    for kind, suffix in (("max_pool", "_with_indices"), ("adaptive_max_pool", ""))
    for dims in (2, 3)
}


def forward(static: Static, needs: Needs, x: Tensor, y: Any = None, indices: Any = None) -> Result:
    """Return the pooled input, or `y`, if it was pooled before, with its `indices`."""
    # An input that is returned as it is would be a view.
    y, indices = _pooled(static, x) if y is None else (y.detach(), indices)
    return Result(y, exact=(RAW.pack_windows(indices, _windows(static, y.shape)),))


def _pooled(static: Static, x: Tensor) -> Any:
    kind, dims, arguments, *_ = static
    return getattr(F, f"{kind}{dims}d")(x, *arguments, return_indices=True)


def _windows(static: Static, output_shape: Sequence[int]) -> list[int]:
    """Return the windows as the ops take them."""
    kind, dims, arguments, shape, _ = static
    sizes = list(zip(shape[-dims:], output_shape[-dims:], strict=True))
    if kind == "max_pool":
        kernel, stride, padding, dilation, _ = arguments
        others = list(zip(kernel, dilation, stride, padding, strict=True))
    else:  # window i is from ⌊i in / out⌋ to ⌈(i + 1) in / out⌉
        longest = [
            max(-(-(i + 1) * size // out) - i * size // out for i in range(out)) for size, out in sizes
        ]
        others = [(length, 1, 0, 0) for length in longest]
    return flattened([Windows(*size, *other) for size, other in zip(sizes, others, strict=True)])


def backward(saved: Saved, grad: Tensor) -> Grads:
    kind, dims, arguments, shape, layout = saved.static
    indices = RAW.unpack_windows(saved.exact[0], _windows(saved.static, grad.shape), grad.shape)
    x = grad.new_empty(as_images(shape, dims)).contiguous(memory_format=layout)
    outer = as_images(grad.shape, dims)
    grad, indices = (t.reshape(outer).contiguous(memory_format=layout) for t in (grad, indices))
    numbers = arguments if kind == "max_pool" else ()
    if numbers and dims == 1:  # rows are images of one row
        kernel, stride, padding, dilation, ceil_mode = arguments
        numbers = ((1, *kernel), (1, *stride), (0, *padding), (1, *dilation), ceil_mode)
    dx = _BACKWARDS[kind, max(dims, 2)](grad, x, *numbers, indices)
    return dx.view(shape), *[None] * (len(saved.needs) - 1)


def as_images(shape: Sequence[int], dims: int) -> tuple[int, ...]:
    """Return the shape as that of a batch of images or volumes; rows are images of one row."""
    lead = shape[:-dims] if len(shape) == dims + 2 else (1, *shape[:-dims])
    return (*lead, *([1] if dims == 1 else []), *shape[-dims:])


MAX_POOL = Formula(
    "max_pool",
    forward,
    backward,
    "nothing lossy; exact: offsets of the maxima in their windows, ceil(log2 of a window's size) bits each",
    lossless=True,
    views=True,
)


def max_pool(
    returns_indices: bool,
    dims: int,
    call: Call,
    input: Tensor,
    kernel_size: Size,
    stride: Size | None = None,
    padding: Size = 0,
    dilation: Size = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """Route of `F.max_pool1d`, `2d`, `3d`, with or without indices and a batch dimension."""
    stride = kernel_size if stride is None or stride in ([], ()) else stride
    sizes = [per_dimension(size, dims) for size in (kernel_size, stride, padding, dilation)]
    return _apply(call, input, "max_pool", dims, (*sizes, ceil_mode), returns_indices or return_indices)


def adaptive_max_pool(
    returns_indices: bool,
    dims: int,
    call: Call,
    input: Tensor,
    output_size: Any,
    return_indices: bool = False,
) -> Any:
    """Route of `F.adaptive_max_pool1d`, `2d`, `3d`, with or without indices and a batch dimension."""
    size = output_size if isinstance(output_size, int) else tuple(output_size)
    return _apply(call, input, "adaptive_max_pool", dims, (size,), returns_indices or return_indices)


def _apply(
    call: Call, x: Tensor, kind: str, dims: int, arguments: tuple[Any, ...], returns_indices: bool
) -> Any:
    """Return `x` pooled. For a large `x`, positions in windows are saved in few bits; else the call is plain.

    A plain call raises for an `x` of other than `dims` + 1 or + 2 dimensions.
    """
    fits = x.dim() in (dims + 1, dims + 2) and x.numel() > call.spec.min_elements
    if not (fits and x.requires_grad):
        return call.plain()
    static = (kind, dims, arguments, tuple(x.shape), layout_of(x))
    # Within a Function, sizes that an adaptive pool computes cannot be traced where shapes are dynamic.
    if not (returns_indices or torch.compiler.is_compiling()):
        return call.apply(MAX_POOL, static, x)
    with torch.no_grad():
        y, indices = _pooled(static, x)
    y = call.apply(MAX_POOL, static, x, y, indices)
    return (y, indices) if returns_indices else y


def _routes(name: str, pool: Callable[..., Any]) -> Routes:
    """Return the routes of one pool: with indices, and without."""
    plain = routes(name, "maxpool", partial(pool, False))
    in_torch = {getattr(torch, route.name): route for route in plain.values() if hasattr(torch, route.name)}
    with_indices = routes(name, "maxpool", partial(pool, True), "_with_indices")
    return {**plain, **in_torch, **with_indices}


ROUTES: Routes = {**_routes("max_pool", max_pool), **_routes("adaptive_max_pool", adaptive_max_pool)}
LAYERS: Layers = {**layers("MaxPool", "max_pool"), **layers("AdaptiveMaxPool", "adaptive_max_pool")}
