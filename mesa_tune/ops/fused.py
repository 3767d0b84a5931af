"""Ops that save a pass over memory: they compute while encoding, or while decoding.

Importing this module defines `torch.ops.mesa_tune.{quantize_map, dequantize_mul, pack_at_most, gate,
norm_backward, batch_norm_backward, softmax_backward, cross_entropy_backward, linear_backward,
attention_backward}`. All but the last, which writes into existing memory, are pure. The functions here are
their default kernels, in PyTorch. They give the same bytes as the native ones (the last six: the same numbers
except for the order of sums). All have native kernels on the CPU; linear layers and attention have none on
CUDA. `sizes` are the bits, levels and group size of the packed tensor.
"""

import math
from collections.abc import Callable, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mesa_tune import ops
from mesa_tune.ops import maps

RAW = torch.ops.mesa_tune
_PARTS = "Tensor data, Tensor ranges"
_SIZES = "int bits, int levels, int group_size"
_MAP = "int map, Tensor? mean, Tensor? rstd, int inner"
_NORM = "Tensor grad, Tensor rstd, Tensor weight, bool centered, float limit"
_BATCH_NORM = "Tensor grad, Tensor rstd, Tensor? weight, bool last, bool fixed"
_CROSS_ENTROPY = (
    "Tensor target, Tensor surplus, Tensor? weight, Tensor grad, int classes, int ignore, bool mean"
)
_LINEAR = "Tensor grad, Tensor? weight, Tensor? zero_rows, int width, bool transposed, bool bias"
_DROPPED = "Tensor? bits, int first_bit, float scale, bool causal, float raised"
_ATTENTION = f"Tensor q, Tensor k, Tensor v, Tensor grad, Tensor? bias, {_DROPPED}"
_SCHEMAS = (
    f"quantize_map(Tensor x, {_MAP}, {_SIZES}, bool stochastic, Tensor? seed) -> (Tensor, Tensor)",
    f"dequantize_mul({_PARTS}, Tensor factor, {_SIZES}) -> Tensor",
    "pack_at_most(Tensor x, float limit) -> Tensor",
    "gate(Tensor grad, Tensor data, float slope, int inner) -> Tensor",
    f"attention_backward({_ATTENTION}, Tensor(a!)? dq, Tensor(b!)? dk, Tensor(c!)? dv) -> ()",
    f"norm_backward({_PARTS}, {_NORM}, {_SIZES}) -> (Tensor dx, Tensor dw, Tensor db)",
    f"batch_norm_backward({_PARTS}, {_BATCH_NORM}, {_SIZES}) -> (Tensor dx, Tensor dw, Tensor db)",
    f"softmax_backward({_PARTS}, Tensor grad, {_SIZES}) -> Tensor",
    f"cross_entropy_backward({_PARTS}, {_CROSS_ENTROPY}, {_SIZES}) -> Tensor",
    f"linear_backward({_PARTS}, {_LINEAR}, {_SIZES}) -> (Tensor dx, Tensor dw, Tensor db)",
)


_Gradients = tuple[Tensor, Tensor, Tensor]


def quantize_map(
    x: Tensor, map: int, mean: Tensor | None, rstd: Tensor | None, inner: int, *settings: Any
) -> tuple[Tensor, Tensor]:
    """Quantize map number `map` of x (`maps.apply`); `settings`: sizes, stochastic or not, seed.

    Of 16 bits, results are rounded to the dtype of x, and the second tensor has the ends of ranges.
    """
    mapped = maps.apply(x, map, mean, rstd, inner).to(x.dtype)
    quantize = RAW.quantize if x.dtype == torch.float32 else RAW.quantize_ends
    parts: tuple[Tensor, Tensor] = quantize.default(mapped, *settings[:3], 0, *settings[3:])
    return parts


def _decoded(data: Tensor, ranges: Tensor, shape: Sequence[int], dtype: torch.dtype, *sizes: int) -> Tensor:
    decoded: Tensor = torch.ops.mesa_tune.dequantize.default(data, ranges, shape, dtype, *sizes, 0)
    return decoded


def dequantize_mul(data: Tensor, ranges: Tensor, factor: Tensor, *sizes: int) -> Tensor:
    """Return the decoded tensor, in the shape of the float32 `factor`, times `factor`; contiguous."""
    return _decoded(data, ranges, factor.shape, factor.dtype, *sizes).mul_(factor)


def pack_at_most(x: Tensor, limit: float) -> Tensor:
    """Return one bit per element of x, of 32 or 16 bits: whether it is at most `limit`."""
    return ops.pack_bits(x <= limit)


def mask_grad(grad: Tensor, data: Tensor, slope: float, inner: int) -> Tensor:
    """Return `grad`, of 32 or 16 bits, times `slope` where the bit is set; contiguous.

    A bit is that of `inner` neighbours: of an element, or of a row.
    """
    grad = grad.contiguous()
    mask = ops.unpack_bits(data, (grad.numel() // inner,)).view(-1, 1)
    rows = grad.view(-1, inner)
    return (torch.where(mask, rows * slope, rows) if slope else rows.masked_fill(mask, 0)).view(grad.shape)


def norm_backward(
    data: Tensor,
    ranges: Tensor,
    grad: Tensor,
    rstd: Tensor,
    weight: Tensor,
    centered: bool,
    limit: float,
    *sizes: int,
) -> _Gradients:
    """The backward of a norm over rows of `weight.numel()` elements, whose x̂ was quantized.

    Each is float32, float16 or bfloat16, and computed with in float32. Return dx as `grad`, contiguous, and
    as `weight` the sums over rows of grad · x̂ and of grad. `rstd` has one number per row. Where it is at
    least `limit`, the row is constant: x̂ counts as 0. `centered` norms subtract the mean.
    """
    shape = -1, weight.numel()
    x = _decoded(data, ranges, grad.shape, torch.float32, *sizes).view(shape)
    r = rstd.view(-1, 1).float()
    x, rows = x.masked_fill(r >= limit, 0), grad.reshape(shape).float()
    scaled = rows * weight.view(-1).float()
    mean = scaled.mean(1, keepdim=True) if centered else 0.0
    dx = (scaled - mean - x * (scaled * x).mean(1, keepdim=True)) * r
    dw, db = ((each.sum(0).view(weight.shape).to(weight.dtype)) for each in (rows * x, rows))
    return dx.view(grad.shape).to(grad.dtype), dw, db


def batch_norm_backward(
    data: Tensor,
    ranges: Tensor,
    grad: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    last: bool,
    fixed: bool,
    *sizes: int,
) -> _Gradients:
    """The backward of a batch norm, whose x̂ was quantized in the shape of `grad`; all float32.

    grad is `(samples, channels, *)`, or, if `last`, has its channels last; rstd, weight `(channels,)`.
    `fixed`: the statistics do not depend on the batch. Return dx, contiguous, in the shape of `grad`, and per
    channel the sums of grad · x̂ and of grad.
    """
    x = _decoded(data, ranges, grad.shape, grad.dtype, *sizes)
    channels = grad.dim() - 1 if last else 1
    dims = [dim for dim in range(grad.dim()) if dim != channels]
    shape = [-1 if dim == channels else 1 for dim in range(grad.dim())]
    dw, db = (grad * x).sum(dims), grad.sum(dims)
    scale = (rstd if weight is None else rstd * weight).view(shape)
    count = math.prod(grad.shape[dim] for dim in dims)
    dx = grad if fixed else grad - (db / count).view(shape) - x * (dw / count).view(shape)
    return (dx * scale).contiguous(), dw, db


def softmax_backward(data: Tensor, ranges: Tensor, grad: Tensor, *sizes: int) -> Tensor:
    """The backward of a softmax along the last dimension, whose output was quantized in the shape of `grad`.

    All float32; the result is contiguous.
    """
    y = _decoded(data, ranges, grad.shape, grad.dtype, *sizes)
    dx: Tensor = torch.ops.aten._softmax_backward_data(grad.contiguous(), y, -1, y.dtype)
    return dx


def by_target(
    target: Tensor, weight: Tensor | None, ignore: int, mean: bool, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return, per target, its index, its incoming gradient times its weight, and its incoming gradient.

    Both gradients are zero where the target is `ignore`. `grad` has one element per target, or one for all:
    that of their `mean` or sum.
    """
    counted = target != ignore
    index = torch.where(counted, target, 0)
    weights = None if weight is None else torch.where(counted, weight[index], 0)
    if mean:
        grad = grad / (counted if weights is None else weights).sum()
    grad = torch.where(counted, grad, 0)
    return index, grad if weights is None else weights * grad, grad


def cross_entropy_backward(
    data: Tensor,
    ranges: Tensor,
    target: Tensor,
    surplus: Tensor,
    weight: Tensor | None,
    grad: Tensor,
    classes: int,
    ignore: int,
    mean: bool,
    *sizes: int,
) -> Tensor:
    """The backward of a cross-entropy whose probabilities `(*target.shape, classes)` were quantized; float32.

    target is int64, and may be `ignore`. surplus, in the shape of target, is p − 1 of the target's class; it
    replaces what was quantized for that class. weight is `(classes,)`. grad has one element per target, or
    one for all: that of their `mean` or sum. Return dx in the shape of the probabilities. Raise RuntimeError
    for a target that is no class; on CUDA an assertion on the device fails.
    """
    dx = _decoded(data, ranges, (*target.shape, classes), grad.dtype, *sizes)
    if not dx.numel():
        return dx
    index, at_target, _ = by_target(target, weight, ignore, mean, grad)
    dx.mul_(at_target.unsqueeze(-1))
    return dx.scatter_(-1, index.unsqueeze(-1), (at_target * surplus).unsqueeze(-1))


def linear_backward(
    data: Tensor,
    ranges: Tensor,
    grad: Tensor,
    weight: Tensor | None,
    zero_rows: Tensor | None,
    width: int,
    transposed: bool,
    bias: bool,
    *sizes: int,
) -> _Gradients:
    """The backward of `y = x weightᵀ + b`, whose x `(*, width)` was quantized.

    grad is `(*, out)`, weight `(out, width)`, or `(width, out)` if `transposed`; each is float32, float16 or
    bfloat16. `zero_rows` has one bit per row of x: it is zero, whatever it is decoded as. Return, contiguous
    and in the dtype of grad, dx in the shape of x, dw in the shape of the weight, db `(out,)`; dx is empty,
    `(0,)`, without a weight, db without a bias.
    """
    rows = grad.reshape(-1, grad.shape[-1])
    x = _decoded(data, ranges, (rows.shape[0], width), grad.dtype, *sizes)
    if zero_rows is not None:
        x = x.masked_fill_(ops.unpack_bits(zero_rows, (rows.shape[0], 1)), 0)
    dx = grad.new_empty(0)
    if weight is not None:
        dx = grad.contiguous() @ (weight.t() if transposed else weight).to(grad.dtype)
    dw = x.t() @ rows if transposed else rows.t() @ x
    return dx, dw, rows.sum(0) if bias else grad.new_empty(0)


def attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad: Tensor,
    bias: Tensor | None,
    bits: Tensor | None,
    first_bit: int,
    scale: float,
    causal: bool,
    raised: float,
    *outs: Tensor | None,
) -> None:
    """Write the backward of `softmax(scale q kᵀ + bias) v` into `outs`: dq, dk and dv, or None; all float32.

    q is `(samples, heads, queries, width)`, and k, v and `grad` accordingly; each is dense along the width.
    `bias`, in the shape of the scores, may mask all keys of a query, whose output is then zero. `bits`, from
    number `first_bit` on, are the scores that dropout lets through, multiplied by `raised`. Native kernels
    compute P for as many queries at a time as fit in the cache.
    """
    shape = (*q.shape[:3], k.shape[2])
    if causal:
        future = q.new_full(shape[2:], -math.inf).triu_(1)
        bias = future if bias is None else bias + future
    scores = scale * (q @ k.mT)
    p = scores.softmax(-1) if bias is None else torch.ops.aten._safe_softmax(scores + bias, -1)
    dropout = torch.ones((), device=q.device)
    if bits is not None:
        begin, end = first_bit, first_bit + math.prod(shape)
        dropout = ops.unpack_bits(bits, (8 * bits.numel(),))[begin:end].view(shape) * raised
    ds = torch.ops.aten._softmax_backward_data(grad @ v.mT * dropout, p, -1, p.dtype) * scale
    for out, gradient in zip(outs, (ds @ k, ds.mT @ q, (p * dropout).mT @ grad), strict=True):
        if out is not None:
            out.copy_(gradient)


def _fake_quantize_map(x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    bits, levels, group_size, *noise = arguments[4:]
    data, ranges = ops.fake_quantize(x, bits, levels, group_size, 0, *noise)
    return data, ranges.to(x.dtype)


def _fake_like_factor(data: Tensor, ranges: Tensor, factor: Tensor, *sizes: int) -> Tensor:
    return factor.new_empty(factor.shape)


def _fake_pack(x: Tensor, limit: float) -> Tensor:
    return x.new_empty((x.numel() + 7) // 8, dtype=torch.uint8)


def _fake_mask_grad(grad: Tensor, data: Tensor, slope: float, inner: int) -> Tensor:
    return grad.new_empty(grad.shape)


def _fake_norm(
    data: Tensor, ranges: Tensor, grad: Tensor, rstd: Tensor, weight: Tensor, *arguments: Any
) -> _Gradients:
    return grad.new_empty(grad.shape), weight.new_empty(weight.shape), weight.new_empty(weight.shape)


def _fake_batch_norm(data: Tensor, ranges: Tensor, grad: Tensor, rstd: Tensor, *arguments: Any) -> _Gradients:
    return grad.new_empty(grad.shape), rstd.new_empty(rstd.shape), rstd.new_empty(rstd.shape)


def _fake_cross_entropy(data: Tensor, ranges: Tensor, target: Tensor, *arguments: Any) -> Tensor:
    _, _, grad, classes, *_ = arguments
    empty: Tensor = grad.new_empty(*target.shape, classes)
    return empty


def _fake_linear(data: Tensor, ranges: Tensor, grad: Tensor, *arguments: Any) -> _Gradients:
    weight, _, width, transposed, bias, *_ = arguments
    out = grad.shape[-1]
    dx = grad.new_empty(0 if weight is None else (*grad.shape[:-1], width))
    dw = grad.new_empty(width, out) if transposed else grad.new_empty(out, width)
    return dx, dw, grad.new_empty(out if bias else 0)


_KERNELS: ops.Kernels = {
    "quantize_map": (quantize_map, _fake_quantize_map),
    "dequantize_mul": (dequantize_mul, _fake_like_factor),
    "pack_at_most": (pack_at_most, _fake_pack),
    "gate": (mask_grad, _fake_mask_grad),
    "norm_backward": (norm_backward, _fake_norm),
    "batch_norm_backward": (batch_norm_backward, _fake_batch_norm),
    "softmax_backward": (softmax_backward, _fake_like_factor),
    "cross_entropy_backward": (cross_entropy_backward, _fake_cross_entropy),
    "linear_backward": (linear_backward, _fake_linear),
    "attention_backward": (attention_backward, ops.nothing),
}

NAMES = tuple(_KERNELS)

_library = ops.define("FRAGMENT", _SCHEMAS, _KERNELS)

QUANTIZE_MAP = torch.ops.mesa_tune.quantize_map.default
PACK_AT_MOST = torch.ops.mesa_tune.pack_at_most.default
MASK_GRAD = torch.ops.mesa_tune.gate.default
ATTENTION_BACKWARD = torch.ops.mesa_tune.attention_backward.default


class Fused(NamedTuple):
    """An op on a packed tensor: `kernel(data, ranges, *arguments, bits, levels, group_size)`.

    `everywhere`: it is worth calling on every device, else only on the CPU. `any_size`: it takes groups of
    any size, else small ones. `dtypes`: those of its arguments.
    """

    kernel: Callable[..., Any]
    everywhere: bool = False
    any_size: bool = False
    dtypes: Set[torch.dtype] = frozenset({torch.float32})

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Return what the kernel returns."""
        return self.kernel(*arguments, **keywords)


_ON_CUDA = ops.native("cuda")
DEQUANTIZE_MUL = Fused(torch.ops.mesa_tune.dequantize_mul.default, everywhere=True, any_size=True)
NORM_BACKWARD = Fused(
    torch.ops.mesa_tune.norm_backward.default, everywhere=_ON_CUDA, dtypes=frozenset(ops.DTYPES)
)
BATCH_NORM_BACKWARD = Fused(torch.ops.mesa_tune.batch_norm_backward.default, everywhere=_ON_CUDA)
SOFTMAX_BACKWARD = Fused(torch.ops.mesa_tune.softmax_backward.default, everywhere=_ON_CUDA)
CROSS_ENTROPY_BACKWARD = Fused(torch.ops.mesa_tune.cross_entropy_backward.default, everywhere=_ON_CUDA)
LINEAR_BACKWARD = Fused(torch.ops.mesa_tune.linear_backward.default, dtypes=frozenset(ops.DTYPES))
