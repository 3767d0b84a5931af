"""y = W ∗ x + b. Saved: x, if W wants a gradient; and W (by reference, or packed if computed), if x does.

Backward is PyTorch's own; it is linear in the copy of x, so the error of dW is unbiased. PyTorch saves x for
a frozen W too; what backward needs of x then is its shape. Transposed convolutions are the same but for two
arguments of that backward.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor

from mesa_tune.engine.call import Call, autocast_dtype
from mesa_tune.engine.formula import Formula, Grads, Layers, Needs, Result, Route, Routes, Saved, Static
from mesa_tune.engine.saved import SavedTensor, Total
from mesa_tune.engine.tensors import cast, layout_of, wanted
from mesa_tune.ops.devices import on_cpu

Size = int | Sequence[int]

_CONVS = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}
_ONEDNN = torch._C._ConvBackend.Mkldnn  # type: ignore[attr-defined]
_TRANSPOSED = {3: F.conv_transpose1d, 4: F.conv_transpose2d, 5: F.conv_transpose3d}


def forward(static: Static, needs: Needs, x: Tensor, weight: Tensor, bias: Tensor | None) -> Result:
    _, kernel, stride, padding, dilation, groups, dtype, _, output_padding = static
    y: Tensor
    tensors = cast(x, dtype), cast(weight, dtype), None if bias is None else cast(bias, dtype)
    if output_padding is None:
        y = _CONVS[len(kernel)](*tensors, stride, padding, dilation, groups)
    else:
        y = _TRANSPOSED[len(kernel)](*tensors, stride, padding, output_padding, groups, dilation)
    return Result(y, lossy=((x,) if needs[1] else ()) + ((weight,) if needs[0] else ()))


def backward(saved: Saved, grad: Tensor) -> Grads:
    """Return the gradients; dW of a large x is a sum over samples, some of which are decoded at a time."""
    static, needs, lossy, _ = saved
    batched = needs[1] and len(static[0]) == len(static[1])
    slices = lossy[0].narrowed(static[6]).slices(grad.dtype) if batched else None
    if needs[1] and slices is None:
        return _gradients(static, needs, lossy, grad)
    dw = Total()
    for part, x in slices or ():
        dw.add(_gradients(static, (False, True, False), [SavedTensor.of(x)], grad[part])[1])
    dx = _gradients(static, (needs[0], False, False), lossy, grad)[0]
    db = _gradients(static, (False, False, needs[2]), lossy, grad)[2]
    return dx, dw.value, db


def _gradients(static: Static, needs: Needs, lossy: Sequence[SavedTensor], grad: Tensor) -> Grads:
    if not any(needs):
        return None, None, None
    shape, kernel, stride, padding, dilation, groups, dtype, layout, output_padding = static
    # Of what no gradient depends on, backward asks the shape alone.
    weight = lossy[-1].whole(dtype) if needs[0] else grad.new_zeros(()).expand(kernel)
    batched = len(shape) == len(kernel)
    sizes, grad = (shape, grad) if batched else ((1, *shape), grad.unsqueeze(0))
    both, more = _paddings(kernel, stride, padding, dilation)
    transposed = output_padding is not None
    options = (stride, both, dilation, transposed, output_padding or [0] * len(stride), groups)
    if needs[1]:
        x = lossy[0].whole(dtype).contiguous(memory_format=layout)
        x = x if batched else x.unsqueeze(0)
        x = F.pad(x, [part for extra in reversed(more) for part in (0, extra)]) if more else x
    else:
        extras = (0, 0, *(more or [0] * len(stride)))
        sizes_padded = [size + extra for size, extra in zip(sizes, extras, strict=True)]
        layout = layout if batched else torch.contiguous_format
        x = _placeholder(sizes_padded, layout, grad, weight, options, only_dx=not needs[2])
    biases = [kernel[1] * groups if transposed else kernel[0]]
    dx, dw, db = torch.ops.aten.convolution_backward(grad, x, weight, biases, *options, list(needs))
    if needs[0]:
        for axis, size in enumerate(sizes[2:] if more else (), start=2):
            dx = dx.narrow(axis, 0, size)
        dx = dx if batched else dx.squeeze(0)
    return wanted((dx, dw, db), needs)


def _placeholder(
    shape: Sequence[int],
    layout: torch.memory_format,
    grad: Tensor,
    weight: Tensor,
    options: Sequence[Any],
    *,
    only_dx: bool,
) -> Tensor:
    """Return a tensor for x, whose values no wanted gradient depends on.

    Kernels copy an expanded scalar to a tensor of the size of x. oneDNN's kernel of dx reads only the shape
    and layout of x, and takes a tensor without memory. The layout also decides the order of all sums.
    Of one dimension they would make a view, which needs memory.
    """
    scalar = grad.new_zeros(()).expand(shape)
    if len(shape) < 4 or not _has_memory(grad) or torch.compiler.is_compiling():
        return scalar
    needs_memory = not only_dx or torch._C._select_conv_backend(scalar, weight, None, *options) != _ONEDNN
    if needs_memory and layout is torch.contiguous_format:
        return scalar
    x = torch.empty(shape, dtype=grad.dtype, memory_format=layout)
    if not needs_memory:
        x.untyped_storage().resize_(0)
    return x


def _has_memory(tensor: Tensor) -> bool:
    """Return whether this is a tensor on the CPU, and no wrapper of others such as a DTensor."""
    plain = type(tensor) in (Tensor, FakeTensor) and not is_functorch_wrapped_tensor(tensor)
    return plain and on_cpu(tensor)


def _paddings(
    kernel: Sequence[int], stride: Sequence[int], padding: Any, dilation: Sequence[int]
) -> tuple[Sequence[int], Sequence[int]]:
    """Return the padding on both sides, and what `same` adds at the end, by dimension (empty: nothing)."""
    if padding == "valid":
        return [0] * len(stride), ()
    if padding != "same":
        return padding, ()
    total = [step * (size - 1) for size, step in zip(kernel[2:], dilation, strict=True)]
    more = [size % 2 for size in total]
    return [size // 2 for size in total], more if any(more) else ()


def _channels(static: Static) -> int:
    """Return the axis of channels, the elements of a row."""
    return 1 - len(static[1])


CONV = Formula(
    "conv",
    forward,
    backward,
    "the input, where the weight wants a gradient",
    independent=(0,),
    views=True,
    row_axis=_channels,
)


def conv(
    dims: int,
    call: Call,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Size | str = 0,
    dilation: Size = 1,
    groups: int = 1,
) -> Any:
    """Route of `F.conv1d`, `F.conv2d`, `F.conv3d`, with or without a batch dimension."""
    return _apply(call, dims, (input, weight, bias), groups, (stride, padding, dilation, None))


def conv_transpose(
    dims: int,
    call: Call,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Size = 0,
    output_padding: Size = 0,
    groups: int = 1,
    dilation: Size = 1,
) -> Any:
    """Route of `F.conv_transpose1d`, `2d`, `3d`, batched or not; weight `(in, out / groups, *)`."""
    return _apply(call, dims, (input, weight, bias), groups, (stride, padding, dilation, output_padding))


def _apply(
    call: Call, dims: int, tensors: tuple[Tensor, Tensor, Tensor | None], groups: int, sizes: Sequence[Any]
) -> Any:
    x, weight, _ = tensors
    if weight.dim() != dims + 2:
        return call.refuse(f"conv{dims}d has a formula only for a weight of {dims + 2} dimensions")
    stride, padding, dilation, output_padding = [
        size if size is None or isinstance(size, str) else per_dimension(size, dims) for size in sizes
    ]
    shapes, layout = (tuple(x.shape), tuple(weight.shape)), layout_of(x)
    static = (*shapes, stride, padding, dilation, groups, autocast_dtype(x), layout, output_padding)
    return call.apply(CONV, static, *tensors)


def per_dimension(value: Size, dims: int) -> tuple[int, ...]:
    """Return one number for each of `dims` dimensions."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * dims if len(values) == 1 else values


def routes(name: str, tag: str, serve: Callable[..., Any], suffix: str = "") -> Routes:
    """Return the routes of the functions `name` for 1, 2 and 3 dimensions, the first argument of `serve`."""
    names = [(dims, f"{name}{dims}d") for dims in (1, 2, 3)]
    return {getattr(F, full + suffix): Route(full, tag, partial(serve, dims)) for dims, full in names}


def layers(kind: str, name: str) -> Layers:
    """Return the modules `kind` for 1, 2 and 3 dimensions with their functions `name`."""
    return {getattr(nn, f"{kind}{dims}d"): getattr(F, f"{name}{dims}d") for dims in (1, 2, 3)}


ROUTES: Routes = {**routes("conv", "conv", conv), **routes("conv_transpose", "conv", conv_transpose)}
LAYERS: Layers = {**layers("Conv", "conv"), **layers("ConvTranspose", "conv_transpose")}
