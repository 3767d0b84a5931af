"""Functions of one tensor. Kept: the derivative at the input, or what `curves` says instead."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
    cast,
)
from mesa_tune.engine.packed import Held
from mesa_tune.formulas.curves import CURVES
from mesa_tune.formulas.norms.composed import aligned
from mesa_tune.ops import maps


def forward(static: Static, needs: Needs, x: Tensor) -> Result:
    kind, in_place, parameters, _ = static
    curve = CURVES[kind]
    if in_place and curve.in_place is not None:
        kept = None if curve.of_output else curve.kept(x, x, *parameters)
        curve.in_place(x, *parameters)
        # A tracer wants the very input back.
        return Result(x, lossy=(x if kept is None else kept,), in_place=True)
    y = curve.value(x, *parameters)
    given = cast(x, y.dtype)
    if curve.map is None:
        return Result(y, lossy=(curve.kept(given, y, *parameters),))
    return Result(
        y, lossy=(maps.kept(given, curve.map(*parameters), lambda: curve.kept(given, y, *parameters)),)
    )


def backward(
    static: Static, needs: Needs, lossy: list[Tensor], exact: Any, grad: Tensor
) -> tuple[Tensor | None]:
    kind, _, _, dtype = static
    return (cast(CURVES[kind].back(grad, lossy[0]), dtype),)


def piecewise(
    static: Static, needs: Needs, held: list[Held], exact: Any, grad: Tensor
) -> tuple[Tensor | None] | None:
    """Where what is kept is the derivative, it is multiplied as it is decoded."""
    kind, _, _, dtype = static
    if CURVES[kind].back is not torch.mul:
        return None
    return (cast(held[0].times(grad), dtype),)


def input_forward(static: Static, needs: Needs, x: Tensor) -> Result:
    """A function of one tensor that keeps its input, because its output is to be made again from it."""
    kind, parameters, _ = static
    return Result(CURVES[kind].value(x, *parameters), lossy=(x,))


def input_backward(
    static: Static, needs: Needs, lossy: list[Tensor], exact: Any, grad: Tensor
) -> tuple[Tensor | None]:
    """The derivative at the input as decoded: biased, unlike the derivative as decoded."""
    kind, parameters, dtype = static
    curve, x = CURVES[kind], lossy[0].to(grad.dtype)
    return (curve.back(grad, curve.kept(x, torch.empty(0), *parameters)).to(dtype),)


def value_at_input(
    static: Static, lossy: Tensors, exact: Tensors, references: References, inputs: Tensors
) -> Tensor:
    """f(x)."""
    kind, parameters, _ = static
    return CURVES[kind].value(lossy[0], *parameters)


POINTWISE_INPUT = Formula(
    "pointwise_input",
    input_forward,
    input_backward,
    "the input, where another layer derives the output",
    rebuild=Rebuild(value_at_input, kept_is_input=True),
)
POINTWISE = Formula(
    "pointwise",
    forward,
    backward,
    "the derivative at the input; the output of sigmoid, tanh and exp",
    piecewise=piecewise,
)


def serve(call: Call, kind: str, x: Tensor, parameters: tuple[Any, ...] = (), in_place: bool = False) -> Any:
    """Runs the curve `kind` on `x`, if that has something to gain."""
    if not x.requires_grad or call.small(x):
        return call.plain()
    # A parameter that PyTorch keeps costs nothing, a copy of the derivative does.
    if call.is_static(x) and not CURVES[kind].of_output:
        return call.plain()
    call = aligned(call, x) if kind == "square" else call
    if in_place and not call.changes(x):
        return call.plain()
    if call.serves and not (in_place or CURVES[kind].of_output):
        return call.apply(POINTWISE_INPUT, (kind, parameters, x.dtype), x)
    return call.apply(POINTWISE, (kind, in_place, parameters, x.dtype), x)


def simple(kind: str, call: Call, input: Tensor, inplace: bool = False, **unknown: Any) -> Any:
    """Any curve without parameters."""
    if unknown:
        return call.refuse(f"{kind} has no formula for {sorted(unknown)}")
    return serve(call, kind, input, (), inplace)


def gelu(call: Call, input: Tensor, *, approximate: str = "none", **unknown: Any) -> Any:
    """`F.gelu`, both forms."""
    if unknown:
        return call.refuse(f"gelu has no formula for {sorted(unknown)}")
    return serve(call, "gelu", input, (approximate,))


def softplus(call: Call, input: Tensor, beta: float = 1, threshold: float = 20, **unknown: Any) -> Any:
    """`F.softplus`: linear beyond `threshold`."""
    if unknown:
        return call.refuse(f"softplus has no formula for {sorted(unknown)}")
    return serve(call, "softplus", input, (beta, threshold))


def elu(kind: str, call: Call, input: Tensor, alpha: float = 1.0, inplace: bool = False) -> Any:
    """`F.elu` and `F.celu`."""
    return serve(call, kind, input, (alpha,), inplace)


def elu_(kind: str, call: Call, input: Tensor, alpha: float = 1.0) -> Any:
    """`F.elu_` and `torch.celu_`."""
    return serve(call, kind, input, (alpha,), True)


def power(call: Call, input: Any, exponent: Any, **unknown: Any) -> Any:
    """`torch.pow` and `**`: a tensor to a number, or a number to a tensor."""
    if isinstance(input, (int, float)) and input > 0 and not unknown:
        return serve(call, "base", exponent, (input,))
    if not isinstance(input, Tensor) or not isinstance(exponent, (int, float)) or unknown:
        small = call.small(*(each for each in (input, exponent) if isinstance(each, Tensor)))
        return (
            call.plain()
            if small
            else call.refuse("a power has a formula only if base or exponent is a number")
        )
    if exponent <= 1:  # nothing to save, or a derivative that has a pole at 0 (Rule 10)
        return call.plain()
    return serve(call, "square", input) if exponent == 2 else serve(call, "pow", input, (exponent,))


def base_of(call: Call, input: Tensor, other: Any) -> Any:
    """`number ** tensor`."""
    return power(call, other, input)


def _spellings(kind: str, tag: str = "pointwise") -> Routes:
    """`torch.<kind>` and the method, and what of both is in place."""
    places = (torch, Tensor)
    found = {getattr(at, kind): Route(kind, tag, partial(simple, kind)) for at in places if hasattr(at, kind)}
    if CURVES[kind].in_place is not None:
        found |= {
            getattr(at, f"{kind}_"): Route(kind, tag, partial(simple, kind, inplace=True)) for at in places
        }
    return found


_SPELLED = (
    "tanh",
    "sigmoid",
    "exp",
    "expm1",
    "square",
)
_ROUND = ("sin", "cos", "erf")
_POW = Route("pow", "pointwise", power)
ROUTES: Routes = {
    F.gelu: Route("gelu", "gelu", gelu),
    F.silu: Route("silu", "silu", partial(simple, "silu")),
    F.mish: Route("mish", "pointwise", partial(simple, "mish")),
    F.hardswish: Route("hardswish", "pointwise", partial(simple, "hardswish")),
    F.hardsigmoid: Route("hardsigmoid", "pointwise", partial(simple, "hardsigmoid")),
    F.softplus: Route("softplus", "pointwise", softplus),
    F.logsigmoid: Route("logsigmoid", "pointwise", partial(simple, "logsigmoid")),
    F.softsign: Route("softsign", "pointwise", partial(simple, "softsign")),
    F.tanhshrink: Route("tanhshrink", "pointwise", partial(simple, "tanhshrink")),
    F.elu: Route("elu", "pointwise", partial(elu, "elu")),
    F.elu_: Route("elu", "pointwise", partial(elu_, "elu")),
    F.celu: Route("celu", "pointwise", partial(elu, "celu")),
    torch.celu: Route("celu", "pointwise", partial(elu, "celu")),
    torch.celu_: Route("celu", "pointwise", partial(elu_, "celu")),
    F.selu: Route("selu", "pointwise", partial(simple, "selu")),
    torch.selu: Route("selu", "pointwise", partial(simple, "selu")),
    torch.selu_: Route("selu", "pointwise", partial(simple, "selu", inplace=True)),
    torch.special.expit: Route("sigmoid", "pointwise", partial(simple, "sigmoid")),
    torch.special.erf: Route("erf", "pointwise", partial(simple, "erf")),
    torch.pow: _POW,
    Tensor.pow: _POW,
    Tensor.__pow__: _POW,
    Tensor.__rpow__: Route("pow", "pointwise", base_of),
    **{function: route for kind in (*_SPELLED, *_ROUND) for function, route in _spellings(kind).items()},
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
