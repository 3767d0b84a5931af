"""How a function's output is made again from what the function keeps: the table behind `store: derive`.

A layer norm's is γ x̂ + β, an activation's f(x) of its input (which it then keeps in place of its derivative),
a product's a b. A ReLU and a dropout keep nothing of the kind: theirs takes their input, made again
itself. Adding one: its function, and its line in `REBUILDS`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mesa_tune import ops
from mesa_tune.functional.bits import GATES
from mesa_tune.functional.curves import CURVES
from mesa_tune.functional.formula import Formula, Layers, Needs, Result, Routes, Static

if TYPE_CHECKING:
    from typing import Any

Tensors = Sequence[Tensor]
References = Sequence[Tensor | None]


@dataclass(frozen=True)
class Rebuild:
    """`run(static, lossy, exact, references, inputs)` is the output again.

    `kept` names, for each lossy tensor of the function, the input that it is (`kept_is_input`), or whose
    shape and dtype it has. `exact` are places in `Result.exact`; `references` inputs that are there anyway
    (parameters), `inputs` ones that are made again themselves. `when(static, needs)`: whether a call keeps
    what that takes.
    """

    run: Callable[[Static, Tensors, Tensors, References, Tensors], Tensor]
    kept: tuple[int, ...] = (0,)
    kept_is_input: bool = False
    exact: tuple[int, ...] = ()
    references: tuple[int, ...] = ()
    inputs: tuple[int, ...] = ()
    when: Callable[[Static, Needs], bool] = lambda static, needs: True


def row_norm(
    static: Static, lossy: Tensors, exact: Tensors, references: References, inputs: Tensors
) -> Tensor:
    """γ x̂ + β along the last dimensions; without β, one reference."""
    return _affine(lossy[0], references, lambda each: each)


def _affine(normalized: Tensor, references: References, shaped: Callable[[Tensor], Tensor]) -> Tensor:
    weight, bias = (*references, None)[:2]
    y = normalized if weight is None else normalized * shaped(weight)
    return y if bias is None else y.add_(shaped(bias))


def channel_norm(
    static: Static, lossy: Tensors, exact: Tensors, references: References, inputs: Tensors
) -> Tensor:
    """γ x̂ + β by channel, the second dimension."""
    rest = lossy[0].dim() - 2
    return _affine(lossy[0], references, lambda each: each.view([1, -1] + [1] * rest))


def pointwise_input(
    static: Static, lossy: Tensors, exact: Tensors, references: References, inputs: Tensors
) -> Tensor:
    """f(x)."""
    kind, parameters, _ = static
    return CURVES[kind].value(lossy[0], *parameters)


def gate(static: Static, lossy: Tensors, exact: Tensors, references: References, inputs: Tensors) -> Tensor:
    """ReLU and its kind, of the input made again; what ReLU shut is known exactly."""
    kind, _, parameters = static
    y = GATES[kind].value(inputs[0], *parameters)
    return y.masked_fill(ops.unpack_bits(exact[0], y.shape), 0) if kind == "relu" else y


def product(
    static: Static, lossy: Tensors, exact: Tensors, references: References, inputs: Tensors
) -> Tensor:
    """a b."""
    return lossy[0] * lossy[1]


def scaled(static: Static, lossy: Tensors, exact: Tensors, references: References, inputs: Tensors) -> Tensor:
    """x times a statistic by row, which is there anyway."""
    (statistic,) = references
    assert statistic is not None
    return lossy[0] * statistic


def dropped(
    static: Static, lossy: Tensors, exact: Tensors, references: References, inputs: Tensors
) -> Tensor:
    """The input, made again, where the mask of the forward lets it through."""
    (x,), (mask,) = inputs, exact
    return x * ops.unpack_bits(mask, x.shape).to(x.dtype).div_(1 - static[0])


def itself(static: Static, lossy: Tensors, exact: Tensors, references: References, inputs: Tensors) -> Tensor:
    """What is kept is the output."""
    return lossy[0]


def _normalizes(static: Static, needs: Needs) -> bool:
    return needs[0] or needs[1]


def _batch_normalizes(static: Static, needs: Needs) -> bool:
    return needs[1] or (needs[0] and static[0])


def _keeps_both(static: Static, needs: Needs) -> bool:
    in_place = static[0]
    return needs[0] and needs[1] and not in_place


def _is_plain_dropout(static: Static, needs: Needs) -> bool:
    _, feature, alpha, _ = static
    return not (feature or alpha)


REBUILDS: dict[str, Rebuild] = {
    "layer_norm": Rebuild(row_norm, references=(1, 2), when=_normalizes),
    "rms_norm": Rebuild(row_norm, references=(1,)),
    "batch_norm": Rebuild(channel_norm, references=(1, 2), when=_batch_normalizes),
    "group_norm": Rebuild(channel_norm, references=(1, 2), when=_normalizes),
    "pointwise_input": Rebuild(pointwise_input, kept_is_input=True),
    "gate": Rebuild(gate, kept=(), exact=(0,), inputs=(0,)),
    "mul": Rebuild(product, kept=(0, 1), kept_is_input=True, when=_keeps_both),
    "scale": Rebuild(scaled, kept_is_input=True, references=(1,), when=lambda static, needs: needs[1]),
    "dropout": Rebuild(dropped, kept=(), exact=(0,), inputs=(0,), when=_is_plain_dropout),
    "softmax": Rebuild(itself, when=lambda static, needs: static[1] is None),
}


def input_forward(static: Static, needs: Needs, x: Tensor) -> Result:
    """A function of one tensor that keeps its input, because its output is to be made again from it."""
    kind, parameters, _ = static
    return Result(CURVES[kind].value(x, *parameters), lossy=(x,))


def input_backward(
    static: Static, needs: Needs, lossy: list[Tensor], exact: "Any", grad: Tensor
) -> tuple[Tensor | None]:
    """The derivative at the input as decoded: biased, unlike the derivative as decoded."""
    kind, parameters, dtype = static
    curve, x = CURVES[kind], lossy[0].to(grad.dtype)
    return (curve.back(grad, curve.kept(x, torch.empty(0), *parameters)).to(dtype),)


POINTWISE_INPUT = Formula(input_forward, input_backward, "the input, where another layer derives the output")
FORMULAS = {"pointwise_input": POINTWISE_INPUT}
ROUTES: Routes = {}
LAYERS: Layers = {}
