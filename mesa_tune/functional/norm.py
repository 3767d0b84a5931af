"""Normalizations keep the *normalized* input x̂, encoded, and the reciprocal deviation r, exact (Rule 7).

y = γ x̂ + β with x̂ = r (x − μ);  dγ = Σ g x̂,  dβ = Σ g,  dx = r (ĝ − mean(ĝ) − x̂ mean(ĝ x̂)) with ĝ = γ g.
With x in place of x̂, an error of x would be multiplied by r, which is unbounded. A batch norm with fixed
statistics has dx = r ĝ, and keeps x̂ only if γ wants a gradient.
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mesa_tune.functional.formula import Formula, Layers, Needs, Result, Route, Routes, Static, layout_of

if TYPE_CHECKING:
    from mesa_tune.functional.call import Call


def layer_norm_forward(
    static: Static, needs: Needs, x: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Result:
    shape, eps, dtype = static
    given, weight, bias = _in(dtype, x), _in(dtype, weight), _in(dtype, bias)
    assert given is not None
    y, mean, rstd = torch.native_layer_norm(given, shape, weight, bias, eps)
    if not (needs[0] or needs[1]):
        return Result(y)
    normalized = (given - mean).mul_(rstd).to(x.dtype)
    return Result(y, lossy=(normalized,), exact=(rstd, weight, bias))


def _in(dtype: torch.dtype | None, tensor: Tensor | None) -> Tensor | None:
    return tensor if dtype is None or tensor is None else tensor.to(dtype)


def layer_norm_backward(
    static: Static, needs: Needs, lossy: list[Tensor], exact: tuple[Tensor | None, ...], grad: Tensor
) -> tuple[Tensor | None, ...]:
    shape, _, dtype = static
    if not lossy:
        return None, None, grad.sum(tuple(range(grad.dim() - len(shape))))
    rstd, weight, bias = exact
    assert rstd is not None
    # In terms of x̂ the statistics are mean 0 and reciprocal deviation 1; the true r scales the result.
    dx, dw, db = torch.ops.aten.native_layer_norm_backward(
        grad,
        lossy[0] if dtype is None else lossy[0].to(dtype),
        shape,
        torch.zeros_like(rstd),
        torch.ones_like(rstd),
        weight,
        bias,
        [needs[0], needs[1], needs[2]],
    )
    return (
        dx.mul_(rstd).to(lossy[0].dtype) if needs[0] else None,
        dw if needs[1] else None,
        db if needs[2] else None,
    )


LAYER_NORM = Formula(
    layer_norm_forward, layer_norm_backward, "the normalized input; exact: its reciprocal deviations"
)


def batch_norm_forward(
    static: Static,
    needs: Needs,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
) -> Result:
    training, momentum, eps, _ = static
    y, mean, rstd, _, _ = torch.ops.aten._batch_norm_impl_index(
        x, weight, bias, running_mean, running_var, training, momentum, eps, torch.backends.cudnn.enabled
    )
    if not (needs[0] or needs[1]):
        return Result(y)
    if not training:
        assert running_mean is not None
        assert running_var is not None
        mean, rstd = running_mean, (running_var + eps).rsqrt()
    if not (training or needs[1]):
        return Result(y, exact=(rstd, weight))
    normalized = (x - _by_channel(mean, x)).mul_(_by_channel(rstd, x)).to(x.dtype)
    return Result(y, lossy=(normalized,), exact=(rstd, weight))


def batch_norm_backward(
    static: Static, needs: Needs, lossy: list[Tensor], exact: tuple[Tensor | None, ...], grad: Tensor
) -> tuple[Tensor | None, ...]:
    training, _, _, layout = static
    rest = (None, None)
    if not lossy:
        db = grad.sum([axis for axis in range(grad.dim()) if axis != 1]) if needs[2] else None
        return (_scaled(grad, exact) if needs[0] else None, None, db, *rest)
    rstd, weight = exact
    assert rstd is not None
    zero, one = torch.zeros_like(rstd), torch.ones_like(rstd)
    dx, dw, db = torch.ops.aten.native_batch_norm_backward(
        grad,
        lossy[0].contiguous(memory_format=layout),
        weight,
        None if training else zero,
        None if training else one,
        zero if training else None,
        one if training else None,
        training,
        0.0,
        [needs[0], needs[1], needs[2]],
    )
    dx = dx.mul_(_by_channel(rstd, dx)) if needs[0] else None
    return (dx, dw if needs[1] else None, db if needs[2] else None, *rest)


def _scaled(grad: Tensor, exact: tuple[Tensor | None, ...]) -> Tensor:
    rstd, weight = exact
    assert rstd is not None
    scale = rstd if weight is None else rstd * weight
    return (grad * _by_channel(scale, grad)).to(grad.dtype)


def _by_channel(values: Tensor, x: Tensor) -> Tensor:
    return values.view([1, -1] + [1] * (x.dim() - 2))


BATCH_NORM = Formula(
    batch_norm_forward, batch_norm_backward, "the normalized input; exact: reciprocal deviations by channel"
)


def layer_norm(
    call: "Call",
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
    if _kept_anyway(call, input):
        return call.plain()
    wide = torch.float32 if input.is_cuda and torch.is_autocast_enabled("cuda") else None
    return call.apply("layer_norm", (tuple(normalized_shape), eps, wide), input, weight, bias)


def batch_norm(
    call: "Call",
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    **unknown: Any,
) -> Any:
    """`F.batch_norm`: input `(n, channels, *)`; updates the running statistics as PyTorch does."""
    if unknown or input.dim() < 2:
        return call.refuse("batch_norm has a formula only for inputs (n, channels, *)")
    if _kept_anyway(call, input) or not _valid(input, training, running_mean, running_var, eps):
        return call.plain()
    static = (training, momentum, eps, layout_of(input))
    return call.apply("batch_norm", static, input, weight, bias, running_mean, running_var)


def _valid(input: Tensor, training: bool, mean: Tensor | None, var: Tensor | None, eps: float) -> bool:
    """False where `F.batch_norm` raises: it then does so by itself."""
    if training:
        return input.numel() > input.shape[1] and eps > 0
    return mean is not None and var is not None and eps >= 0


def _kept_anyway(call: "Call", input: Tensor) -> bool:
    """Whether PyTorch's own copy costs nothing: x̂ would be one tensor more."""
    return call.is_static(input) or call.small(input)


FORMULAS = {"batch_norm": BATCH_NORM, "layer_norm": LAYER_NORM}
_LAYER_NORM = Route("layer_norm", "layernorm", layer_norm)
ROUTES: Routes = {
    F.batch_norm: Route("batch_norm", "bn", batch_norm),
    F.layer_norm: _LAYER_NORM,
    torch.layer_norm: _LAYER_NORM,
}
LAYERS: Layers = {nn.modules.batchnorm._BatchNorm: F.batch_norm, nn.LayerNorm: F.layer_norm}
