"""Complex, sparse and nested tensors and scripted modules: exact, one warning for all, named by a profile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mesa_tune as mt
from mesa_tune import notice
from tests.builders import gradients
from tests.step_memory import squares

pytestmark = pytest.mark.filterwarnings(
    "ignore:.torch.jit:DeprecationWarning",
    "ignore:The PyTorch API of nested tensors:UserWarning",
    "ignore:Sparse CSR tensor support",
)


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Any:
        return self.down(F.gelu(self.norm(self.up(x))))


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(64, 64, dtype=torch.complex64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = x.to(torch.complex64)
        for weight in self.weights:
            h = torch.tanh(h @ weight)
        return h.abs()


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        return x.to_sparse() @ self.weight


def scripted() -> nn.Module:
    traced: Any = torch.jit.trace(Part(), torch.randn(4, 64))
    return nn.Sequential(torch.jit.script(Part()), traced)


def dense(n: int) -> Tensor:
    return torch.randn(n * 16, 64)


def nested(layout: torch.layout) -> Callable[[int], Tensor]:
    def batch(n: int) -> Tensor:
        parts = [torch.randn(4 + int(torch.randint(0, 12, ())), 64) for _ in range(n)]
        return torch.nested.nested_tensor(parts, layout=layout)

    return batch


def of_values(model: nn.Module, batch: Tensor) -> Tensor:
    return torch.cat([part.flatten() for part in model(batch).unbind()]).square().mean()


class Case(NamedTuple):
    model: Callable[[], nn.Module]
    batch: Callable[[int], Tensor] = dense
    loss: Callable[[Any, Any], Any] = squares
    warning: str = "complex, sparse and nested tensors stay uncompressed"


CASES = {
    "complex": Case(Complex),
    "sparse": Case(Sparse),
    "jagged": Case(Part, nested(torch.jagged), of_values),
    "strided nested": Case(Part, nested(torch.strided), of_values),
    "scripted": Case(scripted, warning="what torch.jit compiled stays uncompressed"),
}


@pytest.mark.parametrize("name", CASES)
def test_they_stay_exact_and_one_warning_says_so(name: str) -> None:
    case, policy = CASES[name], mt.Policy.uniform(level=16)
    torch.manual_seed(0)
    batch, model = case.batch(8), case.model()
    plain = gradients(model, batch, run=lambda given: case.loss(model, given))
    notice._given.clear()

    def converted() -> dict[str, Tensor]:
        mt.convert(model, policy, min_elements=0)
        gradients(model, batch, run=lambda given: case.loss(model, given))
        return gradients(model, batch, run=lambda given: case.loss(model, given))

    with pytest.warns(UserWarning, match=case.warning) as said:
        ours = converted()
    assert len([each for each in said if "mesa-tune" in str(each.message)]) == 1
    assert list(plain) == list(ours)
    assert all(torch.equal(plain[key], ours[key]) for key in plain)


@pytest.mark.parametrize("name", ["complex", "jagged", "scripted"])
@pytest.mark.filterwarnings("ignore:mesa-tune")
def test_a_profile_names_what_stays_exact(name: str) -> None:
    case = CASES[name]
    work = mt.Workload(case.model, case.batch, case.loss, batch_size=16)
    profile = mt.profile(work, options=[mt.LayerSettings(level=16)], seeds=1)
    named = sum(entry.bytes for entry in profile.exact)
    assert named > 0.5 * profile.saved_bytes
