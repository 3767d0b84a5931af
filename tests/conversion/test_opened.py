"""PyTorch's own Python functions: their bodies are routed call by call, under names of their own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mesa_tune as mt
from mesa_tune.conversion.hooked import HOOKED
from mesa_tune.conversion.opened import OPENED
from mesa_tune.formulas.table import ROUTES
from tests.builders import Checkpointed, conversion, policy_of
from tests.conformance.running import relative_error
from tests.step_memory import Composed

SHAPE = (16, 12, 64)


def net(function: Callable[[Tensor], Tensor]) -> nn.Module:
    """A function between two divisions by the user."""

    def forward(model: Any, x: Tensor) -> Tensor:
        h = model.first(x)
        y = function(h / (2 + h.tanh()))
        return (y / (2 + y.tanh())).square().sum()

    return Composed(forward, first=nn.Linear(64, 64))


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "norm": lambda h: h.norm(dim=-1),
    "normalize": lambda h: F.normalize(h, p=3.0, dim=-1),
    "gaussian_nll_loss": lambda h: F.gaussian_nll_loss(h, h.roll(1, 0), h.square() + 0.1),
    "lp_pool1d": lambda h: F.lp_pool1d(h, 2.0, 4),
    "softmin": lambda h: F.softmin(h, dim=-1),
    "gumbel_softmax": lambda h: F.gumbel_softmax(h, dim=-1),
    "local_response_norm": lambda h: F.local_response_norm(h, 3),
    "poisson_nll_loss": lambda h: F.poisson_nll_loss(h, h.detach().abs(), full=True),
    "soft_margin_loss": lambda h: F.soft_margin_loss(h, h.detach().sign()),
    "triplet_margin_loss": lambda h: F.triplet_margin_loss(h, h.roll(1, 0), h.roll(1, 1)),
    "linear_cross_entropy": lambda h: F.linear_cross_entropy(
        h.flatten(0, 1), torch.linspace(-1, 1, 640).view(10, 64), torch.arange(192) % 10
    ),
}


def step(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    torch.manual_seed(0)
    y = model(x)
    y.backward()
    return y.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def converted(plain: nn.Module) -> nn.Module:
    return mt.convert(copy.deepcopy(plain), mt.Policy.uniform(level=256), min_elements=0)


def layers(model: nn.Module) -> dict[str, str]:
    return {name: tag for tag, _, name in conversion(model).catalog.layers()}


def test_what_is_opened_is_neither_routed_nor_left_to_the_hooks() -> None:
    assert F.normalize in ROUTES
    assert F.gaussian_nll_loss in OPENED
    assert F.gaussian_nll_loss not in ROUTES
    # The hooks would never see it: its body's calls are none of the listed functions.
    assert not HOOKED.keys() & OPENED.keys()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_bodies_give_pytorchs_bits_and_near_gradients(name: str) -> None:
    plain, x = net(FUNCTIONS[name]), torch.randn(SHAPE)
    y, found = step(converted(plain), x)
    expected, exact = step(plain, x)
    assert torch.equal(y, expected)
    assert relative_error(found, exact) < 2e-3


def test_calls_inside_are_named_by_the_function_and_leave_the_users_numbers_alone() -> None:
    model = converted(net(FUNCTIONS["gaussian_nll_loss"]))
    step(model, torch.randn(SHAPE))
    found = layers(model)
    assert "gaussian_nll_loss.0.div.0" in found
    assert {"div.0", "div.1"} <= set(found)
    assert not [name for name in found if name.startswith(("div.2", "gaussian_nll_loss.1"))]


# `gaussian_nll_loss` branches by the values of a tensor: plain PyTorch does not trace it in one graph either.
TRACED = [
    pytest.param(name, marks=() if name == "softmin" else pytest.mark.slow("compile"))
    for name in sorted(set(FUNCTIONS) - {"gaussian_nll_loss"})
]


@pytest.mark.parametrize("name", TRACED)
def test_bodies_trace_in_one_graph_under_the_names_that_they_have_without(name: str) -> None:
    plain, x = net(FUNCTIONS[name]), torch.randn(SHAPE)
    traced, eager = (converted(plain) for _ in range(2))
    compiled: Any = torch.compile(traced, fullgraph=True, backend="aot_eager")
    y, found = step(compiled, x)
    expected, exact = step(plain, x)
    torch.testing.assert_close(y, expected)
    assert relative_error({key.removeprefix("_orig_mod."): grad for key, grad in found.items()}, exact) < 2e-3
    step(eager, x)
    if name not in {"linear_cross_entropy", "local_response_norm"}:  # PyTorch traces other calls of these two
        assert layers(traced) == layers(eager)


def test_a_rule_reaches_a_call_inside() -> None:
    policy = policy_of("on softmax:\n    by_name: softmin.0.softmax.0\n    level: 4\n")
    plain, x = net(FUNCTIONS["softmin"]), torch.randn(SHAPE)
    model = mt.convert(copy.deepcopy(plain), policy, min_elements=0)
    assert relative_error(step(model, x)[1], step(plain, x)[1]) > 0


def test_a_name_inside_a_call_of_a_module_that_is_not_there_is_refused() -> None:
    policy = mt.Policy.parse("on softmax:\n    by_name: head.softmin.0.softmax.0\n    level: 4\n")
    with pytest.raises(mt.PolicyError, match=r"no softmax layer 'head.softmin.0.softmax.0'"):
        mt.convert(net(FUNCTIONS["softmin"]), policy)


def test_calls_inside_are_routed_in_a_checkpointed_part() -> None:
    model = converted(Checkpointed(net(FUNCTIONS["softmin"]), reentrant=False))
    step(model, torch.randn(SHAPE))
    assert "part.softmin.0.softmax.0" in layers(model)
