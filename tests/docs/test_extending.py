"""docs/extending.md: its examples work unchanged, registered in the tables that the page names."""

import copy
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

import mesa_tune as mt
from mesa_tune.codecs import CODECS
from mesa_tune.formulas.table import ROUTES
from mesa_tune.measure.memory.meter import Meter
from mesa_tune.policy import Policy
from mesa_tune.policy.settings import STORES

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"


def block(kind: str) -> str:
    """Return the page's code block of a kind: `python codec`, `python function`, `policy`."""
    match = re.search(rf"```{kind}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert match is not None
    return match[1]


def example(name: str) -> ModuleType:
    """Return the page's Python example as a module."""
    module = ModuleType(name)
    exec(block(f"python {name}"), vars(module))
    return module


class Waves(nn.Linear):
    """sinc after a linear layer."""

    def forward(self, input: Tensor) -> Tensor:
        return torch.sinc(super().forward(input))


def saved(model: nn.Module, x: Tensor) -> int:
    with Meter() as meter:
        y = model(x)
        return int(meter.live_bytes) - int(y.untyped_storage().nbytes())


def error(model: nn.Module, plain: nn.Module, x: Tensor) -> float:
    gradients, exact = (
        torch.autograd.grad(network(x).square().sum(), list(network.parameters()))
        for network in (model, plain)
    )
    squared = sum(float((a - b).square().sum()) for a, b in zip(gradients, exact, strict=True))
    return squared / sum(float(b.square().sum()) for b in exact)


def test_the_codec(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setitem(CODECS, "half", example("codec"))
    STORES.append("half")
    request.addfinalizer(lambda: STORES.remove("half"))
    policy = Policy.parse(block("policy"))
    assert Policy.parse(policy.dumps()) == policy
    plain, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), torch.randn(256, 64)
    model = mt.convert(copy.deepcopy(plain), policy)
    assert saved(model, x) == 256 * 64 * 2 + 256 // 8  # and a bit per row: which are zero
    assert 0 < error(model, plain, x) < 1e-4


def test_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    family = example("function")
    for function, route in family.ROUTES.items():
        monkeypatch.setitem(ROUTES, function, route)
    plain, x = Waves(64, 64), torch.randn(256, 64)
    policy = "# mesa-tune policy 1\non pointwise:\n    by_index: all\n    level: 256\n"
    model = mt.convert(copy.deepcopy(plain), Policy.parse(policy))
    assert torch.equal(model(x), plain(x))
    assert saved(model, x) < 0.3 * saved(plain, x)
    assert 0 < error(model, plain, x) < 1e-3
