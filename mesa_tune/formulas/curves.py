"""Functions of one tensor, y = f(x), and what the backward of each takes.

Most save the derivative at the input, d = f'(x), and dx = g d: linear in what is saved, hence unbiased under
stochastic rounding. With x itself saved, the curvature of d would turn its rounding noise into a bias, and
the biases of all layers add up: with GELU so, on the digits example, at the bytes of uniform 3 bits, the
searched policy's error was 1.7 times the sum of its layers' own, and is 1.3 times with the derivative.

Some save a tensor that a neighbour saves as well, since one copy of it costs less than two:

* `exp` its output, which *is* the derivative; `pow` to the second its input, of which the derivative is a
  multiple. Both linear.
* `sigmoid` and `tanh` their output y, as PyTorch does: what follows is a product or a linear layer, and those
  save y. The derivatives y (1 − y) and 1 − y² fall short by the variance of the rounding, at most
  (range / (levels − 1))² / 4: of 1, at most 0.0045 at 4 bits and 0.11 at 2.

Those that are flat at ±Inf (`erf`, `erfc`, `atan`, `asinh`) must save the derivative, which is 0 there: an
infinite input itself would come back as NaN.

A derivative with a pole (`sqrt`, `rsqrt`, `reciprocal`, `log`, powers below 1) is no number to round together
with others: of √(x² + 1e-6), a robust loss, the gradient error was 0.05 at 8 bits and 4 at 4 bits. These
functions have no formula and stay exact (Rule 10).
"""

from collections.abc import Callable
from functools import partial
from math import log, pi, sqrt
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten


class Curve(NamedTuple):
    """`y = value(x, *parameters)`; backward returns `back(grad, saved)` of `saved(x, y, *parameters)`.

    `of_output`: what is saved depends on y alone, otherwise on x alone. `in_place` writes y over x.
    `map(*parameters)`: the kind of derivative that a kernel computes while encoding (`ops.maps`).
    """

    value: Callable[..., Tensor]
    in_place: Callable[..., Tensor] | None
    saved: Callable[..., Tensor]
    of_output: bool = False
    back: Callable[[Tensor, Tensor], Tensor] = torch.mul
    map: Callable[..., str] | None = None


_OUTS = ("grad_input", "out")


def _at_ones(backward: Any, x: Tensor, *arguments: Any, **named: Any) -> Tensor:
    """Return the derivative: aten's `backward` of a gradient of ones."""
    ones = torch.ones_like(x)  # one expanded number would take aten's slow path: 4 times as long
    traced = torch.compiler.is_compiling()
    out = None if traced else next((name for name in _OUTS if name in backward.overloads()), None)
    if out is None:
        derivative: Tensor = backward(ones, *arguments, **named)
        return derivative
    # Into the ones: memory touched for the first time costs more than the arithmetic.
    getattr(backward, out)(ones, *arguments, **named, **{out: ones})
    return ones


def _output(x: Tensor, y: Tensor) -> Tensor:
    return y


def _elu_derivative(x: Tensor, y: Tensor, alpha: float, scale: float = 1, input_scale: float = 1) -> Tensor:
    return _at_ones(aten.elu_backward, x, alpha, scale, input_scale, False, x)


def _pow_derivative(x: Tensor, y: Tensor, exponent: float) -> Tensor:
    wide = x.float() if x.dtype == torch.float16 else x  # in which it does not overflow
    return wide.pow(exponent - 1).mul_(exponent)


def _with_inplace(function: Any, backward: Any, map: Callable[..., str] | None = None) -> Curve:
    """Return the curve of a function that has a parameter `inplace` and an aten backward of one tensor."""
    return Curve(function, partial(function, inplace=True), lambda x, y: _at_ones(backward, x, x), map=map)


_SELU = (1.6732632423543772848170429916717, 1.0507009873554804934193349852946)

CURVES: dict[str, Curve] = {
    "gelu": Curve(
        lambda x, form: F.gelu(x, approximate=form),
        None,
        lambda x, y, form: _at_ones(aten.gelu_backward, x, x, approximate=form),
        map=lambda form: "gelu" if form == "none" else "gelu_tanh",
    ),
    "silu": _with_inplace(F.silu, aten.silu_backward, lambda: "silu"),
    "mish": _with_inplace(F.mish, aten.mish_backward),
    "hardswish": _with_inplace(F.hardswish, aten.hardswish_backward),
    "hardsigmoid": _with_inplace(F.hardsigmoid, aten.hardsigmoid_backward),
    "softplus": Curve(
        F.softplus, None, lambda x, y, beta, limit: _at_ones(aten.softplus_backward, x, x, beta, limit)
    ),
    "elu": Curve(F.elu, partial(F.elu, inplace=True), _elu_derivative),
    "selu": Curve(torch.selu, torch.selu_, lambda x, y: _elu_derivative(x, y, *_SELU)),
    "celu": Curve(torch.celu, torch.celu_, lambda x, y, alpha: _elu_derivative(x, y, alpha, 1, 1 / alpha)),
    "logsigmoid": Curve(F.logsigmoid, None, lambda x, y: torch.sigmoid(-x)),
    "softsign": Curve(lambda x: x / (x.abs() + 1), None, lambda x, y: x.abs().add_(1).pow_(-2)),
    "tanhshrink": Curve(lambda x: x - x.tanh(), None, lambda x, y: x.tanh().square_()),
    "tanh": Curve(torch.tanh, torch.tanh_, _output, True, aten.tanh_backward),
    "sigmoid": Curve(torch.sigmoid, torch.sigmoid_, _output, True, aten.sigmoid_backward),
    "exp": Curve(torch.exp, torch.exp_, _output, True),
    "expm1": Curve(torch.expm1, None, _output, True, lambda g, y: g * (y + 1)),
    "square": Curve(torch.square, None, lambda x, y: x, False, lambda g, x: 2 * g * x),
    "pow": Curve(torch.pow, None, _pow_derivative),
    "base": Curve(lambda x, base: torch.pow(base, x), None, lambda x, y, base: y * log(base), True),
    "sin": Curve(torch.sin, None, lambda x, y: x.cos()),
    "cos": Curve(torch.cos, None, lambda x, y: x.sin().neg_()),
    "erf": Curve(torch.erf, None, lambda x, y: x.square().neg_().exp_().mul_(2 / sqrt(pi))),
    "erfc": Curve(torch.erfc, None, lambda x, y: x.square().neg_().exp_().mul_(-2 / sqrt(pi))),
    "atan": Curve(torch.atan, None, lambda x, y: x.square().add_(1).reciprocal_()),
    "asinh": Curve(torch.asinh, None, lambda x, y: x.square().add_(1).rsqrt_()),
}

FEW_VALUED = frozenset(
    ("gelu", "silu", "mish", "hardswish", "softplus", "elu", "selu", "celu", "logsigmoid", "tanhshrink")
)
"""Activations of whose derivative a few fixed values can be stored.

It is bounded, and is not near zero on both sides. There hand-written activations multiply the derivative of
tanh, sigmoid and erf by what grows: of x · tanh(x³ + …) the gradient errs by 5·10⁶ times its square at inputs
of deviation 20, if a fixed value near zero stands for zero.
"""
