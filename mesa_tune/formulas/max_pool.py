"""Max pools, y = max over each window. Kept: where in its window each maximum lies, exact; dx puts g there.

A window of n positions takes ceil(log2 n) bits an output (3 × 3: 4 bits), where PyTorch keeps an int64 and
the input itself, whose shape is all that backward wants of it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mesa_tune.engine.call import Call
from mesa_tune.engine.formula import Formula, Layers, Needs, Result, Route, Routes, Static, layout_of, renewed
from mesa_tune.ops.codecs import RAW
from mesa_tune.ops.reference.windows import Windows, flattened

Size = int | Sequence[int]
Dims = tuple[int, ...]


def forward(static: Static, needs: Needs, x: Tensor, y: Tensor, indices: Tensor) -> Result:
    return Result(renewed(y), exact=(RAW.pack_windows(indices, flattened(static[0])),))


def backward(
    static: Static, needs: Needs, lossy: list[Tensor], exact: tuple[Tensor, ...], grad: Tensor
) -> tuple[Tensor | None, ...]:
    windows, shape, layout, arguments = static
    places = len(windows)
    indices = RAW.unpack_windows(exact[0], flattened(windows), grad.shape)
    like = grad.new_empty(as_images(shape, places)).contiguous(memory_format=layout)
    outer = as_images(grad.shape, places)
    grad, indices = (each.reshape(outer).contiguous(memory_format=layout) for each in (grad, indices))
    dx = _BACKWARDS[like.dim() - 2, arguments is None](grad, like, arguments or (), indices)
    return dx.view(shape), None, None


def _plain_backward(function: Any, grad: Tensor, like: Tensor, arguments: Any, indices: Tensor) -> Tensor:
    dx: Tensor = function(grad, like, *arguments, indices)
    return dx


_aten: Any = torch.ops.aten
_BACKWARDS: dict[tuple[int, bool], Callable[..., Tensor]] = {
    (2, False): partial(_plain_backward, _aten.max_pool2d_with_indices_backward),
    (3, False): partial(_plain_backward, _aten.max_pool3d_with_indices_backward),
    (2, True): partial(_plain_backward, _aten.adaptive_max_pool2d_backward),
    (3, True): partial(_plain_backward, _aten.adaptive_max_pool3d_backward),
}

MAX_POOL = Formula(
    "max_pool",
    forward,
    backward,
    "nothing lossy; exact: offsets of the maxima in their windows, ceil(log2 of a window's size) bits each",
    lossless=True,
)


def as_images(shape: Sequence[int], places: int) -> tuple[int, ...]:
    """The shape as that of a batch of images or volumes; rows are images of one row."""
    lead = shape[:-places] if len(shape) == places + 2 else (1, *shape[:-places])
    return (*lead, *([1] if places == 1 else []), *shape[-places:])


def each_of(value: Size, places: int) -> Dims:
    """One number a dimension."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * places if len(values) == 1 else values


def max_pool(
    places: int,
    wanted: bool,
    call: Call,
    input: Tensor,
    kernel_size: Size,
    stride: Size | None = None,
    padding: Size = 0,
    dilation: Size = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """`F.max_pool1d`, `2d`, `3d`, with indices if `wanted`, with or without a batch dimension."""
    kernel = each_of(kernel_size, places)
    step = kernel if stride is None or stride == [] else each_of(stride, places)
    edge, apart = each_of(padding, places), each_of(dilation, places)
    if not _worth(call, input, places):
        return call.plain()
    with torch.no_grad():
        y, indices = _POOLS[places](input, kernel, step, edge, apart, ceil_mode, return_indices=True)
    windows = tuple(
        Windows(*each)
        for each in zip(input.shape[-places:], y.shape[-places:], kernel, apart, step, edge, strict=True)
    )
    lead: Any = (lambda own, one: (one, *own)) if places == 1 else (lambda own, one: own)
    arguments = (lead(kernel, 1), lead(step, 1), lead(edge, 0), lead(apart, 1), ceil_mode)
    static = (windows, tuple(input.shape), layout_of(input), arguments)
    y = call.apply(MAX_POOL, static, input, y, indices)
    return (y, indices) if wanted or return_indices else y


def adaptive_max_pool(
    places: int, wanted: bool, call: Call, input: Tensor, output_size: Any, return_indices: bool = False
) -> Any:
    """`F.adaptive_max_pool1d`, `2d`, `3d`, with indices if `wanted`."""
    if not _worth(call, input, places):
        return call.plain()
    with torch.no_grad():
        y, indices = _ADAPTIVE[places](input, output_size, return_indices=True)
    sizes = zip(input.shape[-places:], y.shape[-places:], strict=True)
    windows = tuple(Windows(size, count, _longest(size, count), 1, 0, 0) for size, count in sizes)
    y = call.apply(MAX_POOL, (windows, tuple(input.shape), layout_of(input), None), input, y, indices)
    return (y, indices) if wanted or return_indices else y


def _longest(size: int, count: int) -> int:
    """The longest window of an adaptive pool: from ⌊i in / out⌋ to ⌈(i + 1) in / out⌉."""
    return max(-(-(each + 1) * size // count) - each * size // count for each in range(count))


def _worth(call: Call, x: Tensor, places: int) -> bool:
    """Whether bits are less than what PyTorch keeps; it raises for other dimensions by itself."""
    regular = x.dim() in (places + 1, places + 2) and x.numel() > call.spec.min_elements
    return regular and x.requires_grad and x.numel() > 0


_POOLS: dict[int, Callable[..., Any]] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_ADAPTIVE: dict[int, Callable[..., Any]] = {
    1: F.adaptive_max_pool1d,
    2: F.adaptive_max_pool2d,
    3: F.adaptive_max_pool3d,
}


def _routes(name: str, pool: Callable[..., Any], places: int) -> Routes:
    """All spellings of one pool: with indices, and without."""
    plain = Route(name, "maxpool", partial(pool, places, False))
    with_indices = Route(name, "maxpool", partial(pool, places, True))
    found: Routes = {getattr(F, name): plain, getattr(F, f"{name}_with_indices"): with_indices}
    if hasattr(torch, name):
        found[getattr(torch, name)] = plain
    return found


ROUTES: Routes = {
    function: route
    for places in (1, 2, 3)
    for name, pool in ((f"max_pool{places}d", max_pool), (f"adaptive_max_pool{places}d", adaptive_max_pool))
    for function, route in _routes(name, pool, places).items()
}
LAYERS: Layers = {
    nn.MaxPool1d: F.max_pool1d,
    nn.MaxPool2d: F.max_pool2d,
    nn.MaxPool3d: F.max_pool3d,
    nn.AdaptiveMaxPool1d: F.adaptive_max_pool1d,
    nn.AdaptiveMaxPool2d: F.adaptive_max_pool2d,
    nn.AdaptiveMaxPool3d: F.adaptive_max_pool3d,
}
