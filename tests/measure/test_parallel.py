"""Estimates of data-parallel steps beside real processes; the fake group leaves nothing behind."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

import mesa_tune as mt
from mesa_tune.errors import WorkloadError
from tests import process_group
from tests.parallel_cases import CASES, POLICIES, WRAPS, Case, batch, loss, measured, sharded, workload
from tests.process_group import WORLD
from tests.step_memory import squares

c10d: Any = distributed_c10d  # the stubs lack most of it
dist: Any = distributed


def estimated(case: Case, world_size: int = WORLD) -> mt.Estimate:
    policy, wrap = POLICIES[case.policy], WRAPS[case.wrap]
    return mt.estimate(workload(case.accumulation), policy, parallelize=wrap, world_size=world_size)


@cache
def real_bytes() -> dict[str, Any]:
    """Return saved and peak bytes of all cases, in the first of two real processes."""
    with TemporaryDirectory() as folder:
        return process_group.results("tests.parallel_cases", Path(folder))[0]


@pytest.mark.slow("processes")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bytes_are_those_of_real_processes_however_the_model_is_wrapped(case: Case) -> None:
    step = estimated(case)
    assert (step.saved_bytes, step.peak_bytes) == real_bytes()[case.name]
    assert step.frame()["bytes"].sum() == step.saved_bytes


def test_a_share_of_the_weights_is_static() -> None:
    weights = sum(tensor.nbytes for tensor in workload().build().parameters())
    case = Case("FSDP2, resharded", "plain")
    alone, four = (estimated(case, world_size).static_bytes for world_size in (1, 4))
    assert alone - four == pytest.approx(3 * weights * 3 / 4, rel=0.01)  # weights and two states of Adam
    buckets = estimated(Case("DDP", "plain")).static_bytes - mt.estimate(workload()).static_bytes
    assert buckets == weights


def test_an_instance_is_estimated_and_stays_as_it_is() -> None:
    model = workload().build()
    fit = mt.estimate(model, batch(8), loss, parallelize=sharded, world_size=WORLD)
    assert fit == estimated(Case("FSDP2", "plain"))
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    assert not any(isinstance(module, FSDPModule) for module in model.modules())


def test_the_largest_batch_is_found_with_the_wrapped_model() -> None:
    ddp, alone = estimated(Case("DDP", "plain")), mt.estimate(workload())
    limit = 2 * ddp.needed_bytes
    assert 1 <= ddp.largest_batch(limit) < alone.largest_batch(limit)


@pytest.mark.parametrize("wrap", ["DDP", "FSDP2"])
def test_the_peak_on_several_gpus_is_that_of_a_step(wrap: str) -> None:
    cpu = mt.estimate(workload(), parallelize=WRAPS[wrap], world_size=8)
    cuda = mt.estimate(workload(), device="cuda", parallelize=WRAPS[wrap], world_size=8)
    assert not cuda.verified
    assert cuda.static_bytes == cpu.static_bytes
    assert cuda.peak_bytes == pytest.approx(cpu.peak_bytes, rel=0.15)
    assert cuda.reserved_bytes >= cuda.peak_bytes


def tables() -> dict[str, Any]:
    """Return everything global that a process group changes."""
    names = ("_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config", "_tags_to_pg", "_pg_to_tag")
    found = {name: dict(getattr(c10d, name)) for name in names}
    others = (c10d._world, c10d._group_count, c10d._backend, c10d._default_pg_init_method)
    patched = dist.Reducer._rebuild_buckets, torch.UntypedStorage.resize_, torch._C._get_accelerator
    return {**found, "others": others, "hook": sys.excepthook, "patched": patched}


@pytest.fixture(name="own_group")
def _own_group(tmp_path: Path) -> Iterator[None]:
    """A real process group of this process alone."""
    hook = sys.excepthook
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()
    sys.excepthook = hook


def raising(model: nn.Module) -> None:
    sharded(model)
    raise ValueError("no mesh")


@pytest.mark.usefixtures("own_group")
def test_the_group_of_the_caller_stays_as_it_is() -> None:
    before, group = tables(), c10d.group.WORLD
    estimated(Case("DDP", "plain"), 8)
    with pytest.raises(WorkloadError, match="no mesh"):
        mt.estimate(workload(), parallelize=raising, world_size=8)
    assert tables() == before
    assert c10d.group.WORLD is group
    assert c10d._resolve_process_group(group.group_name) == group
    ones = torch.ones(2)
    distributed.all_reduce(ones)
    assert ones.tolist() == [1, 1]
    for case in (Case("FSDP2, not resharded", "4 bits"), Case("DDP, small buckets", "plain", 2)):
        fit = estimated(case, 1)
        assert (fit.saved_bytes, fit.peak_bytes) == measured(case)


def test_nothing_of_the_fake_group_remains() -> None:
    before = tables()
    estimated(Case("FSDP2", "plain"))
    assert tables() == before
    assert not distributed.is_initialized()
    with pytest.raises(RuntimeError):
        c10d._resolve_process_group(c10d.GroupName(str(1 << 30)))


def test_no_model_is_allocated() -> None:
    def model() -> nn.Module:
        return nn.Sequential(*(nn.Linear(1 << 20, 1 << 20) for _ in range(2)))

    huge = mt.Workload(model, lambda n: torch.randn(n, 1 << 20), squares, batch_size=2)
    fit = mt.estimate(huge, parallelize=DistributedDataParallel, world_size=8)
    assert fit.static_bytes > 4 * 2 * 4 << 40


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"parallelize": raising, "world_size": 2}, r"test_parallel\.py:\d+: parallelize\(\) .*: no mesh"),
        ({"parallelize": lambda model: "DDP", "world_size": 2}, "returned a str, not an nn.Module"),
        ({"parallelize": "DDP", "world_size": 2}, "must be a function of the model"),
        ({"parallelize": sharded, "world_size": 0}, "world_size = 0: must be an integer of at least 1"),
        ({"parallelize": sharded, "world_size": 2.0}, "must be an integer of at least 1"),
        ({"parallelize": sharded}, "give both or none"),
        ({"world_size": 2}, "give both or none"),
    ],
)
def test_what_is_no_parallelization_is_an_error(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError, match=message) as caught:
        mt.estimate(workload(), **arguments)
    assert str(caught.value).count("\n") <= 2
