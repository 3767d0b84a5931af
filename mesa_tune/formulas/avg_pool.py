"""Average pools and paddings: linear, so backward wants the input's shape and nothing else. Kept: nothing.

PyTorch keeps the input of an average pool, and of a padding by reflection or replication, for its shape.
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
    Layers,
    Needs,
    Result,
    Route,
    Routes,
    Static,
    layout_of,
    unviewed,
)
from mesa_tune.formulas.max_pool import as_images, each_of

_aten: Any = torch.ops.aten
_POOLS: dict[int, Any] = {2: _aten.avg_pool2d, 3: _aten.avg_pool3d}
_POOL_BACKWARDS: dict[int, Any] = {2: _aten.avg_pool2d_backward, 3: _aten.avg_pool3d_backward}
_ADAPTIVE: dict[int, Any] = {2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}
_ADAPTIVE_BACKWARDS: dict[int, Any] = {
    2: _aten._adaptive_avg_pool2d_backward,
    3: _aten._adaptive_avg_pool3d_backward,
}
_PAD_BACKWARDS: dict[tuple[str, int], Any] = {
    (mode, places): getattr(_aten, f"{name}_pad{places}d_backward")
    for mode, name in (("reflect", "reflection"), ("replicate", "replication"))
    for places in (1, 2, 3)
}


def forward(static: Static, needs: Needs, x: Tensor) -> Result:
    kind, places, arguments, shape, _ = static
    if kind == "pad":
        mode, sizes = arguments
        return Result(F.pad(x, sizes, mode))
    run = (_POOLS if kind == "pool" else _ADAPTIVE)[max(places, 2)]
    y = run(x.view(as_images(shape, places)) if _is_other(shape, places) else x, *arguments)
    return Result(unviewed(y.view(*shape[:-places], *y.shape[-places:])) if _is_other(shape, places) else y)


def backward(
    static: Static, needs: Needs, lossy: list[Tensor], exact: Any, grad: Tensor
) -> tuple[Tensor | None]:
    kind, places, arguments, shape, layout = static
    if kind == "pad":
        mode, sizes = arguments
        return (_PAD_BACKWARDS[mode, places](grad, grad.new_empty(shape), sizes),)
    like = grad.new_empty(as_images(shape, places)).contiguous(memory_format=layout)
    grad = grad.reshape(as_images(grad.shape, places)).contiguous(memory_format=layout)
    if kind == "pool":
        return (_POOL_BACKWARDS[max(places, 2)](grad, like, *arguments).view(shape),)
    return (_ADAPTIVE_BACKWARDS[max(places, 2)](grad, like).view(shape),)


def _is_other(shape: tuple[int, ...], places: int) -> bool:
    return as_images(shape, places) != shape


LINEAR = Formula("shape_only", forward, backward, "nothing; PyTorch keeps the input", lossless=True)


def _apply(call: Call, kind: str, places: int, arguments: tuple[Any, ...], x: Tensor) -> Any:
    return call.apply(LINEAR, (kind, places, arguments, tuple(x.shape), layout_of(x)), x)


def _worth(call: Call, x: Tensor) -> bool:
    return x.requires_grad and x.numel() > call.spec.min_elements and not call.is_static(x)


def avg_pool(
    places: int,
    call: Call,
    input: Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    """`F.avg_pool1d`, `2d`, `3d`, with or without a batch dimension."""
    if input.dim() not in (places + 1, places + 2) or not _worth(call, input):
        return call.plain()
    kernel = each_of(kernel_size, places)
    step = kernel if stride is None or stride in ([], ()) else each_of(stride, places)
    edge = each_of(padding, places)
    if places == 1:  # rows are images of one row
        kernel, step, edge = (1, *kernel), (1, *step), (0, *edge)
    arguments = (kernel, step, edge, ceil_mode, count_include_pad, divisor_override)
    return _apply(call, "pool", places, arguments, input)


def adaptive_avg_pool(places: int, call: Call, input: Tensor, output_size: Any) -> Any:
    """`F.adaptive_avg_pool1d`, `2d`, `3d`, with or without a batch dimension."""
    if input.dim() not in (places + 1, places + 2) or not _worth(call, input):
        return call.plain()
    given = (output_size,) * places if isinstance(output_size, int) else tuple(output_size)
    wanted = zip(given * places if len(given) == 1 else given, input.shape[-places:], strict=True)
    sizes = tuple(own if size is None else size for size, own in wanted)
    if all(size == 1 for size in sizes):  # PyTorch takes a mean, which keeps nothing
        return call.plain()
    sizes = (1, *sizes) if places == 1 else sizes
    return _apply(call, "adaptive", places, (sizes,), input)


def pad(
    call: Call, input: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> Any:
    """`F.pad` by reflection or replication; PyTorch keeps nothing for the other modes."""
    places = len(pad) // 2
    if (mode, places) not in _PAD_BACKWARDS or input.dim() != places + 2 or not _worth(call, input):
        return call.plain()
    return _apply(call, "pad", places, (mode, tuple(pad)), input)


ROUTES: Routes = {
    **{
        getattr(F, f"avg_pool{places}d"): Route(f"avg_pool{places}d", "avgpool", partial(avg_pool, places))
        for places in (1, 2, 3)
    },
    **{
        getattr(F, f"adaptive_avg_pool{places}d"): Route(
            f"adaptive_avg_pool{places}d", "avgpool", partial(adaptive_avg_pool, places)
        )
        for places in (1, 2, 3)
    },
    F.pad: Route("pad", "pad", pad),
}
LAYERS: Layers = {
    nn.AvgPool1d: F.avg_pool1d,
    nn.AvgPool2d: F.avg_pool2d,
    nn.AvgPool3d: F.avg_pool3d,
    nn.AdaptiveAvgPool1d: F.adaptive_avg_pool1d,
    nn.AdaptiveAvgPool2d: F.adaptive_avg_pool2d,
    nn.AdaptiveAvgPool3d: F.adaptive_avg_pool3d,
    nn.modules.padding._ReflectionPadNd: F.pad,
    nn.modules.padding._ReplicationPadNd: F.pad,
}
