"""Functions whose gradient passes, or passes changed, element by element: y = x here, something flat there.

Saved: where it does not pass, one bit per element (two for the absolute value), exact: dx = s g there, g
elsewhere, with s = 0 for all but the leaky ones. PyTorch saves the whole input or output.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mesa_tune import ops
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
from mesa_tune.ops.fused import MASK_GRAD, PACK_AT_MOST


class Masked(NamedTuple):
    """`y = value(x, *parameters)`, in place by `in_place`; the gradient does not pass where `mask(x, …)`.

    Whether the gradient of a NaN passes is PyTorch's choice (on the CPU), function by function.
    """

    value: Callable[..., Tensor]
    in_place: Callable[..., Tensor] | None
    mask: Callable[..., Tensor]


def _outside(x: Tensor, low: float, high: float) -> Tensor:
    return (x > low).logical_and_(x < high).logical_not_()


def _clamped(x: Tensor, low: float | None, high: float | None) -> Tensor:
    # A clamp passes gradients at its bounds; hardtanh does not.
    inside = torch.ones_like(x, dtype=torch.bool) if low is None else x >= low
    return (inside if high is None else inside.logical_and_(x <= high)).logical_not_()


def _shrunk(x: Tensor, limit: float) -> Tensor:
    return (x < -limit).logical_or_(x > limit).logical_not_()


FUNCTIONS: dict[str, Masked] = {
    "relu": Masked(torch.relu, torch.relu_, lambda x: x <= 0),
    "hardtanh": Masked(F.hardtanh, partial(F.hardtanh, inplace=True), _outside),
    "leaky_relu": Masked(
        F.leaky_relu, partial(F.leaky_relu, inplace=True), lambda x, slope: (x > 0).logical_not_()
    ),
    "threshold": Masked(torch.threshold, torch.threshold_, lambda x, limit, value: x <= limit),
    "clamp": Masked(torch.clamp, torch.clamp_, _clamped),
    "hardshrink": Masked(F.hardshrink, None, _shrunk),
    "softshrink": Masked(F.softshrink, None, _shrunk),
}


def forward(static: Static, needs: Needs, x: Tensor) -> Result:
    kind, in_place, parameters = static
    function = FUNCTIONS[kind]
    if kind in ("relu", "threshold") and x.dtype in ops.DTYPES:
        mask = PACK_AT_MOST(x, parameters[0] if parameters else 0.0)
    else:
        mask = ops.pack_bits(function.mask(x, *parameters))
    if in_place and function.in_place is not None:
        function.in_place(x, *parameters)
        # A tracer wants the very input back.
        return Result(x, exact=(mask,), in_place=True)
    return Result(function.value(x, *parameters), exact=(mask,))


def backward(saved: Saved, grad: Tensor) -> Grads:
    (kind, _, parameters), (bits,) = saved.static, saved.exact
    slope = parameters[0] if kind == "leaky_relu" else 0.0
    if grad.dtype in ops.DTYPES and grad.is_contiguous():
        return (MASK_GRAD(grad, bits, slope, 1),)
    mask = ops.unpack_bits(bits, grad.shape)
    return (torch.where(mask, grad * slope, grad) if slope else grad.masked_fill(mask, 0),)


def masked(given: Ingredients) -> Tensor:
    """Return the output for the input made again; where ReLU gave zero is known exactly."""
    kind, _, parameters = given.static
    y = FUNCTIONS[kind].value(given.inputs[0], *parameters)
    return y.masked_fill(ops.unpack_bits(given.exact[0], y.shape), 0) if kind == "relu" else y


MASKED = Formula(
    "gate",
    forward,
    backward,
    "nothing lossy; exact: where the gradient does not pass, one bit per element",
    lossless=True,
    rebuild=Rebuild(masked, saved=(), exact=(0,), inputs=(0,)),
)


def abs_forward(static: Static, needs: Needs, x: Tensor) -> Result:
    return Result(x.abs(), exact=(ops.pack_bits(x < 0), ops.pack_bits(x > 0)))


def abs_backward(saved: Saved, grad: Tensor) -> Grads:
    below, above = (ops.unpack_bits(bits, grad.shape).to(grad.dtype) for bits in saved.exact)
    return (grad * (above - below),)


ABS = Formula(
    "abs", abs_forward, abs_backward, "nothing lossy; exact: the sign, two bits per element", lossless=True
)


def serve(call: Call, kind: str, x: Tensor, parameters: tuple[Any, ...] = (), in_place: bool = False) -> Any:
    """Run the function `kind` on `x`, if bits are less than what PyTorch saves of it."""
    # A small tensor or parameter is saved by others as well, or by nobody.
    if not call.gains_on(x) or (in_place and not call.may_change(x)):
        return call.plain()
    return call.apply(MASKED, (kind, in_place, parameters), x)


def relu(kind: str, bounds: tuple[float, ...], call: Call, input: Tensor, inplace: bool = False) -> Any:
    """Route of `F.relu`, `torch.relu`, `Tensor.relu`, and of `F.relu6`, a `hardtanh` between bounds."""
    return serve(call, kind, input, bounds, inplace)


def hardtanh(
    call: Call, input: Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False
) -> Any:
    """Route of `F.hardtanh`."""
    return serve(call, "hardtanh", input, (min_val, max_val), inplace)


def leaky_relu(call: Call, input: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Any:
    """Route of `F.leaky_relu`."""
    if inplace and negative_slope < 0:  # PyTorch refuses its backward: it takes the sign from the output
        return call.plain()
    return serve(call, "leaky_relu", input, (negative_slope,), inplace)


def threshold(call: Call, input: Tensor, threshold: float, value: float, inplace: bool = False) -> Any:
    """Route of `F.threshold`."""
    return serve(call, "threshold", input, (threshold, value), inplace)


def shrink(kind: str, call: Call, input: Tensor, lambd: float = 0.5) -> Any:
    """Route of `F.hardshrink` and `F.softshrink`."""
    return serve(call, kind, input, (lambd,))


def clamp(in_place: bool, call: Call, input: Tensor, min: Any = None, max: Any = None) -> Any:
    """Route of `torch.clamp`, `torch.clip` and `torch.clamp_min`, between numbers."""
    if not input.requires_grad:
        return call.plain()
    if not all(bound is None or isinstance(bound, (int, float)) for bound in (min, max)):
        return call.refuse("clamp has a formula only for numbers") if call.gains(input) else call.plain()
    return serve(call, "clamp", input, (min, max), in_place)


def clamp_max(in_place: bool, call: Call, input: Tensor, max: Any) -> Any:
    """Route of `torch.clamp_max`."""
    return clamp(in_place, call, input, None, max)


def absolute(call: Call, input: Tensor) -> Any:
    """Route of `torch.abs`."""
    return call.apply(ABS, (), input) if call.gains_on(input) else call.plain()


ROUTES: Routes = {
    **Route("relu", "relu", partial(relu, "relu", ())).spelled("relu", owners=(F, torch, Tensor)),
    **Route("relu", "relu", partial(relu, "relu", (), inplace=True)).spelled("relu_"),
    F.relu6: Route("relu6", "relu", partial(relu, "hardtanh", (0.0, 6.0))),
    F.hardtanh: Route("hardtanh", "relu", hardtanh),
    F.hardtanh_: Route("hardtanh", "relu", partial(hardtanh, inplace=True)),
    F.leaky_relu: Route("leaky_relu", "relu", leaky_relu),
    F.leaky_relu_: Route("leaky_relu", "relu", partial(leaky_relu, inplace=True)),
    **Route("threshold", "relu", threshold).spelled("threshold", owners=(F, torch)),
    torch.threshold_: Route("threshold", "relu", partial(threshold, inplace=True)),
    **Route("hardshrink", "relu", partial(shrink, "hardshrink")).spelled("hardshrink"),
    F.softshrink: Route("softshrink", "relu", partial(shrink, "softshrink")),
    **Route("clamp", "relu", partial(clamp, False)).spelled("clamp", "clip", "clamp_min"),
    **Route("clamp", "relu", partial(clamp, True)).spelled("clamp_", "clamp_min_"),
    **Route("clamp", "relu", partial(clamp_max, False)).spelled("clamp_max"),
    **Route("clamp", "relu", partial(clamp_max, True)).spelled("clamp_max_"),
    **Route("abs", "relu", absolute).spelled("abs", "absolute"),
}
LAYERS: Layers = {
    nn.ReLU: F.relu,
    nn.ReLU6: F.relu6,
    nn.Hardtanh: F.hardtanh,
    nn.LeakyReLU: F.leaky_relu,
    nn.Threshold: F.threshold,
    nn.Hardshrink: F.hardshrink,
    nn.Softshrink: F.softshrink,
}
