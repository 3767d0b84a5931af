"""y = W ∗ x + b. Kept: x, if W wants a gradient; and W (by reference, unless it is computed), if x does.

Backward is PyTorch's own; it is linear in the copy of x, so the error of dW is unbiased. PyTorch keeps x for
a frozen W too; what backward needs of x then is its shape. Transposed convolutions are the same but for two
arguments of that backward.
"""

from collections.abc import Callable, Sequence
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
    autocast_dtype,
    cast,
    layout_of,
    unviewed,
)
from mesa_tune.engine.packed import Held, Total

Size = int | Sequence[int]

_CONVS: dict[int, Callable[..., Tensor]] = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}
_TRANSPOSED: dict[int, Callable[..., Tensor]] = {
    3: F.conv_transpose1d,
    4: F.conv_transpose2d,
    5: F.conv_transpose3d,
}


def forward(static: Static, needs: Needs, x: Tensor, weight: Tensor, bias: Tensor | None) -> Result:
    _, kernel, stride, padding, dilation, groups, dtype, _, output_padding = static
    given = (cast(x, dtype), cast(weight, dtype), None if bias is None else cast(bias, dtype))
    if output_padding is None:
        y = _CONVS[len(kernel)](*given, stride, padding, dilation, groups)
    else:
        y = _TRANSPOSED[len(kernel)](*given, stride, padding, output_padding, groups, dilation)
    return Result(unviewed(y), lossy=((x,) if needs[1] else ()) + ((weight,) if needs[0] else ()))


def backward(
    static: Static, needs: Needs, lossy: list[Tensor], exact: Any, grad: Tensor
) -> tuple[Tensor | None, ...]:
    shape, kernel, stride, padding, dilation, groups, dtype, layout, output_padding = static
    # What no gradient depends on has only a shape: a tensor of it without memory.
    x = cast(lossy[0], dtype).contiguous(memory_format=layout) if needs[1] else _shaped(grad, shape)
    weight = cast(lossy[-1], dtype) if needs[0] else _shaped(grad, kernel)
    batched = len(shape) == len(kernel)
    both, more = _paddings(kernel, stride, padding, dilation)
    x = x if batched else x.unsqueeze(0)
    padded = F.pad(x, [part for extra in reversed(more) for part in (0, extra)]) if more else x
    dx, dw, db = torch.ops.aten.convolution_backward(
        grad if batched else grad.unsqueeze(0),
        padded,
        weight,
        [kernel[0] if output_padding is None else kernel[1] * groups],
        stride,
        both,
        dilation,
        output_padding is not None,
        [0] * len(stride) if output_padding is None else output_padding,
        groups,
        [needs[0], needs[1], needs[2]],
    )
    if needs[0]:
        for axis, size in enumerate(x.shape[2:] if more else (), start=2):
            dx = dx.narrow(axis, 0, size)
        dx = dx if batched else dx.squeeze(0)
    return dx if needs[0] else None, dw if needs[1] else None, db if needs[2] else None


def piecewise(
    static: Static, needs: Needs, held: list[Held], exact: Any, grad: Tensor
) -> tuple[Tensor | None, ...] | None:
    """dW as a sum over samples of x, some of which are decoded at a time."""
    shape, kernel = static[:2]
    batched = needs[1] and len(shape) == len(kernel)
    pieces = held[0].parts_of(grad.dtype) if batched else None
    if pieces is None:
        return None
    dw = Total()
    for part, x in pieces:
        own_static = (tuple(x.shape), *static[1:])
        _, own, _ = backward(own_static, (False, True, False), [x], exact, grad[part])
        dw.add(own)
    if not (needs[0] or needs[2]):
        return None, dw.value, None
    weight = [held[-1].whole()] if needs[0] else []
    dx, _, db = backward(static, (needs[0], False, needs[2]), weight, exact, grad)
    return dx, dw.value, db


def _shaped(like: Tensor, shape: Sequence[int]) -> Tensor:
    return like.new_zeros(()).expand(shape)


def _paddings(
    kernel: Sequence[int], stride: Sequence[int], padding: Any, dilation: Sequence[int]
) -> tuple[Sequence[int], Sequence[int]]:
    """The padding on both sides, and what `same` pads more at the end, by dimension (nothing: none)."""
    if padding == "valid":
        return [0] * len(stride), ()
    if padding != "same":
        return padding, ()
    total = [step * (size - 1) for size, step in zip(kernel[2:], dilation, strict=True)]
    more = [size % 2 for size in total]
    return [size // 2 for size in total], more if any(more) else ()


CONV = Formula(
    "conv",
    forward,
    backward,
    "the input, where the weight wants a gradient",
    independent=(0,),
    piecewise=piecewise,
)


def conv(
    call: Call,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Size | str = 0,
    dilation: Size = 1,
    groups: int = 1,
    **unknown: Any,
) -> Any:
    """`F.conv1d`, `F.conv2d`, `F.conv3d`, with or without a batch dimension."""
    if unknown or weight.dim() not in _CONVS:
        return call.refuse("convolution has a formula only in 1 to 3 dimensions")
    return _apply(call, input, weight, bias, stride, padding, dilation, groups, None)


def conv_transpose(
    call: Call,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Size = 0,
    output_padding: Size = 0,
    groups: int = 1,
    dilation: Size = 1,
    **unknown: Any,
) -> Any:
    """`F.conv_transpose1d`, `2d`, `3d`, with or without a batch dimension; weight `(in, out / groups, *)`."""
    if unknown or weight.dim() not in _TRANSPOSED:
        return call.refuse("transposed convolution has a formula only in 1 to 3 dimensions")
    return _apply(call, input, weight, bias, stride, padding, dilation, groups, output_padding)


def _apply(
    call: Call,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Size,
    padding: Size | str,
    dilation: Size,
    groups: int,
    output_padding: Size | None,
) -> Any:
    places = weight.dim() - 2
    static = (
        tuple(input.shape),
        tuple(weight.shape),
        _each(stride, places),
        padding if isinstance(padding, str) else _each(padding, places),
        _each(dilation, places),
        groups,
        autocast_dtype(input),
        layout_of(input),
        None if output_padding is None else _each(output_padding, places),
    )
    return call.apply(CONV, static, input, weight, bias)


def _each(value: Size, places: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * places if len(values) == 1 else values


ROUTES: Routes = {
    F.conv1d: Route("conv1d", "conv", conv),
    F.conv2d: Route("conv2d", "conv", conv),
    F.conv3d: Route("conv3d", "conv", conv),
    F.conv_transpose1d: Route("conv_transpose1d", "conv", conv_transpose),
    F.conv_transpose2d: Route("conv_transpose2d", "conv", conv_transpose),
    F.conv_transpose3d: Route("conv_transpose3d", "conv", conv_transpose),
}
LAYERS: Layers = {
    nn.Conv1d: F.conv1d,
    nn.Conv2d: F.conv2d,
    nn.Conv3d: F.conv3d,
    nn.ConvTranspose1d: F.conv_transpose1d,
    nn.ConvTranspose2d: F.conv_transpose2d,
    nn.ConvTranspose3d: F.conv_transpose3d,
}
