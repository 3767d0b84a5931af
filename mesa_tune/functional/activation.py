"""Pointwise activations. GELU keeps its input x: dx = g (Φ(x) + x φ(x)), or the derivative of the tanh form."""

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mesa_tune.functional.formula import Formula, Needs, Result, Static

if TYPE_CHECKING:
    from mesa_tune.functional.call import Call


def gelu_forward(static: Static, needs: Needs, x: Tensor) -> Result:
    return Result(F.gelu(x, approximate=static[0]), lossy=(x,))


def gelu_backward(
    static: Static, needs: Needs, lossy: list[Tensor], exact: Any, grad: Tensor
) -> tuple[Tensor | None]:
    return (torch.ops.aten.gelu_backward(grad, lossy[0], approximate=static[0]),)


GELU = Formula(gelu_forward, gelu_backward, "the input")


def gelu(call: "Call", input: Tensor, *, approximate: str = "none") -> Any:
    """`F.gelu`, both forms."""
    return call.apply("gelu", (approximate,), input)
