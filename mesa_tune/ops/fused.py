"""Ops that spare a pass over memory: something is made while it is encoded, or used while it is decoded.

Importing this module defines `torch.ops.mesa_tune.{quantize_map, dequantize_mul, pack_at_most, gate,
norm_backward, batch_norm_backward, softmax_backward, cross_entropy_backward, linear_backward,
attention_backward}`. All but the last, which writes into existing memory, are pure. Their default kernels,
in PyTorch, give the same bytes (the last six the same numbers but for the order of sums). The first two have
native kernels on the CPU and on CUDA, the others on the CPU.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mesa_tune import ops
from mesa_tune.ops import maps

_PARTS = "Tensor data, Tensor ranges"
_SIZES = "int bits, int levels, int group_size"
_MAP = "int map, Tensor? mean, Tensor? rstd, int inner"
_NORM = "Tensor grad, Tensor rstd, Tensor weight, bool centered"
_BATCH_NORM = "Tensor grad, Tensor rstd, Tensor? weight, bool last, bool fixed"
_CROSS_ENTROPY = (
    "Tensor target, Tensor surplus, Tensor? weight, Tensor grad, int classes, int ignore, bool mean"
)
_LINEAR = "Tensor grad, Tensor? weight, int width, bool transposed, bool bias"
_DROPPED = "Tensor? bits, int first_bit, float scale, bool causal, float raised"
_ATTENTION = f"Tensor q, Tensor k, Tensor v, Tensor grad, Tensor? bias, {_DROPPED}"
_SCHEMAS = (
    f"quantize_map(Tensor x, {_MAP}, {_SIZES}, bool stochastic, Tensor? seed) -> (Tensor, Tensor)",
    f"dequantize_mul({_PARTS}, Tensor factor, {_SIZES}) -> Tensor",
    "pack_at_most(Tensor x, float limit) -> Tensor",
    "gate(Tensor grad, Tensor data, float slope) -> Tensor",
    f"attention_backward({_ATTENTION}, Tensor(a!)? dq, Tensor(b!)? dk, Tensor(c!)? dv) -> ()",
    f"norm_backward({_PARTS}, {_NORM}, {_SIZES}) -> (Tensor dx, Tensor dw, Tensor db)",
    f"batch_norm_backward({_PARTS}, {_BATCH_NORM}, {_SIZES}) -> (Tensor dx, Tensor dw, Tensor db)",
    f"softmax_backward({_PARTS}, Tensor grad, {_SIZES}) -> Tensor",
    f"cross_entropy_backward({_PARTS}, {_CROSS_ENTROPY}, {_SIZES}) -> Tensor",
    f"linear_backward({_PARTS}, {_LINEAR}, {_SIZES}) -> (Tensor dx, Tensor dw, Tensor db)",
)


def quantize_map(
    x: Tensor,
    map: int,
    mean: Tensor | None,
    rstd: Tensor | None,
    inner: int,
    bits: int,
    levels: int,
    group_size: int,
    stochastic: bool,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`quantize` of map number `map` (`maps.apply`) of x."""
    made = maps.apply(x, map, mean, rstd, inner)
    sizes = (bits, levels, group_size, 0)
    parts: tuple[Tensor, Tensor] = torch.ops.mesa_tune.quantize.default(made, *sizes, stochastic, seed)
    return parts


def dequantize_mul(
    data: Tensor, ranges: Tensor, factor: Tensor, bits: int, levels: int, group_size: int
) -> Tensor:
    """What was quantized, in the shape of the float32 `factor`, times that; contiguous."""
    sizes = (bits, levels, group_size, 0)
    decoded: Tensor = torch.ops.mesa_tune.dequantize.default(data, ranges, factor.shape, factor.dtype, *sizes)
    return decoded.mul_(factor)


def pack_at_most(x: Tensor, limit: float) -> Tensor:
    """Where the float32 x is at most `limit`, one bit an element."""
    return ops.pack_bits(x <= limit)


def gate(grad: Tensor, data: Tensor, slope: float) -> Tensor:
    """The float32 `grad`, times `slope` where the bit is set (0 if that is 0); contiguous."""
    shut, grad = ops.unpack_bits(data, grad.shape), grad.contiguous()
    return torch.where(shut, grad * slope, grad) if slope else grad.masked_fill(shut, 0)


def norm_backward(
    data: Tensor,
    ranges: Tensor,
    grad: Tensor,
    rstd: Tensor,
    weight: Tensor,
    centered: bool,
    bits: int,
    levels: int,
    group_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward of a norm over rows of `weight.numel()` elements, whose x̂ was quantized; all float32.

    Returns dx in the shape of `grad`, contiguous, and in the shape of `weight` the sums over rows of grad · x̂
    and of grad. `rstd` has a number a row; `centered` norms subtract the mean.
    """
    sizes = (bits, levels, group_size, 0)
    x = torch.ops.mesa_tune.dequantize.default(data, ranges, grad.shape, grad.dtype, *sizes)
    rows, x = grad.reshape(-1, weight.numel()), x.view(-1, weight.numel())
    scaled = rows * weight.view(-1)
    middle = scaled.mean(1, keepdim=True) if centered else 0.0
    dx = (scaled - middle - x * (scaled * x).mean(1, keepdim=True)) * rstd.view(-1, 1)
    return dx.view(grad.shape), (rows * x).sum(0).view(weight.shape), rows.sum(0).view(weight.shape)


def batch_norm_backward(
    data: Tensor,
    ranges: Tensor,
    grad: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    last: bool,
    fixed: bool,
    bits: int,
    levels: int,
    group_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward of a batch norm, whose x̂ was quantized in the shape of `grad`; all float32.

    grad `(samples, channels, *)`, or with the channels `last`; rstd, weight `(channels,)`. `fixed`: the
    statistics are no part of the batch. Returns dx, contiguous, in the shape of `grad`, and by channel the
    sums of grad · x̂ and of grad.
    """
    sizes = (bits, levels, group_size, 0)
    x = torch.ops.mesa_tune.dequantize.default(data, ranges, grad.shape, grad.dtype, *sizes)
    axis = grad.dim() - 1 if last else 1
    axes = [each for each in range(grad.dim()) if each != axis]
    shape = [-1 if each == axis else 1 for each in range(grad.dim())]
    dw, db = (grad * x).sum(axes), grad.sum(axes)
    scale = (rstd if weight is None else rstd * weight).view(shape)
    count = math.prod(grad.shape[each] for each in axes)
    dx = grad if fixed else grad - (db / count).view(shape) - x * (dw / count).view(shape)
    return (dx * scale).contiguous(), dw, db


def softmax_backward(
    data: Tensor, ranges: Tensor, grad: Tensor, bits: int, levels: int, group_size: int
) -> Tensor:
    """The backward of a softmax along the last dimension, whose output was quantized in the shape of `grad`,
    float32; contiguous.
    """
    sizes = (bits, levels, group_size, 0)
    y = torch.ops.mesa_tune.dequantize.default(data, ranges, grad.shape, grad.dtype, *sizes)
    dx: Tensor = torch.ops.aten._softmax_backward_data(grad.contiguous(), y, -1, y.dtype)
    return dx


def by_target(
    target: Tensor, weight: Tensor | None, ignore: int, mean: bool, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Each target's index, and its incoming gradient times its weight and alone, zero where it is ignored.

    `grad` is that of a loss for each target, or, one for all, of their `mean` or sum.
    """
    counted = target != ignore
    index = torch.where(counted, target, 0)
    own = None if weight is None else torch.where(counted, weight[index], 0)
    if mean:
        grad = grad / (counted if own is None else own).sum()
    grad = torch.where(counted, grad, 0)
    return index, grad if own is None else own * grad, grad


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
    bits: int,
    levels: int,
    group_size: int,
) -> Tensor:
    """The backward of a cross-entropy whose probabilities `(*target.shape, classes)` were quantized; float32.

    target int64, any of them maybe `ignore`; surplus, in the shape of target, is p − 1 of the target, which
    takes the place of what was quantized there; weight `(classes,)`; grad a number for each target, or one
    for all, of their `mean` or sum. Returns dx in the shape of the probabilities. RuntimeError for a target
    that is no class.
    """
    shape, sizes = (*target.shape, classes), (bits, levels, group_size, 0)
    dx: Tensor = torch.ops.mesa_tune.dequantize.default(data, ranges, shape, grad.dtype, *sizes)
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
    width: int,
    transposed: bool,
    bias: bool,
    bits: int,
    levels: int,
    group_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward of `y = x weightᵀ + b`, whose x `(*, width)` was quantized; all float32.

    grad `(*, out)`, weight `(out, width)`, or, `transposed`, `(width, out)`. Returns, contiguous, dx in the
    shape of x, dw in that of the weight, db `(out,)`; without a weight or a bias, nothing `(0,)` in place of
    dx or db.
    """
    sizes, rows = (bits, levels, group_size, 0), grad.reshape(-1, grad.shape[-1])
    x = torch.ops.mesa_tune.dequantize.default(data, ranges, (rows.shape[0], width), grad.dtype, *sizes)
    dx = grad.new_empty(0)
    if weight is not None:
        dx = grad.contiguous() @ (weight.t() if transposed else weight)
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
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
) -> None:
    """The backward of `softmax(scale q kᵀ + bias) v` into dq, dk and dv where they are wanted; all float32.

    q `(samples, heads, queries, width)`, k, v, and `grad` accordingly, each dense along the width; `bias`, in
    the shape of the scores, may shut out all keys of a query, which then gives nothing. `bits`, from number
    `first_bit` on, say which scores dropout let through, `raised` times as large. P is made whole of as many
    queries as fit the cache.
    """
    shape = (*q.shape[:3], k.shape[2])
    if causal:
        shut = q.new_full(shape[2:], -math.inf).triu_(1)
        bias = shut if bias is None else bias + shut
    scores = scale * (q @ k.mT)
    p = scores.softmax(-1) if bias is None else torch.ops.aten._safe_softmax(scores + bias, -1)
    let = torch.ones((), device=q.device)
    if bits is not None:
        begin, end = first_bit, first_bit + math.prod(shape)
        let = ops.unpack_bits(bits, (8 * bits.numel(),))[begin:end].view(shape) * raised
    ds = torch.ops.aten._softmax_backward_data(grad @ v.mT * let, p, -1, p.dtype) * scale
    for out, made in ((dq, ds @ k), (dk, ds.mT @ q), (dv, (p * let).mT @ grad)):
        if out is not None:
            out.copy_(made)


def _fake_quantize_map(x: Tensor, *arguments: object) -> tuple[Tensor, Tensor]:
    bits, levels, group_size, *noise = arguments[4:]
    return ops.fake_quantize(x, bits, levels, group_size, 0, *noise)  # type: ignore[arg-type]


def _fake_like_factor(data: Tensor, ranges: Tensor, factor: Tensor, *sizes: int) -> Tensor:
    return factor.new_empty(factor.shape)


def _fake_pack(x: Tensor, limit: float) -> Tensor:
    return x.new_empty((x.numel() + 7) // 8, dtype=torch.uint8)


def _fake_gate(grad: Tensor, data: Tensor, slope: float) -> Tensor:
    return grad.new_empty(grad.shape)


def _fake_norm_backward(
    data: Tensor, ranges: Tensor, grad: Tensor, rstd: Tensor, weight: Tensor, *arguments: object
) -> tuple[Tensor, Tensor, Tensor]:
    return grad.new_empty(grad.shape), weight.new_empty(weight.shape), weight.new_empty(weight.shape)


def _fake_batch_norm_backward(
    data: Tensor, ranges: Tensor, grad: Tensor, rstd: Tensor, *arguments: object
) -> tuple[Tensor, Tensor, Tensor]:
    return grad.new_empty(grad.shape), rstd.new_empty(rstd.shape), rstd.new_empty(rstd.shape)


def _fake_cross_entropy_backward(
    data: Tensor,
    ranges: Tensor,
    target: Tensor,
    surplus: Tensor,
    weight: Tensor | None,
    grad: Tensor,
    classes: int,
    *arguments: object,
) -> Tensor:
    return grad.new_empty(*target.shape, classes)


def _fake_linear_backward(
    data: Tensor,
    ranges: Tensor,
    grad: Tensor,
    weight: Tensor | None,
    width: int,
    transposed: bool,
    bias: bool,
    *sizes: int,
) -> tuple[Tensor, Tensor, Tensor]:
    out = grad.shape[-1]
    dx = grad.new_empty(0 if weight is None else (*grad.shape[:-1], width))
    dw = grad.new_empty(width, out) if transposed else grad.new_empty(out, width)
    return dx, dw, grad.new_empty(out if bias else 0)


_KERNELS: ops.Kernels = {
    "quantize_map": (quantize_map, _fake_quantize_map),
    "dequantize_mul": (dequantize_mul, _fake_like_factor),
    "pack_at_most": (pack_at_most, _fake_pack),
    "gate": (gate, _fake_gate),
    "norm_backward": (norm_backward, _fake_norm_backward),
    "batch_norm_backward": (batch_norm_backward, _fake_batch_norm_backward),
    "softmax_backward": (softmax_backward, _fake_like_factor),
    "cross_entropy_backward": (cross_entropy_backward, _fake_cross_entropy_backward),
    "linear_backward": (linear_backward, _fake_linear_backward),
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

    `everywhere`: it has a kernel for every device and any group; else for the CPU, and groups up to a size.
    """

    kernel: Callable[..., Any]
    everywhere: bool = False

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Return what the kernel returns."""
        return self.kernel(*arguments, **keywords)


DEQUANTIZE_MUL = Fused(torch.ops.mesa_tune.dequantize_mul.default, everywhere=True)
NORM_BACKWARD = Fused(torch.ops.mesa_tune.norm_backward.default)
BATCH_NORM_BACKWARD = Fused(torch.ops.mesa_tune.batch_norm_backward.default)
SOFTMAX_BACKWARD = Fused(torch.ops.mesa_tune.softmax_backward.default)
CROSS_ENTROPY_BACKWARD = Fused(torch.ops.mesa_tune.cross_entropy_backward.default)
LINEAR_BACKWARD = Fused(torch.ops.mesa_tune.linear_backward.default)
