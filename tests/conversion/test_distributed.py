"""Two real processes: DDP and FSDP2 under a policy, converted before and after wrapping."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import mesa_tune as mt
from mesa_tune.conversion.layers import Catalog
from tests import distributed_worker as worker
from tests import process_group
from tests.builders import Patch, conversion, images, workload
from tests.conformance.running import relative_error
from tests.distributed_worker import ORDERS, POLICIES, STEPS, WRAPPERS, Gradients
from tests.process_group import WORLD

pytestmark = pytest.mark.usefixtures("without_variants")

Results = list[dict[str, Any]]


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Policy files that were made for the plain model."""
    folder = tmp_path_factory.mktemp("group")
    about = f"# model ViT (layers {Catalog.of(worker.model()).fingerprint})\n"
    for name, rules in POLICIES.items():
        (folder / f"{name}.txt").write_text(worker.HEAD + about + rules)
    work = workload(worker.model, images, batch_size=worker.SAMPLES)
    profile = mt.profile(work, options=[mt.LayerSettings(level=level) for level in (4, 16)], seeds=1)
    profile.save(folder / "profile.json")
    mt.search_policy(profile, "75%", trials=0).save(folder / "plan.json")
    return folder


@pytest.fixture(name="results", scope="module")
def _results(folder: Path) -> Results:
    """What each process found."""
    return process_group.results("tests.distributed_worker", folder)


@pytest.fixture(name="right", scope="module")
def _right() -> list[Gradients]:
    """The gradients of one process that has all samples, plain."""
    return worker.steps(worker.model(), None)


PROCESSES = pytest.mark.slow("processes")
WAYS = [f"{how}, {order}" for how in WRAPPERS for order in ORDERS]


@PROCESSES
def test_an_exact_policy_has_the_gradients_of_one_process(results: Results, right: list[Gradients]) -> None:
    for way in WAYS:
        for found in (each[f"exact, {way}"] for each in results):
            errors = [relative_error(one, two) for one, two in zip(found, right, strict=True)]
            assert max(errors) < 1e-12, way


@PROCESSES
@pytest.mark.parametrize("policy", ["4 bits", "derive"])
def test_a_compressed_one_has_the_error_of_one_process(
    policy: str, results: Results, right: list[Gradients], folder: Path
) -> None:
    low, high = _interval(folder / f"{policy}.txt")
    for way in WAYS:
        found = [each[f"{policy}, {way}"] for each in results]
        mean = sum(relative_error(one, two) for one, two in zip(found[0], right, strict=True)) / STEPS
        assert 0.7 * low < mean < 1.4 * high, way
        for one, other in zip(*found, strict=True):
            assert all(torch.equal(one[name], other[name]) for name in one), way


def _interval(path: Path) -> tuple[float, float]:
    """The least and the largest error of one process in which two models have half the samples each."""
    right = worker.steps(worker.model(), None)
    errors = [_error_of_halves(path, seed, right) for seed in range(8)]
    return min(errors), max(errors)


def _error_of_halves(path: Path, seed: int, right: list[Gradients]) -> float:
    halves = [
        worker.steps(worker.convert(worker.model(), path, 100 * seed + rank), rank) for rank in range(WORLD)
    ]
    means = [{name: (one[name] + two[name]) / 2 for name in one} for one, two in zip(*halves, strict=True)]
    return sum(relative_error(one, two) for one, two in zip(means, right, strict=True)) / STEPS


@PROCESSES
def test_two_ranks_round_differently(results: Results) -> None:
    assert len({each["key"] for each in results}) == WORLD
    one, other = (each["own gradient"] for each in results)
    assert 1e-5 < relative_error(one, other) < 0.1


@PROCESSES
@pytest.mark.parametrize("how", WRAPPERS)
def test_training_goes_as_in_one_process(how: str, results: Results) -> None:
    plain = worker.trained(worker.model(), None)
    assert plain[-1] < 0.8 * plain[0]
    for found in (each[f"{how} trained"] for each in results):
        assert found[-1] == pytest.approx(plain[-1], rel=0.05)


@PROCESSES
def test_one_process_may_monitor_alone(results: Results) -> None:
    assert [each["DDP monitored by one"][1] for each in results] == [4, 0]
    for each in results:
        assert each["DDP monitored by one"][0] == each["DDP trained"]
        assert "the parameters are sharded" in each["FSDP2 monitored"]


@PROCESSES
def test_a_reading_of_the_first_process_changes_the_plan_of_all(results: Results) -> None:
    first, second = (each["planned again"] for each in results)
    before, after = first["policies"]
    assert before != after
    assert second["policies"] == first["policies"]
    assert second["readings"] == first["readings"]
    assert first["readings"][0].noise_ratio > 1e-6
    assert second["losses"] == first["losses"]


def test_the_state_of_one_process_is_loaded_by_the_other(folder: Path, monkeypatch: Patch) -> None:
    def key(rank: int, state: dict[str, Any] | None = None) -> int:
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: WORLD)
        network = worker.convert(worker.model(), folder / "4 bits.txt", 9 if state else 1)
        if state is None:
            worker.steps(network, 0)
            states.append(mt.state_dict(network))
        else:
            mt.load_state_dict(network, state)
        return int(conversion(network).key(torch.device("cpu")))

    states: list[dict[str, Any]] = []
    uninterrupted = [key(rank) for rank in range(WORLD)]
    assert len(set(uninterrupted)) == WORLD
    assert [key(rank, states[0]) for rank in range(WORLD)] == uninterrupted
