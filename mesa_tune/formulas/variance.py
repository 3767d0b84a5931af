"""Variance and standard deviation, σ² = Σ(x − mean)² / (N − c).

Saved: the deviations over σ, z = (x − mean) / σ, packed, and σ, exact (Rule 7); dx = g z / (N − c) for σ, and
2 σ times that for σ². PyTorch saves x: rounded together with rows that vary more, a row would get their
rounding, and for σ divided by its own.
"""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mesa_tune.engine.call import Call
from mesa_tune.engine.formula import Formula, Grads, Needs, Result, Route, Routes, Saved, Static
from mesa_tune.formulas.amax import restored, sorted_dims


def forward(static: Static, needs: Needs, x: Tensor) -> Result:
    function, dims, correction, keepdim, _ = static
    y = getattr(torch, function)(x, dims, correction=correction, keepdim=keepdim)
    deviation = restored(y.sqrt() if function == "var" else y, dims, keepdim)
    z = torch.where(deviation == 0, 0, (x - x.mean(dims, keepdim=True)) / deviation).to(x.dtype)
    return Result(y, (z,), (deviation,))


def backward(saved: Saved, grad: Tensor) -> Grads:
    (function, dims, _, keepdim, divisor), _, (z,), (deviation,) = saved
    # PyTorch's gradient is 0 where nothing varies; a rounded z need not be.
    factor = (restored(grad, dims, keepdim) / divisor).masked_fill(deviation == 0, 0)
    factor = factor if function == "std" else 2 * deviation * factor
    return ((z.whole() * factor).to(z.dtype),)


VARIANCE = Formula("variance", forward, backward, "deviations over the standard deviation; exact: that one")


def spread(
    function: str,
    call: Call,
    input: Tensor,
    dim: Any = None,
    unbiased: Any = None,
    keepdim: bool = False,
    *,
    correction: Any = None,
) -> Any:
    """Route of `torch.var` and `torch.std` along dimensions."""
    if isinstance(dim, bool):  # the older way to call it: `x.var(False)`
        dim, unbiased = None, dim
    dims = sorted_dims(input, dim)
    if not dims or not call.gains_on(input):
        return call.plain()
    correction = (1 if unbiased is None else int(unbiased)) if correction is None else correction
    divisor = math.prod([input.shape[index] for index in dims]) - correction
    if divisor <= 0:
        return call.plain()
    return call.apply(VARIANCE, (function, dims, correction, bool(keepdim), divisor), input)


ROUTES: Routes = {
    **Route("var", "reduction", partial(spread, "var")).spelled("var"),
    **Route("std", "reduction", partial(spread, "std")).spelled("std"),
}
