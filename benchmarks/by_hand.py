"""The functions of overhead.py, each written by hand as an `autograd.Function` that calls the same ops.

They have no layer name, no settings and no shared copies: their time is a lower bound for any general
mechanism.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mesa_tune import ops
from mesa_tune.ops import fused as fused_ops
from mesa_tune.ops import maps

KEY = torch.zeros(1, dtype=torch.int64)
SIZES = (4, 16, 256)
NORMALIZE, GELU, EXP = (maps.KINDS[kind] for kind in ("normalize", "gelu", "exp"))
Forward = Callable[..., Tensor]
Backward = Callable[..., Any]


def written(forward: Forward, backward: Backward) -> Any:
    """Return the `apply` of an `autograd.Function` with this forward and backward."""
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type("ByHand", (torch.autograd.Function,), methods).apply  # type: ignore[attr-defined]


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
    return fused_ops.LINEAR_BACKWARD(data, ranges, grad, weight, None, weight.shape[1], False, True, *SIZES)


def layer_norm_forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    y, mean, rstd = torch.native_layer_norm(x, weight.shape, weight, bias, 1e-5)
    ctx.save_for_backward(weight, rstd, *quantize_map(x, NORMALIZE, mean, rstd, weight.numel()))
    return y


def layer_norm_backward(ctx: Any, grad: Tensor) -> Any:
    weight, rstd, data, ranges = ctx.saved_tensors
    return fused_ops.NORM_BACKWARD(data, ranges, grad, rstd, weight, True, math.inf, *SIZES)


def gelu_forward(ctx: Any, x: Tensor) -> Tensor:
    ctx.save_for_backward(*quantize_map(x, GELU))
    return F.gelu(x)


def gelu_backward(ctx: Any, grad: Tensor) -> Any:
    return fused_ops.DEQUANTIZE_MUL(*ctx.saved_tensors, grad, *SIZES)


def relu_forward(ctx: Any, x: Tensor) -> Tensor:
    ctx.save_for_backward(fused_ops.PACK_AT_MOST(x, 0.0))
    return F.relu(x)


def relu_backward(ctx: Any, grad: Tensor) -> Any:
    return fused_ops.MASK_GRAD(grad, ctx.saved_tensors[0], 0.0, 1)


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
    dx, dw, _ = fused_ops.LINEAR_BACKWARD(data, ranges, grad, weight, None, width, True, False, *SIZES)
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


def tanh_forward(ctx: Any, x: Tensor) -> Tensor:
    y = torch.tanh(x)
    ctx.save_for_backward(*quantize(1 - y * y))
    return y


def dropout_forward(ctx: Any, x: Tensor) -> Tensor:
    noise = torch.empty_like(x).bernoulli_(0.9)
    ctx.save_for_backward(ops.pack_bits(noise != 0))
    return x * noise.div_(0.9)


def dropout_backward(ctx: Any, grad: Tensor) -> Any:
    noise = ops.unpack_bits(ctx.saved_tensors[0], grad.shape).to(grad.dtype)
    return grad * noise.div_(0.9)


def dequantize(data: Tensor, ranges: Tensor, like: Tensor) -> Tensor:
    out = torch.empty_like(like)
    torch.ops.mesa_tune.dequantize_out.default(data, ranges, *SIZES, 0, out)
    return out


def bmm_forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
    ctx.save_for_backward(*quantize(a), *quantize(b))
    return torch.bmm(a, b)


def bmm_backward(ctx: Any, grad: Tensor) -> Any:
    data_a, ranges_a, data_b, ranges_b = ctx.saved_tensors
    a, b = dequantize(data_a, ranges_a, grad), dequantize(data_b, ranges_b, grad)
    return torch.bmm(grad, b.mT), torch.bmm(a.mT, grad)


def conv2d_forward(ctx: Any, x: Tensor, kernel: Tensor) -> Tensor:
    ctx.save_for_backward(kernel, *quantize(x))
    return F.conv2d(x, kernel, None, 1, 1)


def conv2d_backward(ctx: Any, grad: Tensor) -> Any:
    kernel, data, ranges = ctx.saved_tensors
    sizes, which = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1), [True, True, False]
    x = dequantize(data, ranges, grad)
    return torch.ops.aten.convolution_backward.default(grad, x, kernel, None, *sizes, which)[:2]


def attention_forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    ctx.save_for_backward(*quantize(q), *quantize(k), *quantize(v))
    return F.scaled_dot_product_attention(q, k, v)


def attention_backward(ctx: Any, grad: Tensor) -> Any:
    parts = ctx.saved_tensors
    q, k, v = (dequantize(parts[at], parts[at + 1], grad) for at in (0, 2, 4))
    dq, dk, dv = (torch.empty_like(grad) for _ in range(3))
    scale = 1 / math.sqrt(q.shape[-1])
    fused_ops.ATTENTION_BACKWARD(q, k, v, grad, None, None, 0, scale, False, 1.0, dq, dk, dv)
    return dq, dk, dv


def log_softmax_forward(ctx: Any, x: Tensor) -> Tensor:
    y = torch.log_softmax(x, -1)
    ctx.save_for_backward(*quantize_map(y, EXP))
    return y


def log_softmax_backward(ctx: Any, grad: Tensor) -> Any:
    data, ranges = ctx.saved_tensors
    p = dequantize(data, ranges, grad)
    return torch.addcmul(grad, p, grad.sum(-1, keepdim=True), value=-1)


def cross_entropy_forward(ctx: Any, x: Tensor, target: Tensor) -> Tensor:
    logs = torch.log_softmax(x, 1)
    ctx.save_for_backward(target, *quantize_map(logs, EXP))
    ctx.classes = x.shape[1]
    return F.nll_loss(logs, target)


def cross_entropy_backward(ctx: Any, grad: Tensor) -> Any:
    target, data, ranges = ctx.saved_tensors
    rest = (target, None, grad, ctx.classes, -100, True)
    return fused_ops.CROSS_ENTROPY_BACKWARD(data, ranges, *rest, *SIZES), None


BY_HAND: dict[str, tuple[Any, tuple[str, ...]]] = {
    "linear": (written(linear_forward, linear_backward), ("weight", "scale")),
    "layer_norm": (written(layer_norm_forward, layer_norm_backward), ("scale", "shift")),
    "gelu": (written(gelu_forward, gelu_backward), ()),
    "relu": (written(relu_forward, relu_backward), ()),
    "tanh": (written(tanh_forward, gelu_backward), ()),
    "dropout": (written(dropout_forward, dropout_backward), ()),
    "mul": (written(mul_forward, mul_backward), ("scale",)),
    "matmul": (written(matmul_forward, matmul_backward), ("weight",)),
    "bmm": (written(bmm_forward, bmm_backward), ()),
    "softmax": (written(softmax_forward, softmax_backward), ()),
    "batch_norm": (written(batch_norm_forward, batch_norm_backward), ("scale", "shift")),
    "conv2d": (written(conv2d_forward, conv2d_backward), ("kernel",)),
    "attention": (written(attention_forward, attention_backward), ()),
    "log_softmax": (written(log_softmax_forward, log_softmax_backward), ()),
    "cross_entropy": (written(cross_entropy_forward, cross_entropy_backward), ("target",)),
}
"""Each function, and the attributes of the `Calls` module that it takes as further arguments."""
