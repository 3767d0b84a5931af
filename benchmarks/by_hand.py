"""The functions of overhead.py, each written by hand: an `autograd.Function` that calls the same ops.

No name, no settings, nothing shared: what these take, no general way can save.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mesa_tune import fused_ops, maps

KEY = torch.zeros(1, dtype=torch.int64)
SIZES = (4, 16, 256)
NORMALIZE, GELU = maps.KINDS["normalize"], maps.KINDS["gelu"]
Forward = Callable[..., Tensor]
Backward = Callable[..., Any]


def written(forward: Forward, backward: Backward) -> Any:
    """The `apply` of a Function with these two halves."""
    halves = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type("ByHand", (torch.autograd.Function,), halves).apply  # type: ignore[attr-defined]


def quantize(x: Tensor) -> Any:
    return torch.ops.mesa_tune.quantize.default(x, *SIZES, 0, True, KEY)


def quantize_map(
    x: Tensor, kind: int, mean: Tensor | None = None, rstd: Tensor | None = None, inner: int = 1
) -> Any:
    return fused_ops.QUANTIZE_MAP(x, kind, mean, rstd, inner, *SIZES, True, KEY)


def linear_forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    ctx.save_for_backward(weight, *quantize(x))
    return F.linear(x, weight, bias)


def linear_backward(ctx: Any, grad: Tensor) -> Any:
    weight, data, ranges = ctx.saved_tensors
    return fused_ops.LINEAR_BACKWARD(data, ranges, grad, weight, weight.shape[1], False, True, *SIZES)


def layer_norm_forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    y, mean, rstd = torch.native_layer_norm(x, weight.shape, weight, bias, 1e-5)
    ctx.save_for_backward(weight, rstd, *quantize_map(x, NORMALIZE, mean, rstd, weight.numel()))
    return y


def layer_norm_backward(ctx: Any, grad: Tensor) -> Any:
    weight, rstd, data, ranges = ctx.saved_tensors
    return fused_ops.NORM_BACKWARD(data, ranges, grad, rstd, weight, True, *SIZES)


def gelu_forward(ctx: Any, x: Tensor) -> Tensor:
    ctx.save_for_backward(*quantize_map(x, GELU))
    return F.gelu(x)


def gelu_backward(ctx: Any, grad: Tensor) -> Any:
    return fused_ops.DEQUANTIZE_MUL(*ctx.saved_tensors, grad, *SIZES)


def relu_forward(ctx: Any, x: Tensor) -> Tensor:
    ctx.save_for_backward(fused_ops.PACK_AT_MOST(x, 0.0))
    return F.relu(x)


def relu_backward(ctx: Any, grad: Tensor) -> Any:
    return fused_ops.GATE(grad, ctx.saved_tensors[0], 0.0)


def mul_forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
    ctx.save_for_backward(scale, *quantize(x))
    return torch.mul(x, scale)


def mul_backward(ctx: Any, grad: Tensor) -> Any:
    scale, data, ranges = ctx.saved_tensors
    product: Tensor = fused_ops.DEQUANTIZE_MUL(data, ranges, grad, *SIZES)
    return grad * scale, product.sum_to_size(scale.shape)


def matmul_forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
    ctx.save_for_backward(weight, *quantize(x))
    return torch.matmul(x, weight)


def matmul_backward(ctx: Any, grad: Tensor) -> Any:
    weight, data, ranges = ctx.saved_tensors
    width = weight.shape[0]
    dx, dw, _ = fused_ops.LINEAR_BACKWARD(data, ranges, grad, weight, width, True, False, *SIZES)
    return dx, dw


def softmax_forward(ctx: Any, x: Tensor) -> Tensor:
    y = torch.softmax(x, -1)
    ctx.save_for_backward(*quantize(y))
    return y


def softmax_backward(ctx: Any, grad: Tensor) -> Any:
    return fused_ops.SOFTMAX_BACKWARD(*ctx.saved_tensors, grad, *SIZES)


def batch_norm_forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    y, mean, rstd = torch.native_batch_norm(x, weight, bias, None, None, True, 0.1, 1e-5)
    ctx.save_for_backward(weight, rstd, *quantize_map(x, NORMALIZE, mean, rstd))
    return y


def batch_norm_backward(ctx: Any, grad: Tensor) -> Any:
    weight, rstd, data, ranges = ctx.saved_tensors
    return fused_ops.BATCH_NORM_BACKWARD(data, ranges, grad, rstd, weight, False, False, *SIZES)


BY_HAND: dict[str, tuple[Any, tuple[str, ...]]] = {
    "linear": (written(linear_forward, linear_backward), ("weight", "scale")),
    "layer_norm": (written(layer_norm_forward, layer_norm_backward), ("scale", "shift")),
    "gelu": (written(gelu_forward, gelu_backward), ()),
    "relu": (written(relu_forward, relu_backward), ()),
    "mul": (written(mul_forward, mul_backward), ("scale",)),
    "matmul": (written(matmul_forward, matmul_backward), ("weight",)),
    "softmax": (written(softmax_forward, softmax_backward), ()),
    "batch_norm": (written(batch_norm_forward, batch_norm_backward), ("scale", "shift")),
}
"""Each function, and which of the module's parameters it takes after the input."""
