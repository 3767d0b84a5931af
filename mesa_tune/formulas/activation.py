"""Functions of one tensor. Saved: the derivative at the input, or what `curves` says instead."""

from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from mesa_tune.codecs import Codebook
from mesa_tune.codecs.levels import optimal_codebook
from mesa_tune.compiling import constant_result
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
from mesa_tune.engine.tensors import cast
from mesa_tune.formulas.arithmetic import times
from mesa_tune.formulas.curves import CURVES, FEW_VALUED
from mesa_tune.formulas.norms.composed import aligned
from mesa_tune.ops import maps


def forward(static: Static, needs: Needs, x: Tensor) -> Result:
    kind, in_place, parameters, _ = static
    curve = CURVES[kind]
    if in_place and curve.in_place is not None:
        derivative = None if curve.of_output else curve.saved(x, x, *parameters)
        curve.in_place(x, *parameters)
        # A tracer wants the very input back.
        return Result(x, (x if derivative is None else derivative,), in_place=True)
    y = curve.value(x, *parameters)
    source = cast(x, y.dtype)
    if curve.map is None:
        return Result(y, (curve.saved(source, y, *parameters),))
    made = maps.Deferred(source, curve.map(*parameters), lambda: curve.saved(source, y, *parameters))
    return Result(y, (made.if_dense(),))


def backward(saved: Saved, grad: Tensor) -> Grads:
    kind, _, _, dtype = saved.static
    (tensor,), back = saved.lossy, CURVES[kind].back
    return (cast(times(tensor, grad) if back is torch.mul else back(grad, tensor.whole()), dtype),)


def codebook(static: Static, levels: int) -> Codebook | None:
    """Return the fixed values of what is saved; None if a few cannot stand for the derivative."""
    return fixed_levels(static[0], static[2], levels) if static[0] in FEW_VALUED else None


@constant_result
def fixed_levels(kind: str, parameters: tuple[Any, ...], levels: int) -> Codebook:
    """Return the codebook of a curve of `FEW_VALUED` for inputs that are standard normal."""
    return _fixed_levels(kind, parameters, levels)


@lru_cache(maxsize=256)
def _fixed_levels(kind: str, parameters: tuple[Any, ...], levels: int) -> Codebook:
    curve = CURVES[kind]
    with _disable_current_modes(), torch.no_grad():
        x = torch.linspace(-6, 6, 1001, dtype=torch.float64, device="cpu")
        derivative = curve.saved(x, x, *parameters)
        columns = torch.stack([derivative, (-x * x / 2).exp()])
        slopes, weight = columns[:, derivative.argsort(stable=True)].numpy()
    return optimal_codebook(slopes, weight, levels)


POINTWISE = Formula(
    "pointwise",
    forward,
    backward,
    "the derivative at the input; the output of sigmoid, tanh and exp",
    codebook=codebook,
)


def input_forward(static: Static, needs: Needs, x: Tensor) -> Result:
    """Run a function that saves its input, of which another layer makes the output again."""
    kind, parameters, _ = static
    return Result(CURVES[kind].value(x, *parameters), (x,))


def input_backward(saved: Saved, grad: Tensor) -> Grads:
    """Take the derivative at the input as decoded: biased, unlike the derivative as decoded."""
    kind, parameters, dtype = saved.static
    curve, x = CURVES[kind], saved.lossy[0].whole().to(grad.dtype)
    return (curve.back(grad, curve.saved(x, torch.empty(0), *parameters)).to(dtype),)


def value_at_input(given: Ingredients) -> Tensor:
    """Return f(x)."""
    kind, parameters, _ = given.static
    return CURVES[kind].value(given.lossy[0], *parameters)


POINTWISE_INPUT = Formula(
    "pointwise_input",
    input_forward,
    input_backward,
    "the input, where another layer derives the output",
    rebuild=Rebuild(value_at_input, saved_is_input=True),
)


def serve(call: Call, kind: str, x: Tensor, parameters: tuple[Any, ...] = (), in_place: bool = False) -> Any:
    """Run the curve `kind` on `x`, if something smaller can be saved."""
    of_output = CURVES[kind].of_output
    # A parameter that PyTorch saves costs nothing, a copy of the derivative does.
    if not (x.requires_grad and call.gains(x)) or (call.is_static(x) and not of_output):
        return call.plain()
    if in_place and not call.may_change(x):
        return call.plain()
    call = aligned(call, x) if kind == "square" else call
    if call.spec.exposes and not (in_place or of_output or call.spec.codec == "levels"):
        return call.apply(POINTWISE_INPUT, (kind, parameters, x.dtype), x)
    return call.apply(POINTWISE, (kind, in_place, parameters, x.dtype), x)


def simple(kind: str, call: Call, input: Tensor, inplace: bool = False) -> Any:
    """Any curve without parameters."""
    return serve(call, kind, input, (), inplace)


def gelu(call: Call, input: Tensor, *, approximate: str = "none") -> Any:
    """Route of `F.gelu`, both forms."""
    return serve(call, "gelu", input, (approximate,))


def softplus(call: Call, input: Tensor, beta: float = 1, threshold: float = 20) -> Any:
    """Route of `F.softplus`: linear beyond `threshold`."""
    return serve(call, "softplus", input, (beta, threshold))


def elu(kind: str, call: Call, input: Tensor, alpha: float = 1.0, inplace: bool = False) -> Any:
    """Route of `F.elu` and `F.celu`."""
    return serve(call, kind, input, (alpha,), inplace)


def power(call: Call, input: Any, exponent: Any) -> Any:
    """Route of `torch.pow` and `**`: a tensor to a number, or a number to a tensor."""
    if isinstance(input, (int, float)) and input > 0:
        return serve(call, "base", exponent, (input,))
    if not isinstance(input, Tensor) or not isinstance(exponent, (int, float)):
        gains = call.gains(*(operand for operand in (input, exponent) if isinstance(operand, Tensor)))
        why = "a power has a formula only if base or exponent is a number"
        return call.refuse(why) if gains else call.plain()
    if exponent <= 1:  # nothing to save, or a derivative that has a pole at 0 (Rule 10)
        return call.plain()
    return serve(call, "square", input) if exponent == 2 else serve(call, "pow", input, (exponent,))


def base_of(call: Call, input: Tensor, other: Any) -> Any:
    """Route of `number ** tensor`."""
    return power(call, other, input)


def _spellings(kind: str) -> Routes:
    """Return the routes of `torch.<kind>`, of the method, and of the in-place forms of both."""
    routes = Route(kind, "pointwise", partial(simple, kind)).spelled(kind)
    if CURVES[kind].in_place is not None:
        routes |= Route(kind, "pointwise", partial(simple, kind, inplace=True)).spelled(f"{kind}_")
    return routes


_FUNCTIONAL = ("mish", "hardswish", "hardsigmoid", "logsigmoid", "softsign", "tanhshrink", "selu")
_SPELLED = ("tanh", "sigmoid", "exp", "expm1", "square", "sin", "cos", "erf", "erfc", "atan", "asinh")
ROUTES: Routes = {
    F.gelu: Route("gelu", "gelu", gelu),
    F.silu: Route("silu", "silu", partial(simple, "silu")),
    **{getattr(F, kind): Route(kind, "pointwise", partial(simple, kind)) for kind in _FUNCTIONAL},
    F.softplus: Route("softplus", "pointwise", softplus),
    F.elu: Route("elu", "pointwise", partial(elu, "elu")),
    F.elu_: Route("elu", "pointwise", partial(elu, "elu", inplace=True)),
    **Route("celu", "pointwise", partial(elu, "celu")).spelled("celu", owners=(F, torch)),
    torch.celu_: Route("celu", "pointwise", partial(elu, "celu", inplace=True)),
    torch.selu: Route("selu", "pointwise", partial(simple, "selu")),
    torch.selu_: Route("selu", "pointwise", partial(simple, "selu", inplace=True)),
    torch.special.expit: Route("sigmoid", "pointwise", partial(simple, "sigmoid")),
    torch.special.erf: Route("erf", "pointwise", partial(simple, "erf")),
    torch.special.erfc: Route("erfc", "pointwise", partial(simple, "erfc")),
    **Route("atan", "pointwise", partial(simple, "atan")).spelled("arctan"),
    **Route("asinh", "pointwise", partial(simple, "asinh")).spelled("arcsinh"),
    **Route("pow", "pointwise", power).spelled("pow"),
    Tensor.__pow__: Route("pow", "pointwise", power),
    Tensor.__rpow__: Route("pow", "pointwise", base_of),
    **{function: route for kind in _SPELLED for function, route in _spellings(kind).items()},
}
LAYERS: Layers = {
    nn.GELU: F.gelu,
    nn.SiLU: F.silu,
    nn.Mish: F.mish,
    nn.Hardswish: F.hardswish,
    nn.Hardsigmoid: F.hardsigmoid,
    nn.Softplus: F.softplus,
    nn.LogSigmoid: F.logsigmoid,
    nn.Softsign: F.softsign,
    nn.Tanhshrink: F.tanhshrink,
    nn.ELU: F.elu,
    nn.CELU: F.celu,
    nn.SELU: F.selu,
    nn.Tanh: torch.tanh,
    nn.Sigmoid: torch.sigmoid,
}
