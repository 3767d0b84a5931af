"""Routes take the arguments of their functions, with the same defaults."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from mesa_tune.codecs import CODECS, Spec
from mesa_tune.formulas.table import ROUTES
from tests.functional_cases import served

EXACT = Spec("quantize", 8, 0, 256, 0, True, 0)


def defaults(function: Callable[..., Any], names: Collection[str]) -> dict[str, Any]:
    """Those of its arguments `names` that have one."""
    try:
        parameters = inspect.signature(function).parameters.items()
    except ValueError:  # built in C++
        return {}
    return {name: p.default for name, p in parameters if name in names and p.default is not p.empty}


def test_defaults_are_pytorchs() -> None:
    count = 0
    for function, route in ROUTES.items():
        right = defaults(function, route.parameters)
        assert defaults(route.serve, right) == right, function.__name__
        count += len(right)
    assert count > 100


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


@pytest.mark.parametrize("name", CODECS)
def test_elements_have_four_bytes_unless_said(name: str) -> None:
    spec = Spec(name, 4, 16, 256, 0, True, 0, drop=0.5, ema_decay=0.9)
    exact = spec._replace(exact=True, levels=0)
    for each in (spec, exact) if name in ("drop", "offload") else (spec,):
        sizes = [CODECS[name].packed_bytes((20, 512), each, *rest) for rest in ((), (4,))]
        assert sizes[0] == sizes[1]
