"""Norms composed by hand: x r with r = rsqrt(mean(x²) + ε), one number a row; the way to Rule 7 for them.

Such a number r (a statistic) is small and stays exact: rounded, its error would be multiplied by all of x̂,
and its derivative by r³. The x that it multiplies, and that is squared, is kept as it is; its error is
multiplied by r as well, which is harmless if the error scales with the row. So the groups that share a scale
never reach across rows (the last dimension): with groups of 256 over rows of 32, rows a thousand times
smaller than their neighbours made the error 10⁶ at 4 bits; aligned, it is that of `rms_norm`.
"""

from typing import Any

import torch
from torch import Tensor

from mesa_tune.engine.call import Call
from mesa_tune.engine.formula import (
    Formula,
    Layers,
    Needs,
    Rebuild,
    References,
    Result,
    Routes,
    Static,
    Tensors,
)

REPEATS = 8
"""A statistic is repeated at least so often: kept exact it costs an eighth of a copy at most."""


def aligned(call: Call, x: Tensor) -> Call:
    """`call` with groups that end where rows of `x` do; groups by channels or heads stay."""
    return call.within(x.shape[-1]) if x.dim() and call.spec.group_size else call


def is_repeated(factor: Tensor, x: Tensor) -> bool:
    """Whether a product with `x` repeats `factor` often, and `x` not at all."""
    small = factor.dim() == x.dim() and factor.numel() * REPEATS <= x.numel()
    return small and all(own in (1, size) for own, size in zip(factor.shape, x.shape, strict=True))


def forward(static: Static, needs: Needs, x: Tensor, statistic: Tensor) -> Result:
    lossy = (x,) if needs[1] else ()
    return Result(torch.mul(x, statistic), lossy, exact=(statistic if needs[0] else None,))


def backward(
    static: Static, needs: Needs, lossy: list[Tensor], exact: tuple[Tensor | None, ...], grad: Tensor
) -> tuple[Tensor | None, ...]:
    (x_shape, x_dtype), (shape, dtype) = static
    dx = ds = None
    if needs[0]:
        assert exact[0] is not None
        dx = (grad * exact[0]).sum_to_size(x_shape).to(x_dtype)
    if needs[1]:
        ds = (grad * lossy[0]).sum_to_size(shape).to(dtype)
    return dx, ds


def scaled(static: Static, lossy: Tensors, exact: Tensors, references: References, inputs: Tensors) -> Tensor:
    """x times a statistic by row, which is there anyway."""
    (statistic,) = references
    assert statistic is not None
    return lossy[0] * statistic


def _keeps_x(static: Static, needs: Needs) -> bool:
    return needs[1]


SCALE = Formula(
    "scale",
    forward,
    backward,
    "the tensor that a statistic multiplies; exact: the statistic",
    rebuild=Rebuild(scaled, kept_is_input=True, references=(1,), when=_keeps_x),
)


def scale(call: Call, x: Tensor, statistic: Tensor) -> Any:
    """`x * statistic`, where the latter is small beside the former."""
    if not statistic.requires_grad or call.small(x) or call.is_static(x):
        return call.plain()
    static = ((tuple(x.shape), x.dtype), (tuple(statistic.shape), statistic.dtype))
    return aligned(call, x).apply(SCALE, static, x, statistic)


ROUTES: Routes = {}
LAYERS: Layers = {}
