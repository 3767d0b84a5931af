"""Layers that processes share (DTensor): each stores its shard in fewer bits, however it was converted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional as F

import mesa_tune as mt
from mesa_tune.engine.wrappers import opened
from tests import process_group
from tests.conformance.running import relative_error
from tests.steps import tensor_parallel as parallel
from tests.steps.tensor_parallel import ORDERS, POLICIES, WRAPS

SHARES = {"8 bits": 0.6, "4 bits": 0.4, "derive": 0.6, "recompute": 0.7, "tile": 0.7}
"""Most saved bytes of the policies beside those of plain."""


@pytest.fixture(name="mesh", scope="module")
def _mesh() -> Iterator[DeviceMesh]:
    """A group of this process alone."""
    store = distributed.HashStore()  # type: ignore[attr-defined]
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    distributed.destroy_process_group()


@pytest.fixture(name="right", scope="module")
def _right() -> tuple[dict[str, Tensor], int]:
    """The gradient of the plain model in one process, and its saved bytes."""
    gradients, saved = parallel.steps(parallel.model(), None)
    return gradients[0], saved


def error_alone(policy: str, right: dict[str, Tensor]) -> float:
    """The gradient error of a policy on the model of one process."""
    llama = mt.convert(parallel.model(), POLICIES[policy], seed=0, min_elements=0)
    gradients, _ = parallel.steps(llama, POLICIES[policy])
    return sum(relative_error(each, right) for each in gradients) / len(gradients)


@pytest.mark.parametrize(
    ("policy", "order"),
    [("4 bits", ORDERS[0]), ("recompute", ORDERS[0]), ("derive", ORDERS[1]), ("tile", ORDERS[1])],
)
@pytest.mark.filterwarnings("ignore:mesa-tune. `tile` of")
def test_shards_are_stored_as_tensors_are(
    policy: str, order: str, mesh: DeviceMesh, right: tuple[dict[str, Tensor], int]
) -> None:
    llama = parallel.made(POLICIES[policy], order, "alone", mesh)
    gradients, saved = parallel.steps(llama, POLICIES[policy])
    error = sum(relative_error(each, right[0]) for each in gradients) / len(gradients)
    assert error == pytest.approx(error_alone(policy, right[0]), rel=0.5)
    assert saved < SHARES[policy] * right[1]


@pytest.mark.slow("processes")
def test_two_processes_have_the_gradients_of_one(
    tmp_path: Path, right: tuple[dict[str, Tensor], int]
) -> None:
    results: list[dict[str, Any]] = process_group.results("tests.steps.tensor_parallel", tmp_path)
    for found in results:
        for wrap in WRAPS:
            exact, plain = found[wrap]
            assert max(relative_error(each, right[0]) for each in exact) < 1e-12
            for policy, share in SHARES.items():
                alone = error_alone(policy, right[0])
                for order in ORDERS:
                    gradients, saved, said = found[f"{policy}, {order}, {wrap}"]
                    error = sum(relative_error(each, right[0]) for each in gradients) / len(gradients)
                    assert 0.6 * alone < error < 1.6 * alone, (policy, order, wrap)
                    assert saved < share * plain
                    assert all("`tile`" in text for text in said)


def test_what_consists_of_a_tensor_is_opened_and_made_again(mesh: DeviceMesh) -> None:
    whole = distribute_tensor(torch.randn(8, 4), mesh["tp"], [Shard(0)])
    inner, like = opened(whole)
    assert type(inner) is Tensor
    again = like(2 * inner)
    assert isinstance(again, DTensor)
    assert again.placements == whole.placements
    torch.testing.assert_close(again.full_tensor(), 2 * whole.full_tensor())
    plain = torch.ones(2)
    assert opened(plain)[0] is plain


def test_what_a_function_compares_or_exponentiates_stays_exact(mesh: DeviceMesh) -> None:
    """Of a softmax of DTensors its output is saved, which no hook may change."""

    class Softmax(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.softmax(x, -1) * 2

    model = mt.convert(Softmax(), mt.Policy.uniform(level=4), min_elements=0)
    x = torch.randn(64, 64)
    gradients = []
    for run in (model, Softmax()):
        given = distribute_tensor(x, mesh["tp"], [Replicate()]).requires_grad_()
        (run(given).full_tensor() * x).sum().backward()
        assert isinstance(given.grad, DTensor)
        gradients.append(given.grad.full_tensor())
    assert torch.equal(*gradients)
