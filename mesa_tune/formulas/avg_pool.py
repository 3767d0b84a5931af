"""Average pools and paddings: linear, so backward wants the input's shape and nothing else. Saved: nothing.

PyTorch saves the input of an average pool, and of a padding by reflection or replication, for its shape.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mesa_tune.engine.call import Call
from mesa_tune.engine.formula import Formula, Grads, Layers, Needs, Result, Route, Routes, Saved, Static
from mesa_tune.engine.tensors import layout_of
from mesa_tune.formulas.convolution import Size, layers, per_dimension, routes
from mesa_tune.formulas.max_pool import as_images

_PADS = {"reflect": "reflection_pad", "replicate": "replication_pad"}
_BACKWARDS: dict[tuple[str, int], Callable[..., Tensor]] = {
    (kind, dims): getattr(torch.ops.aten, f"{name}{dims}d_backward")
    for kind, name in {"avg_pool": "avg_pool", "adaptive_avg_pool": "_adaptive_avg_pool", **_PADS}.items()
    for dims in range(1 if kind in _PADS else 2, 4)
}


def forward(static: Static, needs: Needs, x: Tensor) -> Result:
    kind, dims, arguments, shape, _ = static
    if kind in _PADS:
        return Result(F.pad(x, arguments[0], kind))
    y = getattr(F, f"{kind}{max(dims, 2)}d")(x.view(as_images(shape, dims)), *arguments)
    return Result(y.view(*shape[:-dims], *y.shape[-dims:]))


def backward(saved: Saved, grad: Tensor) -> Grads:
    kind, dims, arguments, shape, layout = saved.static
    if kind in _PADS:
        return (_BACKWARDS[kind, dims](grad, grad.new_empty(shape), *arguments),)
    x = grad.new_empty(as_images(shape, dims)).contiguous(memory_format=layout)
    grad = grad.reshape(as_images(grad.shape, dims)).contiguous(memory_format=layout)
    numbers = arguments if kind == "avg_pool" else ()
    return (_BACKWARDS[kind, max(dims, 2)](grad, x, *numbers).view(shape),)


SHAPE_ONLY = Formula(
    "shape_only", forward, backward, "nothing; PyTorch saves the input", lossless=True, views=True
)


def avg_pool(
    dims: int,
    call: Call,
    input: Tensor,
    kernel_size: Size,
    stride: Size | None = None,
    padding: Size = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    """Route of `F.avg_pool1d`, `2d`, `3d`, with or without a batch dimension."""
    kernel, edge = per_dimension(kernel_size, dims), per_dimension(padding, dims)
    step = kernel if stride is None or stride in ([], ()) else per_dimension(stride, dims)
    if dims == 1:  # rows are images of one row
        kernel, step, edge = (1, *kernel), (1, *step), (0, *edge)
    arguments = (kernel, step, edge, ceil_mode, count_include_pad, divisor_override)
    return _apply(call, input, "avg_pool", dims, arguments)


def adaptive_avg_pool(dims: int, call: Call, input: Tensor, output_size: Any) -> Any:
    """Route of `F.adaptive_avg_pool1d`, `2d`, `3d`, with or without a batch dimension."""
    named: tuple[Any, ...] = per_dimension(output_size, dims)
    if len(named) != dims or input.dim() <= dims:  # PyTorch raises
        return call.plain()
    sizes = tuple(own if size is None else size for size, own in zip(named, input.shape[-dims:], strict=True))
    if all(size == 1 for size in sizes):  # PyTorch takes a mean, which saves nothing
        return call.plain()
    return _apply(call, input, "adaptive_avg_pool", dims, ((1, *sizes) if dims == 1 else sizes,))


def pad(
    call: Call, input: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> Any:
    """Route of `F.pad` by reflection or replication; PyTorch saves nothing for the other modes."""
    dims = len(pad) // 2
    if mode not in _PADS or len(pad) not in (2, 4, 6) or input.dim() != dims + 2:
        return call.plain()
    return _apply(call, input, mode, dims, (tuple(pad),))


def _apply(call: Call, x: Tensor, kind: str, dims: int, arguments: tuple[Any, ...]) -> Any:
    """Return the result without saving a large `x`; PyTorch itself raises for other dimensions."""
    fits = x.dim() in (dims + 1, dims + 2) and x.numel() > call.spec.min_elements
    if not (fits and x.requires_grad) or call.is_static(x):
        return call.plain()
    return call.apply(SHAPE_ONLY, (kind, dims, arguments, tuple(x.shape), layout_of(x)), x)


ROUTES: Routes = {
    **routes("avg_pool", "avgpool", avg_pool),
    **routes("adaptive_avg_pool", "avgpool", adaptive_avg_pool),
    F.pad: Route("pad", "pad", pad),
}
LAYERS: Layers = {
    **layers("AvgPool", "avg_pool"),
    **layers("AdaptiveAvgPool", "adaptive_avg_pool"),
    nn.modules.padding._ReflectionPadNd: F.pad,
    nn.modules.padding._ReplicationPadNd: F.pad,
}
