"""What tests of cached calls share."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mesa_tune as mt
from mesa_tune.engine import call, routing
from mesa_tune.engine.cache import CallCache
from mesa_tune.engine.function import MISS
from mesa_tune.formulas.table import ROUTES

X = torch.randn(6, 16, 12, generator=torch.Generator().manual_seed(0))


@contextmanager
def refusing(*functions: Any) -> Iterator[None]:
    """The routes of these functions refuse."""
    with pytest.MonkeyPatch.context() as patch:
        for function in functions:
            route = copy.copy(ROUTES[function])
            object.__setattr__(route, "serve", refuse)
            patch.setitem(ROUTES, function, route)
        yield


@contextmanager
def uncached() -> Iterator[None]:
    """Each call is planned."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (routing, call):
            patch.setattr(module, "run_cached", lambda *_: MISS)
        patch.setattr(CallCache, "note", lambda *_: None)
        yield


def twins(plain: nn.Module, level: int = 16, **settings: Any) -> tuple[Any, Any]:
    """Two converted copies of a model: one for cached calls, and one whose calls are planned each time."""
    policy = mt.Policy.uniform(level=level, **settings)
    one, other = (mt.convert(copy.deepcopy(plain), policy, seed=1, min_elements=0) for _ in range(2))
    return one, other


def step(model: nn.Module, x: Tensor = X, *more: Any) -> list[Tensor | None]:
    """The output and all gradients of a step."""
    model.zero_grad(set_to_none=True)
    y = model(x, *more)
    y.square().mean().backward()
    return [y.detach(), *[parameter.grad for parameter in model.parameters()]]


def check_step(model: nn.Module, twin: nn.Module, *given: Any, refused: Iterable[Any] = ()) -> None:
    """A step is that of the twin, whose calls are planned; the routes of `refused` are not asked for it."""
    with uncached():
        right = step(twin, *given)
    with refusing(*refused):
        assert same(step(model, *given), right)


def same(one: list[Tensor | None], other: list[Tensor | None]) -> bool:
    return all(
        a is b is None or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(one, other, strict=True)
    )


def refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("asked again")
