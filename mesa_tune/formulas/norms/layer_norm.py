"""Normalizations keep the *normalized* input x̂, encoded, and the reciprocal deviation r, exact (Rule 7).

y = γ x̂ + β with x̂ = r (x − μ);  dγ = Σ g x̂,  dβ = Σ g,  dx = r (ĝ − mean(ĝ) − x̂ mean(ĝ x̂)) with ĝ = γ g.
With x in place of x̂, an error of x would be multiplied by r, which is unbounded. RMSNorm subtracts no mean:
x̂ = r x,  dx = r (ĝ − x̂ mean(ĝ x̂)). Means run over what each norm normalizes together; batch norms are in
`batch_norm`.

A row without deviation (of zeros: padding) has r = ε^-½ and x̂ = 0, and stays so: the r of a later norm may
multiply its gradient, and times zero that is zero.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mesa_tune.engine.call import Call
from mesa_tune.engine.formula import (
    Formula,
    Layers,
    Needs,
    Rebuild,
    References,
    Result,
    Route,
    Routes,
    Static,
    Tensors,
    layout_of,
    wanted,
)
from mesa_tune.engine.packed import Held, Total
from mesa_tune.ops import maps


def layer_norm_forward(
    static: Static, needs: Needs, x: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Result:
    shape, eps, dtype = static
    given = x.contiguous()  # which PyTorch would do as well
    if dtype is not None:
        given, weight, bias = given.to(dtype), _in(dtype, weight), _in(dtype, bias)
    y, mean, rstd = torch.native_layer_norm(given, shape, weight, bias, eps)
    if not (needs[0] or needs[1]):
        return Result(y)
    normalized = _kept(x, given, lambda: (given - mean).mul_(rstd), mean, rstd, math.prod(shape))
    # A bias is only asked for its shape and dtype, which the weight has as well.
    return Result(y, (normalized,), (rstd, weight, bias if weight is None else None))


def _in(dtype: torch.dtype | None, tensor: Tensor | None) -> Tensor | None:
    return tensor if dtype is None or tensor is None else tensor.to(dtype)


def _kept(
    x: Tensor, given: Tensor, make: Callable[[], Tensor], mean: Tensor | None, rstd: Tensor, inner: int
) -> Tensor | maps.Mapped:
    """x̂ in the dtype of x, which is made where `given`, of which it is made, has another one."""
    if not x.dtype == given.dtype == torch.float32:
        return make().to(x.dtype)
    return maps.kept(given, "normalize", make, mean, rstd, inner)


def layer_norm_backward(
    static: Static, needs: Needs, lossy: list[Tensor], exact: tuple[Tensor | None, ...], grad: Tensor
) -> tuple[Tensor | None, ...]:
    shape, eps, dtype = static
    if not lossy:
        return None, None, grad.sum(tuple(range(grad.dim() - len(shape))))
    rstd, weight, bias = exact
    assert rstd is not None
    normalized = lossy[0].masked_fill(_is_even(rstd, eps), 0)
    # In terms of x̂ the statistics are mean 0 and reciprocal deviation 1; the true r scales the result.
    dx, dw, db = torch.ops.aten.native_layer_norm_backward(
        grad,
        normalized if dtype is None else normalized.to(dtype),
        shape,
        torch.zeros_like(rstd),
        torch.ones_like(rstd),
        weight,
        weight if bias is None else bias,
        [needs[0], needs[1], needs[2]],
    )
    return (
        dx.mul_(rstd).to(lossy[0].dtype) if needs[0] else None,
        dw if needs[1] else None,
        db if needs[2] else None,
    )


def _is_even(rstd: Tensor, eps: float | None) -> Tensor:
    """Which rows have no deviation, as far as float32 can tell: their |x̂| is below 2e-3."""
    least = torch.finfo(rstd.dtype).eps if eps is None else eps
    return rstd >= (1 - 1e-6) / math.sqrt(least) if least > 0 else torch.isinf(rstd)


def _packed(backward: Callable[..., tuple[Tensor | None, ...]], centered: bool) -> Callable[..., Any]:
    """`backward` of a norm over the last dimensions on the packed x̂: in one pass, or by rows."""

    def piecewise(
        static: Static, needs: Needs, held: list[Held], exact: tuple[Tensor | None, ...], grad: Tensor
    ) -> tuple[Tensor | None, ...] | None:
        shape, eps, dtype = static
        if not held or dtype is not None:
            return None
        rstd, weight, *_ = exact
        assert rstd is not None
        if rstd.is_cpu and _is_even(rstd, eps).any():
            return _by_rows(backward, static, needs, held[0], exact, grad)
        scale = grad.new_ones(shape) if weight is None else weight
        found = held[0].norm_backward(grad, rstd, scale, centered)
        if found is None:
            return _by_rows(backward, static, needs, held[0], exact, grad)
        return wanted(found, needs)

    return piecewise


def _by_rows(
    backward: Callable[..., tuple[Tensor | None, ...]],
    static: Static,
    needs: Needs,
    held: Held,
    exact: tuple[Tensor | None, ...],
    grad: Tensor,
) -> tuple[Tensor | None, ...] | None:
    """`backward` on some rows of x̂ at a time, each decoded for itself."""
    shape = static[0]
    pieces = held.rows(grad.dtype, len(shape))
    if pieces is None:
        return None
    rstd, *rest = exact
    assert rstd is not None
    rows, deviations = grad.reshape(-1, *shape), rstd.reshape(-1, *[1] * len(shape))
    dx = torch.empty_like(rows)
    sums = [Total() for _ in needs[1:]]
    for first, x in pieces:
        part = slice(first, first + x.shape[0])
        own, *found = backward(static, needs, [x.view(-1, *shape)], (deviations[part], *rest), rows[part])
        for total, more in zip(sums, found, strict=True):
            total.add(more)
        if own is not None:
            dx[part] = own
    return (dx.view(grad.shape) if needs[0] else None, *(total.value for total in sums))


def normalized_output(
    static: Static, lossy: Tensors, exact: Tensors, references: References, inputs: Tensors
) -> Tensor:
    """γ x̂ + β along the last dimensions; without β, one reference."""
    return affine(lossy[0], references, lambda each: each)


def affine(normalized: Tensor, references: References, shaped: Callable[[Tensor], Tensor]) -> Tensor:
    """γ x̂ + β, of γ and β in the shape that `shaped` gives them; what is None has no effect."""
    weight, bias = (*references, None)[:2]
    y = normalized if weight is None else normalized * shaped(weight)
    return y if bias is None else y.add_(shaped(bias))


def by_channel(
    static: Static, lossy: Tensors, exact: Tensors, references: References, inputs: Tensors
) -> Tensor:
    """γ x̂ + β by channel, the second dimension."""
    rest = lossy[0].dim() - 2
    return affine(lossy[0], references, lambda each: each.view([1, -1] + [1] * rest))


def _normalizes(static: Static, needs: Needs) -> bool:
    return needs[0] or needs[1]


LAYER_NORM = Formula(
    "layer_norm",
    layer_norm_forward,
    layer_norm_backward,
    "the normalized input; exact: its reciprocal deviations",
    piecewise=_packed(layer_norm_backward, centered=True),
    rebuild=Rebuild(normalized_output, references=(1, 2), when=_normalizes),
)


def rms_norm_forward(static: Static, needs: Needs, x: Tensor, weight: Tensor | None) -> Result:
    shape, eps, dtype = static
    given, weight = _in(dtype, x), _in(dtype, weight)
    assert given is not None
    alike = weight is None or weight.dtype == given.dtype
    y, rstd = torch.ops.aten._fused_rms_norm(given, shape, weight if alike else None, eps)
    if not alike:
        y = torch.rms_norm(given, shape, weight, eps)
    normalized = _kept(x, given, lambda: given * rstd, None, rstd, math.prod(shape))
    return Result(y, lossy=(normalized,), exact=(rstd, weight))


def rms_norm_backward(
    static: Static, needs: Needs, lossy: list[Tensor], exact: tuple[Tensor | None, ...], grad: Tensor
) -> tuple[Tensor | None, ...]:
    shape, eps, _ = static
    rstd, weight = exact
    assert rstd is not None
    rows, inner = tuple(range(grad.dim() - len(shape))), tuple(range(-len(shape), 0))
    normalized = lossy[0].to(rstd.dtype).masked_fill(_is_even(rstd, eps), 0)
    wide = grad.to(rstd.dtype)
    dx = dw = None
    if needs[1]:
        assert weight is not None
        dw = (wide * normalized).sum(rows).to(weight.dtype) if rows else (wide * normalized).to(weight.dtype)
    if needs[0]:
        scaled = wide if weight is None else wide * weight
        projection = (scaled * normalized).mean(inner, keepdim=True)
        dx = ((scaled - normalized * projection) * rstd).to(lossy[0].dtype)
    return dx, dw


RMS_NORM = Formula(
    "rms_norm",
    rms_norm_forward,
    rms_norm_backward,
    LAYER_NORM.keeps,
    piecewise=_packed(rms_norm_backward, centered=False),
    rebuild=Rebuild(normalized_output, references=(1,)),
)


def group_norm_forward(
    static: Static, needs: Needs, x: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Result:
    groups, eps, dtype = static
    given, weight, bias = _in(dtype, x), _in(dtype, weight), _in(dtype, bias)
    assert given is not None
    given = given.contiguous(memory_format=layout_of(given) if x.device.type == "cpu" else _PLAIN)
    y, mean, rstd = torch.native_group_norm(given, weight, bias, *_sizes(given), groups, eps)
    if not (needs[0] or needs[1]):
        return Result(y)
    inner = given.numel() // max(1, rstd.numel())
    normalized = _kept(x, given, lambda: _normalized_groups(given, mean, rstd), mean, rstd, inner)
    return Result(y, lossy=(normalized,), exact=(rstd, weight))


def _normalized_groups(x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    apart: Tensor = x.unflatten(1, (rstd.shape[1], -1))
    return (apart - _by_group(mean, apart)).mul_(_by_group(rstd, apart)).flatten(1, 2)


def group_norm_backward(
    static: Static, needs: Needs, lossy: list[Tensor], exact: tuple[Tensor | None, ...], grad: Tensor
) -> tuple[Tensor | None, ...]:
    groups, _, dtype = static
    if not lossy:
        return None, None, grad.sum([axis for axis in range(grad.dim()) if axis != 1])
    rstd, weight = exact
    assert rstd is not None
    normalized = lossy[0] if dtype is None else lossy[0].to(dtype)
    dx, dw, db = torch.ops.aten.native_group_norm_backward(
        grad.contiguous(),
        normalized.contiguous(),
        torch.zeros_like(rstd),
        torch.ones_like(rstd),
        weight,
        *_sizes(grad),
        groups,
        [needs[0], needs[1], needs[2]],
    )
    if needs[0]:
        apart = dx.unflatten(1, (groups, -1))
        dx = apart.mul_(_by_group(rstd, apart)).flatten(1, 2).to(lossy[0].dtype)
    return dx if needs[0] else None, dw if needs[1] else None, db if needs[2] else None


def group_norm_piecewise(
    static: Static, needs: Needs, held: list[Held], exact: tuple[Tensor | None, ...], grad: Tensor
) -> tuple[Tensor | None, ...] | None:
    """Some samples at a time."""
    pieces = held[0].parts_of(grad.dtype) if held and static[2] is None else None
    if pieces is None:
        return None
    rstd, weight = exact
    assert rstd is not None
    dx = torch.empty_like(grad) if needs[0] else None
    dw, db = Total(), Total()
    for part, x in pieces:
        own, more_dw, more_db = group_norm_backward(static, needs, [x], (rstd[part], weight), grad[part])
        dw.add(more_dw)
        db.add(more_db)
        if dx is not None and own is not None:
            dx[part] = own
    return dx, dw.value, db.value


_PLAIN = torch.contiguous_format


def _sizes(x: Tensor) -> tuple[int, int, int]:
    """Samples, channels, and elements a channel."""
    return x.shape[0], x.shape[1], math.prod(x.shape[2:])


def _by_group(values: Tensor, apart: Tensor) -> Tensor:
    return values.view(*values.shape, *[1] * (apart.dim() - 2))


GROUP_NORM = Formula(
    "group_norm",
    group_norm_forward,
    group_norm_backward,
    LAYER_NORM.keeps,
    piecewise=group_norm_piecewise,
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
    **unknown: Any,
) -> Any:
    """`F.layer_norm`; under CUDA autocast in float32, as autocast's list says."""
    if unknown:
        return call.refuse(f"layer_norm has no formula for {sorted(unknown)}")
    if kept_anyway(call, input):
        return call.plain()
    return call.apply(LAYER_NORM, (tuple(normalized_shape), eps, _wide(input)), input, weight, bias)


def rms_norm(
    call: Call,
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    eps: float | None = None,
    **unknown: Any,
) -> Any:
    """`F.rms_norm`; under CUDA autocast in float32, as autocast's list says."""
    if unknown:
        return call.refuse(f"rms_norm has no formula for {sorted(unknown)}")
    if kept_anyway(call, input):
        return call.plain()
    return call.apply(RMS_NORM, (tuple(normalized_shape), eps, _wide(input)), input, weight)


def group_norm(
    call: Call,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
    **unknown: Any,
) -> Any:
    """`F.group_norm`: input `(n, channels, *)`; under CUDA autocast in float32."""
    if unknown:
        return call.refuse(f"group_norm has no formula for {sorted(unknown)}")
    if kept_anyway(call, input) or not _divides(num_groups, input):
        return call.plain()
    return call.apply(GROUP_NORM, (num_groups, eps, _wide(input)), input, weight, bias)


def _divides(groups: int, input: Tensor) -> bool:
    """False where `F.group_norm` raises: it then does so by itself."""
    if input.dim() < 2 or groups < 1 or input.shape[1] % groups:
        return False
    return input.numel() > groups * input.shape[0] or input.shape[0] > 1


def _wide(input: Tensor) -> torch.dtype | None:
    return torch.float32 if input.is_cuda and torch.is_autocast_enabled("cuda") else None


def kept_anyway(call: Call, input: Tensor) -> bool:
    """Whether PyTorch's own copy costs nothing: x̂ would be one tensor more."""
    return call.is_static(input) or call.small(input)


_LAYER_NORM = Route("layer_norm", "layernorm", layer_norm)
_RMS_NORM = Route("rms_norm", "rmsnorm", rms_norm)
_GROUP_NORM = Route("group_norm", "groupnorm", group_norm)
ROUTES: Routes = {
    F.layer_norm: _LAYER_NORM,
    torch.layer_norm: _LAYER_NORM,
    F.rms_norm: _RMS_NORM,
    torch.rms_norm: _RMS_NORM,
    F.group_norm: _GROUP_NORM,
    torch.group_norm: _GROUP_NORM,
}
LAYERS: Layers = {nn.LayerNorm: F.layer_norm, nn.RMSNorm: F.rms_norm, nn.GroupNorm: F.group_norm}
