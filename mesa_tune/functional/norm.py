"""Normalizations keep the *normalized* input x̂, encoded, and the reciprocal deviation r, exact (Rule 7).

y = γ x̂ + β with x̂ = r (x − μ);  dγ = Σ g x̂,  dβ = Σ g,  dx = r (ĝ − mean(ĝ) − x̂ mean(ĝ x̂)) with ĝ = γ g.
With x in place of x̂, an error of x would be multiplied by r, which is unbounded.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mesa_tune.functional.formula import Formula, Needs, Result, Static

if TYPE_CHECKING:
    from mesa_tune.functional.call import Call


def layer_norm_forward(
    static: Static, needs: Needs, x: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Result:
    shape, eps, dtype = static
    given = x if dtype is None else x.to(dtype)
    y, mean, rstd = torch.native_layer_norm(given, shape, weight, bias, eps)
    if not (needs[0] or needs[1]):
        return Result(y)
    normalized = ((given - mean) * rstd).to(given.dtype)
    return Result(y, lossy=(normalized,), exact=(rstd, weight, bias))


def layer_norm_backward(
    static: Static, needs: Needs, lossy: list[Tensor], exact: tuple[Tensor | None, ...], grad: Tensor
) -> tuple[Tensor | None, ...]:
    shape, _eps, _dtype = static
    if not lossy:
        return None, None, grad.sum(tuple(range(grad.dim() - len(shape))))
    rstd, weight, bias = exact
    assert rstd is not None
    # In terms of x̂ the statistics are mean 0 and reciprocal deviation 1; the true r scales the result.
    dx, dw, db = torch.ops.aten.native_layer_norm_backward(
        grad,
        lossy[0],
        shape,
        torch.zeros_like(rstd),
        torch.ones_like(rstd),
        weight,
        bias,
        [needs[0], needs[1], needs[2]],
    )
    return (
        (dx * rstd).to(grad.dtype) if needs[0] else None,
        dw if needs[1] else None,
        db if needs[2] else None,
    )


LAYER_NORM = Formula(
    layer_norm_forward, layer_norm_backward, "the normalized input; exact: its reciprocal deviations"
)


def layer_norm(
    call: "Call",
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Any:
    """`F.layer_norm`; under CUDA autocast in float32, as autocast's list says."""
    wide = torch.float32 if input.is_cuda and torch.is_autocast_enabled("cuda") else None
    return call.apply("layer_norm", (tuple(normalized_shape), eps, wide), input, weight, bias)
