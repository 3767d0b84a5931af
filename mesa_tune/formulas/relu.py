"""Functions whose gradient passes, or passes changed, element by element: y = x here, something flat there.

Kept is where, one bit an element (two for the absolute value), exact: dx = g where x passes, s g elsewhere,
with s = 0 for all but the leaky ones. PyTorch keeps the whole input or output.
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
    Layers,
    Needs,
    Rebuild,
    References,
    Result,
    Route,
    Routes,
    Static,
    Tensors,
)
from mesa_tune.ops.fused import GATE as GATED
from mesa_tune.ops.fused import PACK_AT_MOST

aten = torch.ops.aten


class Gate(NamedTuple):
    """`y = value(x, *parameters)`, in place by `in_place`; the gradient does not pass where `shut(x, …)`.

    Whether the gradient of a NaN passes is PyTorch's choice (on the CPU), function by function.
    """

    value: Callable[..., Tensor]
    in_place: Callable[..., Tensor] | None
    shut: Callable[..., Tensor]


def _outside(x: Tensor, low: float, high: float) -> Tensor:
    return (x > low).logical_and_(x < high).logical_not_()


def _clamped(x: Tensor, low: float | None, high: float | None) -> Tensor:
    # A clamp passes gradients at its bounds; hardtanh does not.
    inside = torch.ones_like(x, dtype=torch.bool) if low is None else x >= low
    return (inside if high is None else inside.logical_and_(x <= high)).logical_not_()


def _shrunk(x: Tensor, limit: float) -> Tensor:
    return (x < -limit).logical_or_(x > limit).logical_not_()


GATES: dict[str, Gate] = {
    "relu": Gate(torch.relu, torch.relu_, lambda x: x <= 0),
    "hardtanh": Gate(F.hardtanh, partial(F.hardtanh, inplace=True), _outside),
    "leaky_relu": Gate(
        F.leaky_relu, partial(F.leaky_relu, inplace=True), lambda x, slope: (x > 0).logical_not_()
    ),
    "threshold": Gate(torch.threshold, torch.threshold_, lambda x, limit, value: x <= limit),
    "clamp": Gate(torch.clamp, torch.clamp_, _clamped),
    "hardshrink": Gate(F.hardshrink, None, _shrunk),
    "softshrink": Gate(F.softshrink, None, _shrunk),
}


def forward(static: Static, needs: Needs, x: Tensor) -> Result:
    kind, in_place, parameters = static
    gate = GATES[kind]
    if kind in ("relu", "threshold") and x.dtype == torch.float32:
        shut = PACK_AT_MOST(x, parameters[0] if parameters else 0.0)
    else:
        shut = ops.pack_bits(gate.shut(x, *parameters))
    if in_place and gate.in_place is not None:
        gate.in_place(x, *parameters)
        # A tracer wants the very input back.
        return Result(x, exact=(shut,), in_place=True)
    return Result(gate.value(x, *parameters), exact=(shut,))


def backward(
    static: Static, needs: Needs, lossy: list[Tensor], exact: tuple[Tensor, ...], grad: Tensor
) -> tuple[Tensor | None]:
    kind, _, parameters = static
    slope = parameters[0] if kind == "leaky_relu" else 0.0
    if grad.dtype == torch.float32 and grad.is_contiguous():
        return (GATED(grad, exact[0], slope),)
    shut = ops.unpack_bits(exact[0], grad.shape)
    return (torch.where(shut, grad * slope, grad) if slope else grad.masked_fill(shut, 0),)


def gated(static: Static, lossy: Tensors, exact: Tensors, references: References, inputs: Tensors) -> Tensor:
    """ReLU and its kind, of the input made again; what ReLU shut is known exactly."""
    kind, _, parameters = static
    y = GATES[kind].value(inputs[0], *parameters)
    return y.masked_fill(ops.unpack_bits(exact[0], y.shape), 0) if kind == "relu" else y


GATE = Formula(
    "gate",
    forward,
    backward,
    "nothing lossy; exact: where the gradient does not pass, one bit an element",
    lossless=True,
    rebuild=Rebuild(gated, kept=(), exact=(0,), inputs=(0,)),
)


def abs_forward(static: Static, needs: Needs, x: Tensor) -> Result:
    return Result(x.abs(), exact=(ops.pack_bits(x < 0), ops.pack_bits(x > 0)))


def abs_backward(
    static: Static, needs: Needs, lossy: list[Tensor], exact: tuple[Tensor, ...], grad: Tensor
) -> tuple[Tensor | None]:
    below, above = (ops.unpack_bits(each, grad.shape).to(grad.dtype) for each in exact)
    return (grad * (above - below),)


ABS = Formula(
    "abs", abs_forward, abs_backward, "nothing lossy; exact: the sign, two bits an element", lossless=True
)


def serve(call: Call, kind: str, x: Tensor, parameters: tuple[Any, ...] = (), in_place: bool = False) -> Any:
    """Runs the gate `kind` on `x`, if bits are less than what PyTorch keeps of it."""
    # A small tensor or parameter is kept by others as well, or by nobody.
    if not x.requires_grad or call.small(x) or call.is_static(x):
        return call.plain()
    if in_place and not call.changes(x):
        return call.plain()
    return call.apply(GATE, (kind, in_place, parameters), x)


def relu(call: Call, input: Tensor, inplace: bool = False, **unknown: Any) -> Any:
    """`F.relu`, `torch.relu`, `Tensor.relu`."""
    if unknown:
        return call.refuse(f"relu has no formula for {sorted(unknown)}")
    return serve(call, "relu", input, (), inplace)


def relu_(call: Call, input: Tensor, **unknown: Any) -> Any:
    """`torch.relu_`, `Tensor.relu_`."""
    return relu(call, input, True, **unknown)


def relu6(call: Call, input: Tensor, inplace: bool = False) -> Any:
    """`F.relu6`."""
    return serve(call, "hardtanh", input, (0.0, 6.0), inplace)


def hardtanh(
    call: Call, input: Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False
) -> Any:
    """`F.hardtanh`."""
    return serve(call, "hardtanh", input, (min_val, max_val), inplace)


def hardtanh_(call: Call, input: Tensor, min_val: float = -1.0, max_val: float = 1.0) -> Any:
    """`F.hardtanh_`."""
    return hardtanh(call, input, min_val, max_val, True)


def leaky_relu(call: Call, input: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Any:
    """`F.leaky_relu`."""
    # In place PyTorch takes the sign from the output, and refuses a slope that changes it.
    return serve(call, "leaky_relu", input, (negative_slope,), inplace and negative_slope > 0)


def leaky_relu_(call: Call, input: Tensor, negative_slope: float = 0.01) -> Any:
    """`F.leaky_relu_`."""
    return leaky_relu(call, input, negative_slope, True)


def threshold(call: Call, input: Tensor, threshold: float, value: float, inplace: bool = False) -> Any:
    """`F.threshold`."""
    return serve(call, "threshold", input, (threshold, value), inplace)


def threshold_(call: Call, input: Tensor, threshold: float, value: float) -> Any:
    """`F.threshold_`."""
    return serve(call, "threshold", input, (threshold, value), True)


def shrink(kind: str, call: Call, input: Tensor, lambd: float = 0.5) -> Any:
    """`F.hardshrink` and `F.softshrink`."""
    return serve(call, kind, input, (lambd,))


def clamp(
    call: Call, input: Tensor, min: Any = None, max: Any = None, *, in_place: bool = False, **unknown: Any
) -> Any:
    """`torch.clamp` and its kin, between numbers."""
    if not input.requires_grad:
        return call.plain()
    if unknown or not all(bound is None or isinstance(bound, (int, float)) for bound in (min, max)):
        return call.plain() if call.small(input) else call.refuse("clamp has a formula only for numbers")
    return serve(call, "clamp", input, (min, max), in_place)


def clamp_max(call: Call, input: Tensor, max: Any, *, in_place: bool = False) -> Any:
    """`torch.clamp_max`."""
    return clamp(call, input, None, max, in_place=in_place)


def absolute(call: Call, input: Tensor) -> Any:
    """`torch.abs`."""
    if not input.requires_grad or call.small(input) or call.is_static(input):
        return call.plain()
    return call.apply(ABS, (), input)


_RELU = Route("relu", "relu", relu)
_RELU_ = Route("relu", "relu", relu_)
_HARDSHRINK = Route("hardshrink", "relu", partial(shrink, "hardshrink"))
_CLAMP = Route("clamp", "relu", clamp)
_CLAMP_ = Route("clamp", "relu", partial(clamp, in_place=True))
_CLAMP_MAX = Route("clamp", "relu", clamp_max)
_CLAMP_MAX_ = Route("clamp", "relu", partial(clamp_max, in_place=True))
_ABS = Route("abs", "relu", absolute)
ROUTES: Routes = {
    F.relu: _RELU,
    torch.relu: _RELU,
    Tensor.relu: _RELU,
    torch.relu_: _RELU_,
    Tensor.relu_: _RELU_,
    F.relu6: Route("relu6", "relu", relu6),
    F.hardtanh: Route("hardtanh", "relu", hardtanh),
    F.hardtanh_: Route("hardtanh", "relu", hardtanh_),
    F.leaky_relu: Route("leaky_relu", "relu", leaky_relu),
    F.leaky_relu_: Route("leaky_relu", "relu", leaky_relu_),
    F.threshold: Route("threshold", "relu", threshold),
    torch.threshold: Route("threshold", "relu", threshold),
    torch.threshold_: Route("threshold", "relu", threshold_),
    F.hardshrink: _HARDSHRINK,
    Tensor.hardshrink: _HARDSHRINK,
    F.softshrink: Route("softshrink", "relu", partial(shrink, "softshrink")),
    **dict.fromkeys((torch.clamp, Tensor.clamp, torch.clip, Tensor.clip), _CLAMP),
    **dict.fromkeys((torch.clamp_min, Tensor.clamp_min), _CLAMP),
    **dict.fromkeys((torch.clamp_, Tensor.clamp_, torch.clamp_min_, Tensor.clamp_min_), _CLAMP_),
    **dict.fromkeys((torch.clamp_max, Tensor.clamp_max), _CLAMP_MAX),
    **dict.fromkeys((torch.clamp_max_, Tensor.clamp_max_), _CLAMP_MAX_),
    **dict.fromkeys((torch.abs, Tensor.abs, Tensor.__abs__, torch.absolute, Tensor.absolute), _ABS),
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
