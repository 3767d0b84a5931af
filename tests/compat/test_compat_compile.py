"""Layers of the projects trace in one graph, and keep in compiled code what they keep in eager."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import mesa_tune.compat.mesa as ms
from mesa_tune.compat import actnn
from mesa_tune.compat.dropit import to_dropit
from tests.compat_measures import error, gradient


def mesa() -> nn.Module:
    return nn.Sequential(ms.Linear(64, 64, mesa=True), ms.LayerNorm(64, mesa=True), ms.GELU(mesa=True))


def adaptive() -> nn.Module:
    actnn.set_optimization_level("L3")
    return actnn.QModule(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)))


def dropping() -> nn.Module:
    return to_dropit(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)), gamma=0.5)


COMPILE = pytest.mark.slow("compile")


@pytest.mark.parametrize(
    "make", [mesa, pytest.param(adaptive, marks=COMPILE), pytest.param(dropping, marks=COMPILE)]
)
def test_layers_trace_in_one_graph(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = make(), torch.randn(128, 64)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    eager, traced = (gradient(model, lambda run=run: run(x).square().sum()) for run in (model, compiled))  # type: ignore[misc]
    assert torch.equal(compiled(x), model(x))
    # Two draws of the rounding noise, or for DropIT the same choice.
    assert error(traced, eager) < (0.5 if make is adaptive else 1e-3)
