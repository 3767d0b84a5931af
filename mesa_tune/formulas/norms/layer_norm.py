"""Norms over rows and groups. Saved: the *normalized* input x̂, packed, and the reciprocal deviation r, exact.

y = γ x̂ + β with x̂ = r (x − μ);  dγ = Σ g x̂,  dβ = Σ g,  dx = r (ĝ − mean(ĝ) − x̂ mean(ĝ x̂)) with ĝ = γ g.
With x in place of x̂, an error of x would be multiplied by r, which is unbounded (Rule 7). RMSNorm subtracts
no mean: x̂ = r x,  dx = r (ĝ − x̂ mean(ĝ x̂)). Means run over what each norm normalizes together; batch norms
are in `batch_norm`.

A row without deviation (of zeros: padding) has r = ε^-½ and x̂ = 0, and stays so: the r of a later norm may
multiply its gradient, and times zero that is zero.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mesa_tune.engine.call import Call
from mesa_tune.engine.formula import (
    Formula,
    Grads,
    Ingredients,
    Layers,
    Needs,
    Rebuild,
    Result,
    Route,
    Routes,
    Saved,
    Static,
)
from mesa_tune.engine.saved import Total
from mesa_tune.engine.tensors import cast, layout_of, scaled_rows, wanted
from mesa_tune.ops import maps
from mesa_tune.ops.devices import on_cpu
from mesa_tune.ops.fused import NORM_BACKWARD

Gradients = Callable[[Saved, Tensor, Tensor, Tensor], Grads]
"""The gradients of a norm from `(saved, x̂, r, grad)`; the tensors may be some rows or samples."""


def layer_norm_forward(
    static: Static, needs: Needs, x: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Result:
    shape, eps, dtype = static
    source, weight, bias = cast(x.contiguous(), dtype), _cast(weight, dtype), _cast(bias, dtype)
    y, mean, rstd = torch.native_layer_norm(source, shape, weight, bias, eps)
    if not (needs[0] or needs[1]):
        return Result(y)
    normalized = normalized_input(
        x,
        maps.Deferred(source, "normalize", lambda: (source - mean).mul_(rstd), mean, rstd, math.prod(shape)),
        lambda: torch.native_layer_norm(source, shape, None, None, eps)[0],
    )
    # A bias is only asked for its shape and dtype, which the weight has as well.
    return Result(y, (normalized,), (rstd, weight, bias if weight is None else None))


def rms_norm_forward(static: Static, needs: Needs, x: Tensor, weight: Tensor | None) -> Result:
    shape, eps, dtype = static
    source, weight = cast(x, dtype), _cast(weight, dtype)
    same_dtype = weight is None or weight.dtype == source.dtype
    y, rstd = torch.ops.aten._fused_rms_norm(source, shape, weight if same_dtype else None, eps)
    if not same_dtype:
        y = torch.rms_norm(source, shape, weight, eps)

    def make() -> Tensor:
        return torch.mul(source, rstd)

    normalized = normalized_input(
        x, maps.Deferred(source, "normalize", make, None, rstd, math.prod(shape)), make
    )
    return Result(y, (normalized,), (rstd, weight))


def _cast(tensor: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    return None if tensor is None else cast(tensor, dtype)


def normalized_input(
    x: Tensor, deferred: maps.Deferred, make: Callable[[], Tensor]
) -> Tensor | maps.Deferred:
    """Return x̂ in the dtype of x: `deferred` where x is what its kernel reads, else what `make` returns.

    Of 16 bits, that is a kernel of PyTorch: no copy in float32, and no rounded statistics.
    """
    if x.dtype == deferred.source.dtype == torch.float32:
        return deferred.if_dense()
    if x.dtype == deferred.source.dtype and deferred.is_dense:
        return deferred._replace(make=lambda: make().to(x.dtype))
    return make().to(x.dtype)


def rows_backward(gradients: Gradients, centered: bool, saved: Saved, grad: Tensor) -> Grads:
    """Return the gradients of a norm over rows: in one pass over the packed x̂, from some rows of a large x̂ at
    a time, or from all of it.
    """
    (shape, eps, dtype), needs, lossy, exact = saved
    if not lossy:
        return None, None, grad.sum(tuple(range(grad.dim() - len(shape))))
    x, (rstd, weight, *_) = lossy[0], exact
    if x.codec is None or dtype is not None:
        return gradients(saved, x.whole(), rstd, grad)
    if x.dtype == grad.dtype:
        scale = grad.new_ones(shape) if weight is None else weight
        grads = x.by_rows(NORM_BACKWARD, grad, rstd, scale, centered, _constant_from(rstd, eps))
        if grads is not None:
            return wanted(grads, needs)
    pieces = x.rows(grad.dtype, len(shape))
    if pieces is None:
        return gradients(saved, x.whole(), rstd, grad)
    slices = ((slice(first, first + part.shape[0]), part.view(-1, *shape)) for first, part in pieces)
    rows, deviations = grad.reshape(-1, *shape), rstd.reshape(-1, *[1] * len(shape))
    dx, *others = _in_slices(gradients, saved, slices, deviations, rows)
    return None if dx is None else dx.view(grad.shape), *others


def _in_slices(
    gradients: Gradients, saved: Saved, slices: Iterable[tuple[slice, Tensor]], rstd: Tensor, grad: Tensor
) -> Grads:
    """Return the gradients of slices of x̂ along the first dimension: one for the input, sums for others."""
    dx = torch.empty_like(grad) if saved.needs[0] else None
    sums = [Total() for _ in saved.needs[1:]]
    for part, x in slices:
        own, *others = gradients(saved, x, rstd[part], grad[part])
        for total, other in zip(sums, others, strict=True):
            total.add(other)
        if dx is not None and own is not None:
            dx[part] = own
    return dx, *[total.value for total in sums]


def _constant_from(rstd: Tensor, eps: float | None) -> float:
    """Return the `rstd` from which rows have no deviation as far as float32 can tell: |x̂| is below 2e-3."""
    least = torch.finfo(rstd.dtype).eps if eps is None else eps
    return (1 - 1e-6) / math.sqrt(least) if least > 0 else math.inf


def _layer_norm_gradients(saved: Saved, x: Tensor, rstd: Tensor, grad: Tensor) -> Grads:
    (shape, eps, dtype), needs, _, (_, weight, bias) = saved
    # In terms of x̂ the statistics are mean 0 and reciprocal deviation 1; the true r scales the result.
    dx, dw, db = torch.ops.aten.native_layer_norm_backward(
        grad,
        cast(x.masked_fill(rstd >= _constant_from(rstd, eps), 0), dtype),
        shape,
        torch.zeros_like(rstd),
        torch.ones_like(rstd),
        weight,
        weight if bias is None else bias,
        list(needs),
    )
    if needs[0]:
        dx = scaled_rows(dx, rstd).to(x.dtype)
    return wanted((dx, dw, db), needs)


def _rms_norm_gradients(saved: Saved, x: Tensor, rstd: Tensor, grad: Tensor) -> Grads:
    """Without a fused kernel: PyTorch has none for the CPU."""
    (shape, eps, _), needs, _, (_, weight) = saved
    rows, inner = tuple(range(grad.dim() - len(shape))), tuple(range(-len(shape), 0))
    normalized = x.to(rstd.dtype).masked_fill(rstd >= _constant_from(rstd, eps), 0)
    wide = grad.to(rstd.dtype)
    dx = dw = None
    if needs[1]:
        product = wide * normalized
        dw = (product.sum(rows) if rows else product).to(weight.dtype)
    if needs[0]:
        scaled = wide if weight is None else wide * weight
        projection = (scaled * normalized).mean(inner, keepdim=True)
        dx = ((scaled - normalized * projection) * rstd).to(x.dtype)
    return dx, dw


def normalized_output(ingredients: Ingredients) -> Tensor:
    """Return γ x̂ + β along the last dimensions; without β, one reference."""
    return _affine(ingredients, ingredients.static[0])


def by_channel(ingredients: Ingredients) -> Tensor:
    """Return γ x̂ + β by channel, the second dimension."""
    return _affine(ingredients, [-1] + [1] * (ingredients.lossy[0].dim() - 2))


def _affine(ingredients: Ingredients, shape: Sequence[int]) -> Tensor:
    """Return γ x̂ + β, of γ and β in this shape; what is None has no effect."""
    (y,), (weight, bias) = ingredients.lossy, (*ingredients.references, None)[:2]
    y = y if weight is None else y * weight.view(shape)
    return y if bias is None else y.add_(bias.view(shape))


def _normalizes(static: Static, needs: Needs) -> bool:
    return needs[0] or needs[1]


LAYER_NORM = Formula(
    "layer_norm",
    layer_norm_forward,
    partial(rows_backward, _layer_norm_gradients, True),
    "the normalized input; exact: its reciprocal deviations",
    rebuild=Rebuild(normalized_output, references=(1, 2), when=_normalizes),
)
RMS_NORM = Formula(
    "rms_norm",
    rms_norm_forward,
    partial(rows_backward, _rms_norm_gradients, False),
    LAYER_NORM.saves,
    rebuild=Rebuild(normalized_output, references=(1,)),
)


def group_norm_forward(
    static: Static, needs: Needs, x: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Result:
    groups, eps, dtype = static
    source, weight, bias = cast(x, dtype), _cast(weight, dtype), _cast(bias, dtype)
    layout = layout_of(source) if on_cpu(x) else torch.contiguous_format
    source = source.contiguous(memory_format=layout)
    y, mean, rstd = torch.native_group_norm(source, weight, bias, *_sizes(source), groups, eps)
    if not (needs[0] or needs[1]):
        return Result(y)

    def make() -> Tensor:
        apart: Tensor = source.unflatten(1, (groups, -1))
        return (apart - _by_group(mean, apart)).mul_(_by_group(rstd, apart)).flatten(1, 2)

    normalized = normalized_input(
        x,
        maps.Deferred(source, "normalize", make, mean, rstd, source.numel() // rstd.numel()),
        lambda: torch.native_group_norm(source, None, None, *_sizes(source), groups, eps)[0],
    )
    return Result(y, (normalized,), (rstd, weight))


def group_norm_backward(saved: Saved, grad: Tensor) -> Grads:
    """Return the gradients from some samples of a large x̂ at a time, or from all of it."""
    if not saved.lossy:
        return None, None, grad.sum([axis for axis in range(grad.dim()) if axis != 1])
    x, rstd = saved.lossy[0], saved.exact[0]
    slices = x.slices(grad.dtype) if saved.static[2] is None else None
    if slices is None:
        return _group_norm_gradients(saved, x.whole(), rstd, grad)
    return _in_slices(_group_norm_gradients, saved, slices, rstd, grad)


def _group_norm_gradients(saved: Saved, x: Tensor, rstd: Tensor, grad: Tensor) -> Grads:
    (groups, _, dtype), needs, _, (_, weight) = saved
    dx, dw, db = torch.ops.aten.native_group_norm_backward(
        grad.contiguous(),
        cast(x, dtype).contiguous(),
        torch.zeros_like(rstd),
        torch.ones_like(rstd),
        weight,
        *_sizes(grad),
        groups,
        list(needs),
    )
    if needs[0]:
        dx = scaled_rows(dx, rstd).to(x.dtype)
    return wanted((dx, dw, db), needs)


def _sizes(x: Tensor) -> tuple[int, int, int]:
    """Return the numbers of samples, of channels, and of elements per channel."""
    return x.shape[0], x.shape[1], math.prod(x.shape[2:])


def _by_group(values: Tensor, apart: Tensor) -> Tensor:
    return values.view(*values.shape, *[1] * (apart.dim() - 2))


GROUP_NORM = Formula(
    "group_norm",
    group_norm_forward,
    group_norm_backward,
    LAYER_NORM.saves,
    rebuild=Rebuild(by_channel, references=(1, 2), when=_normalizes),
)


def layer_norm(
    call: Call,
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Any:
    """Route of `F.layer_norm`; under CUDA autocast in float32, as autocast's list says."""
    return _apply(call, LAYER_NORM, tuple(normalized_shape), eps, input, weight, bias)


def rms_norm(
    call: Call, input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Any:
    """Route of `F.rms_norm`; under CUDA autocast in float32, as autocast's list says."""
    return _apply(call, RMS_NORM, tuple(normalized_shape), eps, input, weight)


def group_norm(
    call: Call,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Any:
    """Route of `F.group_norm`: input `(n, channels, *)`; under CUDA autocast in float32."""
    fits = input.dim() > 1 and num_groups > 0 and input.shape[1] % num_groups == 0
    if not fits or (input.shape[0] <= 1 and input.numel() <= num_groups * input.shape[0]):
        return call.plain()  # which raises
    return _apply(call, GROUP_NORM, num_groups, eps, input, weight, bias)


def _apply(
    call: Call, formula: Formula, sizes: Any, eps: float | None, x: Tensor, *others: Tensor | None
) -> Any:
    if not saves_less(call, x):
        return call.plain()
    dtype = torch.float32 if x.is_cuda and torch.is_autocast_enabled("cuda") else None
    return call.apply(formula, (sizes, eps, dtype), x, *others)


def saves_less(call: Call, input: Tensor) -> bool:
    """Return whether x̂ takes less than what PyTorch saves, which is nothing where the input exists anyway."""
    return not call.is_static(input) and call.gains(input)


ROUTES: Routes = {
    **Route("layer_norm", "layernorm", layer_norm).spelled("layer_norm", owners=(F, torch)),
    **Route("rms_norm", "rmsnorm", rms_norm).spelled("rms_norm", owners=(F, torch)),
    **Route("group_norm", "groupnorm", group_norm).spelled("group_norm", owners=(F, torch)),
}
LAYERS: Layers = {nn.LayerNorm: F.layer_norm, nn.RMSNorm: F.rms_norm, nn.GroupNorm: F.group_norm}
