"""Variance and standard deviation, σ² = Σ(x − mean)² / (N − c).

Saved are the deviations over σ, z = (x − mean) / σ, encoded, and σ, exactly (Rule 7); dx = g z / (N − c) for
σ, and 2 σ times that for σ². PyTorch saves x: rounded together with rows that vary more, a row would get
their rounding, and for σ divided by its own.
"""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mesa_tune.engine.call import Call
from mesa_tune.engine.formula import Formula, Layers, Needs, Result, Route, Routes, Static
from mesa_tune.formulas.amax import restored, sorted_dims


def forward(static: Static, needs: Needs, x: Tensor) -> Result:
    function, dims, correction, keepdim, _ = static
    y = getattr(torch, function)(x, dims, correction=correction, keepdim=keepdim)
    deviation = restored(y.sqrt() if function == "var" else y, dims, keepdim)
    z = torch.where(deviation == 0, 0, (x - x.mean(dims, keepdim=True)) / deviation).to(x.dtype)
    return Result(y, (z,), (deviation,))


def backward(
    static: Static, needs: Needs, lossy: list[Tensor], exact: tuple[Tensor, ...], grad: Tensor
) -> tuple[Tensor | None]:
    function, dims, _, keepdim, divisor = static
    (z,), (deviation,) = lossy, exact
    factor = restored(grad, dims, keepdim) / divisor
    # PyTorch's gradient is 0 where nothing varies; a rounded z need not be.
    factor = factor.masked_fill(deviation == 0, 0)
    return ((z * (factor if function == "std" else 2 * deviation * factor)).to(z.dtype),)


VARIANCE = Formula("variance", forward, backward, "deviations over the standard deviation; exact: that one")


def spread(
    function: str, call: Call, input: Tensor, dim: Any = None, unbiased: Any = None, **given: Any
) -> Any:
    """`torch.var` and `torch.std` along dimensions."""
    if isinstance(dim, bool):  # the older way to call it: `x.var(False)`
        dim, unbiased = None, dim
    keepdim, correction = given.pop("keepdim", False), given.pop("correction", None)
    dims = sorted_dims(input, dim)
    if given or not dims or not input.requires_grad or call.is_static(input) or call.small(input):
        return call.plain()
    correction = (1 if unbiased is None else int(unbiased)) if correction is None else correction
    divisor = math.prod([input.shape[each] for each in dims]) - correction
    if divisor <= 0:
        return call.plain()
    return call.apply(VARIANCE, (function, dims, correction, bool(keepdim), divisor), input)


ROUTES: Routes = {
    getattr(at, function): Route(function, "reduction", partial(spread, function))
    for function in ("var", "std")
    for at in (torch, Tensor)
}
LAYERS: Layers = {}
