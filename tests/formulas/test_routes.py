"""Routes take the arguments of their functions, with the same defaults, and work in place where these do."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mesa_tune.codecs import CODECS, Spec
from mesa_tune.formulas.table import ROUTES
from tests.functional_cases import served

EXACT = Spec("quantize", 8, 0, 256, 0, True, 0)


def signature(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except ValueError:  # built in C++
        return None


DEFAULTS = [
    pytest.param(function, name, parameter.default, id=f"{function.__name__}-{name}")
    for function in ROUTES
    for name, parameter in getattr(signature(function), "parameters", {}).items()
    if parameter.default is not inspect.Parameter.empty and name in ROUTES[function].parameters
]


@pytest.mark.parametrize(("function", "name", "default"), DEFAULTS)
def test_defaults_are_pytorchs(function: Callable[..., Any], name: str, default: Any) -> None:
    assert inspect.signature(ROUTES[function].serve).parameters[name].default == default


# Functions without a signature, by a call without the argument and one with its default.
SPELLED: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "glu": (F.glu, (), {"dim": -1}),
    "softmax": (F.softmax, (-1,), {"dtype": None}),
    "threshold": (torch.threshold, (0.1, 5.0), {}),
    "celu": (torch.celu, (), {"alpha": 1.0}),
    "selu": (torch.selu, (), {}),
    "clamp": (torch.clamp, (-0.5,), {"max": None}),
    "var": (torch.var, (-1,), {"correction": 1}),
    "cross entropy": (F.cross_entropy, (torch.randint(0, 30, (20,)),), {"reduction": "mean"}),
}


@pytest.mark.parametrize("name", SPELLED)
def test_what_is_left_out_is_the_default(name: str) -> None:
    function, arguments, rest = SPELLED[name]
    x = torch.randn(20, 30, requires_grad=True)
    ours = [served(function, EXACT, x, *arguments, **given) for given in ({}, rest)]
    right = function(x, *arguments)
    (expected,) = torch.autograd.grad(right.sum(), x)
    for y in ours:
        assert torch.equal(y, right)
        torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], expected)


IN_PLACE: dict[str, Callable[[Callable[..., Any], Tensor], Any]] = {
    "relu": lambda run, x: run(F.relu, x, inplace=True),
    "relu6": lambda run, x: run(F.relu6, x, inplace=True),
    "hardtanh": lambda run, x: run(F.hardtanh, x, inplace=True),
    "leaky_relu": lambda run, x: run(F.leaky_relu, x, inplace=True),
    "threshold": lambda run, x: run(F.threshold, x, 0.1, 5.0, inplace=True),
    "threshold_": lambda run, x: run(torch.threshold_, x, 0.1, 5.0),
    "elu": lambda run, x: run(F.elu, x, inplace=True),
    "celu": lambda run, x: run(F.celu, x, inplace=True),
    "selu": lambda run, x: run(F.selu, x, inplace=True),
    "silu": lambda run, x: run(F.silu, x, inplace=True),
    "mish": lambda run, x: run(F.mish, x, inplace=True),
    "hardswish": lambda run, x: run(F.hardswish, x, inplace=True),
    "hardsigmoid": lambda run, x: run(F.hardsigmoid, x, inplace=True),
    "tanh_": lambda run, x: run(torch.tanh_, x),
    "sigmoid_": lambda run, x: run(torch.sigmoid_, x),
    "clamp_": lambda run, x: run(torch.clamp_, x, -0.5, 0.5),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_is_in_place(name: str) -> None:
    leaf = torch.randn(20, 30, requires_grad=True)
    ours, theirs = leaf * 1.0, leaf * 1.0
    y = IN_PLACE[name](lambda function, *rest, **named: served(function, EXACT, *rest, **named), ours)
    expected = IN_PLACE[name](lambda function, *rest, **named: function(*rest, **named), theirs)
    assert torch.equal(y, expected)
    assert torch.equal(ours, theirs)
    assert y.data_ptr() == ours.data_ptr()
    found, right = (torch.autograd.grad(out.square().sum(), leaf)[0] for out in (y, expected))
    torch.testing.assert_close(found, right)


@pytest.mark.parametrize("name", CODECS)
def test_elements_have_four_bytes_unless_said(name: str) -> None:
    spec = Spec(name, 4, 16, 256, 0, True, 0, drop=0.5, ema_decay=0.9)
    exact = spec._replace(exact=True, levels=0)
    for each in (spec, exact) if name in ("drop", "offload") else (spec,):
        sizes = [CODECS[name].packed_bytes((20, 512), each, *rest) for rest in ((), (4,))]
        assert sizes[0] == sizes[1]
