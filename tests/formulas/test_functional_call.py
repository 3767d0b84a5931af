"""`torch.func.functional_call`: tensors that stand for parameters are stored exactly, as parameters are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import mesa_tune as mt
from tests.builders import ViT
from tests.conformance.running import relative_error
from tests.step_memory import Composed

X = torch.randn(4, 24, 16, generator=torch.Generator().manual_seed(1))
# Linear layers alone, whose input gradient depends on nothing but the weights.
EXACT_INPUTS = mt.Policy.uniform(level=2)

Parameters = dict[str, Tensor]


def tied() -> nn.Module:
    """A model that uses the weight of a module that it never calls."""
    layers = {"embed": nn.Linear(16, 16), "head": nn.Linear(16, 16)}
    return Composed(lambda m, x: F.linear(m.embed(x), m.head.weight.T), **layers)


def outer() -> nn.Module:
    """A model that computes the weights of a part of its own."""

    def forward(model: Any, x: Tensor) -> Any:
        weights = {"weight": model.lift(model.target.weight), "bias": model.target.bias * 2}
        return functional_call(model.target, weights, (x,))

    return Composed(forward, lift=nn.Linear(16, 16), target=nn.Linear(16, 16))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16, bias=False)),
    "tied": tied,
    "inside": outer,
    "nested": lambda: nn.Sequential(nn.Sequential(nn.Linear(16, 16)), nn.Linear(16, 16)),
}
OTHERS = ("tied", "inside", "nested")
SWAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "leaf": lambda p: p.detach().clone().requires_grad_(),
    "no gradient": lambda p: p.detach().clone(),
    "computed": lambda p: p * 1.5,
    "view": lambda p: torch.cat([p.detach().flatten(), p.new_ones(3)])[:-3].view_as(p).requires_grad_(),
}


def swapped(model: nn.Module, how: str) -> Parameters:
    return {name: SWAPS[how](p) for name, p in model.named_parameters()}


def input_gradient(model: nn.Module, parameters: Parameters) -> Tensor:
    x = X.clone().requires_grad_()
    return torch.autograd.grad(functional_call(model, parameters, (x,)).square().sum(), x)[0]


def converted(model: nn.Module) -> nn.Module:
    return mt.convert(copy.deepcopy(model), EXACT_INPUTS, seed=1, min_elements=0)


@pytest.mark.parametrize(
    ("kind", "how"),
    [*(("linear", how) for how in SWAPS), *((kind, how) for kind in OTHERS for how in ("leaf", "computed"))],
)
def test_what_stands_for_a_parameter_is_exact(kind: str, how: str) -> None:
    plain = MODELS[kind]()
    model, right = converted(plain), input_gradient(plain, swapped(plain, how))
    for _ in range(4):
        assert torch.equal(input_gradient(model, swapped(model, how)), right)


def test_it_follows_and_precedes_calls_with_the_models_own_parameters() -> None:
    plain = MODELS["linear"]()
    model = converted(plain)
    for turn in range(6):
        found, right = (
            input_gradient(each, swapped(each, "computed") if turn % 2 else {}) for each in (model, plain)
        )
        assert torch.equal(found, right)


def test_activations_of_a_functional_call_are_encoded() -> None:
    plain = ViT()
    model = converted(plain)
    parameters = swapped(plain, "leaf")
    grads = []
    for each in (plain, model):
        y = functional_call(each, parameters, (X,))
        found = torch.autograd.grad(y.square().sum(), [*parameters.values()])
        grads.append(dict(zip(parameters, found, strict=True)))
    assert 1e-3 < relative_error(grads[1], grads[0]) < 1


@pytest.mark.parametrize("kind", [pytest.param("tied", marks=pytest.mark.slow("compile")), "inside"])
def test_it_traces(kind: str) -> None:
    plain = MODELS[kind]()
    model = converted(plain)

    def step(parameters: Parameters, x: Tensor) -> Any:
        return functional_call(model, parameters, (x,))

    traced = torch.compile(step, fullgraph=True, backend="aot_eager")
    x = X.clone().requires_grad_()
    (found,) = torch.autograd.grad(traced(swapped(plain, "computed"), x).square().sum(), x)
    torch.testing.assert_close(found, input_gradient(plain, swapped(plain, "computed")), rtol=1e-5, atol=1e-5)
