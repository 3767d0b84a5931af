"""Norms composed by hand: x r with r = rsqrt(mean(x²) + ε), one number per row; how they follow Rule 7.

Such a number r (a statistic) is small and saved exactly: rounded, its error would be multiplied by all of x̂,
and its derivative by r³. Saved: the x that it multiplies, and that is squared, packed. The error of x is
multiplied by r as well, which is harmless if the error scales with the row. So the groups that share a scale
never reach over rows (the last dimension): with groups of 256 over rows of 32, rows a thousand times smaller
than their neighbours made the error 10⁶ at 4 bits; aligned, it is that of `rms_norm`.
"""

from typing import Any

from torch import Tensor

from mesa_tune.engine.call import Call
from mesa_tune.engine.formula import (
    Formula,
    Grads,
    Ingredients,
    Needs,
    Rebuild,
    Result,
    Routes,
    Saved,
    Static,
)
from mesa_tune.engine.tensors import gathered, like

REPEATS = 8
"""A statistic is repeated at least so often: saved exactly it takes an eighth of a copy of x at most."""


def aligned(call: Call, x: Tensor) -> Call:
    """Return `call` with groups that end where rows of `x` do; groups by channels or heads stay."""
    if x.dim() and call.spec.group_size:
        call.spec = call.spec.within(x.shape[-1])
    return call


def is_repeated(factor: Tensor, x: Tensor) -> bool:
    """Return whether a product with `x` repeats `factor` often, and `x` not at all."""
    small = factor.dim() == x.dim() and factor.numel() * REPEATS <= x.numel()
    return small and all(own in (1, size) for own, size in zip(factor.shape, x.shape, strict=True))


def forward(static: Static, needs: Needs, x: Tensor, statistic: Tensor) -> Result:
    return Result(x * statistic, (x,) if needs[1] else (), (statistic if needs[0] else None,))


def backward(saved: Saved, grad: Tensor) -> Grads:
    (x, statistic), needs, lossy, (factor,) = saved
    dx = None if factor is None else gathered(grad * factor, x)
    return dx, gathered(grad * lossy[0].whole(), statistic) if needs[1] else None


def scaled(ingredients: Ingredients) -> Tensor:
    """Return x times a statistic by row, which exists anyway."""
    (statistic,) = ingredients.references
    assert statistic is not None
    return ingredients.lossy[0] * statistic


SCALE = Formula(
    "scale",
    forward,
    backward,
    "the tensor that a statistic multiplies; exact: the statistic",
    rebuild=Rebuild(scaled, saved_is_input=True, references=(1,), when=lambda static, needs: needs[1]),
)


def scale(call: Call, x: Tensor, statistic: Tensor) -> Any:
    """`x * statistic`, where the latter is small beside the former."""
    if not (statistic.requires_grad and call.gains(x)) or call.is_static(x):
        return call.plain()
    return aligned(call, x).apply(SCALE, (like(x), like(statistic)), x, statistic)


ROUTES: Routes = {}
