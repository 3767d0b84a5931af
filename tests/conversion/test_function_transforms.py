"""Transforms of `torch.func` and forward-mode differentiation: right, as plain PyTorch, with one warning."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

import mesa_tune as mt
import mesa_tune.functional as mesa_functional
import mesa_tune.nn as mesa_nn
from mesa_tune import notice
from tests.builders import gradients
from tests.conformance.running import relative_error
from tests.step_memory import Composed

X = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
WARNING = r"under transforms of torch\.func .* uncompressed"


def network() -> nn.Module:
    """Modules, a function, and what only hooks reach."""

    def forward(model: Any, x: Tensor) -> Tensor:
        y = F.gelu(model.first(x))
        return torch.logaddexp(model.second(y), y.sinh())

    return Composed(forward, first=nn.Linear(16, 16), second=nn.Linear(16, 16))


@pytest.fixture(autouse=True)
def _warnings_are_new() -> None:
    notice._given.clear()


def loss(model: nn.Module, parameters: dict[str, Tensor], x: Tensor) -> Any:
    return torch.func.functional_call(model, parameters, (x,)).square().sum()


def dual(model: nn.Module) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(X, X.flip(0)))).tangent


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


CASES: dict[str, Callable[[nn.Module], Any]] = {
    "grad": lambda m: torch.func.grad(lambda p: loss(m, p, X))(parameters(m)),
    "grad of an input": lambda m: torch.func.grad(lambda x: m(x).sum())(X),
    "vjp": lambda m: torch.func.vjp(m, X)[1](X),
    "jvp": lambda m: torch.func.jvp(m, (X,), (X.flip(0),)),
    "vmap": lambda m: torch.vmap(m)(X),
    "per-sample": lambda m: torch.vmap(torch.func.grad(partial(loss, m)), (None, 0))(parameters(m), X),
    "jacrev": lambda m: torch.func.jacrev(m)(X[0]),
    "jacfwd": lambda m: torch.func.jacfwd(m)(X[0]),
    "hessian": lambda m: torch.func.hessian(lambda x: m(x).square().sum())(X[0]),
    "linearize": lambda m: torch.func.linearize(m, X)[1](X),
    "forward AD": dual,
}


def converted(model: nn.Module) -> nn.Module:
    return mt.convert(copy.deepcopy(model), mt.Policy.uniform(level=4), seed=1, min_elements=0)


@pytest.mark.parametrize("name", CASES)
def test_a_transform_over_a_converted_model(name: str) -> None:
    plain = network()
    model = converted(plain)
    right = CASES[name](plain)
    with pytest.warns(UserWarning, match=WARNING):
        found = CASES[name](model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        again = CASES[name](model)
    assert not [each for each in caught if "mesa-tune" in str(each.message)]
    for each in (found, again):
        assert all(map(torch.equal, tree_leaves(each), tree_leaves(right)))


@pytest.mark.filterwarnings("ignore:mesa-tune")
def test_a_transform_in_traced_code() -> None:
    plain = network()
    model = converted(plain)
    gradient = torch.func.grad(lambda p: loss(model, p, X))
    traced = torch.compile(gradient, backend="aot_eager", fullgraph=True)
    found, right = traced(parameters(plain)), CASES["grad"](plain)
    assert all(torch.allclose(found[name], right[name], atol=1e-5) for name in right)


@pytest.mark.filterwarnings("ignore:mesa-tune")
def test_the_steps_around_a_transform_are_as_without_it() -> None:
    plain = network()
    model, other = converted(plain), converted(plain)
    for _ in range(4):
        CASES["per-sample"](model)
        dual(model)
        found, right = gradients(model, X), gradients(other, X)
        assert all(torch.equal(found[name], right[name]) for name in right)
        assert relative_error(found, gradients(plain, X)) > 1e-4


def inside(transform: Callable[..., Any]) -> nn.Module:
    """A model that calls a transform in its forward."""

    def forward(model: Any, x: Tensor) -> Any:
        return model.last(transform(lambda y: F.gelu(model.inner(y)), model.inner(x)))

    return Composed(forward, inner=network(), last=nn.Linear(16, 16))


@pytest.mark.parametrize(
    "transform",
    [lambda f, h: torch.vmap(f)(h), lambda f, h: torch.func.jvp(f, (h,), (h.detach(),))[1]],
    ids=["vmap", "jvp"],
)
def test_a_transform_inside_a_forward(transform: Callable[..., Any]) -> None:
    plain = inside(transform)
    model = converted(plain)
    right = gradients(plain, X)
    with pytest.warns(UserWarning, match=WARNING):
        found = gradients(model, X)
    assert torch.equal(model(X), plain(X))
    assert 1e-4 < relative_error(found, right) < 1


@pytest.mark.filterwarnings("ignore:mesa-tune")
def test_a_gradient_transform_inside_a_forward_is_refused() -> None:
    model = converted(inside(lambda f, h: torch.func.grad(lambda y: f(y).sum())(h)))
    refused = partial(pytest.raises, mt.RunError, match=r"use torch\.autograd\.grad there")
    with refused():
        model(X)
    with refused(), mt.compress_saved(mt.Policy.uniform()):
        torch.func.grad(lambda y: y.square().sum())(X)


def test_functions_that_stand_alone_are_plain_under_a_transform() -> None:
    weight = torch.randn(8, 16, generator=torch.Generator().manual_seed(2))

    def summed(linear: Callable[..., Tensor], x: Tensor) -> Tensor:
        return linear(x, weight).square().sum()

    with pytest.warns(UserWarning, match=WARNING):
        found = torch.func.grad(partial(summed, mesa_functional.linear))(X)
    assert torch.equal(found, torch.func.grad(partial(summed, F.linear))(X))
    right = torch.func.grad(lambda x: F.gelu(x).sum())(X)
    assert torch.equal(torch.func.grad(lambda x: mesa_nn.GELU()(x).sum())(X), right)
