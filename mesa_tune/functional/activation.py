"""Activations.

GELU keeps the derivative at its input, d = Φ(x) + x φ(x) or that of the tanh form: dx = g d. The gradient is
linear in what is kept, hence unbiased under stochastic rounding. With x itself kept, the curvature of d would
turn its rounding noise into a bias, and the biases of all layers add up: on the digits example, at the bytes
of uniform 3 bits, the searched policy's error was 1.7 times the sum of its layers' so, and is 1.3 times now.

ReLU keeps where its output is zero, one bit an element, exact: dx = 0 there, g elsewhere.

Softmax keeps its output y, which a following product keeps too, so that both share one copy:  dx = y (g − Σ
g y). It takes nothing but y, so no exact statistic meets a rounded tensor (Rule 7).
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mesa_tune import ops
from mesa_tune.functional.formula import Formula, Layers, Needs, Result, Route, Routes, Static

if TYPE_CHECKING:
    from mesa_tune.functional.call import Call


def gelu_forward(static: Static, needs: Needs, x: Tensor) -> Result:
    return Result(F.gelu(x, approximate=static[0]), lossy=(gelu_derivative(x, static[0]),))


def gelu_derivative(x: Tensor, approximate: str) -> Tensor:
    """GELU's derivative at every element of `x`."""
    ones = torch.ones_like(x)
    backward = torch.ops.aten.gelu_backward
    if torch.compiler.is_compiling():
        derivative: Tensor = backward(ones, x, approximate=approximate)
        return derivative
    # Into the ones: memory touched for the first time costs more than the arithmetic.
    backward.grad_input(ones, x, approximate=approximate, grad_input=ones)
    return ones


def gelu_backward(
    static: Static, needs: Needs, lossy: list[Tensor], exact: Any, grad: Tensor
) -> tuple[Tensor | None]:
    return (grad * lossy[0],)


GELU = Formula(gelu_forward, gelu_backward, "the derivative at the input")


def relu_forward(static: Static, needs: Needs, x: Tensor) -> Result:
    (in_place,) = static
    # A tracer wants the very input back.
    y = x if in_place else torch.relu(x)
    if in_place:
        torch.relu_(x)
    # Not `y > 0`: PyTorch lets the gradient of a NaN pass.
    return Result(y, exact=(ops.pack_bits(y <= 0),), in_place=in_place)


def relu_backward(
    static: Static, needs: Needs, lossy: list[Tensor], exact: tuple[Tensor, ...], grad: Tensor
) -> tuple[Tensor | None]:
    return (grad.masked_fill(ops.unpack_bits(exact[0], grad.shape), 0),)


RELU = Formula(
    relu_forward,
    relu_backward,
    "nothing lossy; exact: where the output is zero, one bit an element",
    lossless=True,
)


def softmax_forward(static: Static, needs: Needs, x: Tensor) -> Result:
    dim, dtype, _ = static
    y = torch.softmax(x, dim, dtype=dtype)
    return Result(y, lossy=(y,))


def softmax_backward(
    static: Static, needs: Needs, lossy: list[Tensor], exact: Any, grad: Tensor
) -> tuple[Tensor | None]:
    dim, _, given = static
    y = lossy[0]
    return (torch.ops.aten._softmax_backward_data(grad, y, dim, y.dtype).to(given),)


SOFTMAX = Formula(softmax_forward, softmax_backward, "the output")


def gelu(call: "Call", input: Tensor, *, approximate: str = "none", **unknown: Any) -> Any:
    """`F.gelu`, both forms."""
    if unknown:
        return call.refuse(f"gelu has no formula for {sorted(unknown)}")
    return call.apply("gelu", (approximate,), input)


def relu(call: "Call", input: Tensor, inplace: bool = False, **unknown: Any) -> Any:
    """`F.relu`, `torch.relu`, `Tensor.relu`."""
    if unknown:
        return call.refuse(f"relu has no formula for {sorted(unknown)}")
    # PyTorch keeps the output, which the next layer keeps as well if it is small.
    if call.small(input):
        return call.plain()
    # In place on a view or a leaf, autograd rebuilds or forbids more than a formula of ours could.
    if inplace and (input.is_leaf or input._base is not None):
        return call.plain()
    return call.apply("relu", (inplace,), input)


def relu_(call: "Call", input: Tensor, **unknown: Any) -> Any:
    """`torch.relu_`, `Tensor.relu_`."""
    return relu(call, input, True, **unknown)


def softmax(
    call: "Call", input: Tensor, dim: Any = None, dtype: torch.dtype | None = None, **unknown: Any
) -> Any:
    """`torch.softmax`, `Tensor.softmax`, `torch.special.softmax`."""
    if unknown or not isinstance(dim, int):
        return call.refuse("softmax has a formula only for a numbered `dim`, and none with `out`")
    return call.apply("softmax", (dim, dtype, input.dtype), input)


def functional_softmax(
    call: "Call",
    input: Tensor,
    dim: int | None = None,
    _stacklevel: int = 3,
    dtype: torch.dtype | None = None,
    **unknown: Any,
) -> Any:
    """`F.softmax`."""
    return softmax(call, input, dim, dtype, **unknown)


FORMULAS = {"gelu": GELU, "relu": RELU, "softmax": SOFTMAX}
_RELU = Route("relu", "relu", relu)
_RELU_ = Route("relu", "relu", relu_)
_SOFTMAX = Route("softmax", "softmax", softmax)
ROUTES: Routes = {
    F.gelu: Route("gelu", "gelu", gelu),
    F.relu: _RELU,
    torch.relu: _RELU,
    Tensor.relu: _RELU,
    torch.relu_: _RELU_,
    Tensor.relu_: _RELU_,
    F.softmax: Route("softmax", "softmax", functional_softmax),
    torch.softmax: _SOFTMAX,
    torch.special.softmax: _SOFTMAX,
    Tensor.softmax: _SOFTMAX,
}
LAYERS: Layers = {nn.GELU: F.gelu, nn.ReLU: F.relu, nn.Softmax: F.softmax, nn.Softmax2d: F.softmax}
