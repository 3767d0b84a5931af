"""One process of a group of two that calls `mt.auto`: `python -m tests.auto_worker RANK FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import mesa_tune as mt
from mesa_tune.conversion.model import conversion_of
from mesa_tune.profiler.timing import step_time
from tests.builders import ViT

WORLD = 2


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def batch(count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 24, 16), torch.randint(0, 10, (count,))


def only_on_rank_0(count: int) -> tuple[Tensor, Tensor]:
    """A batch that no other rank may ask for."""
    assert distributed.get_rank() == 0
    return batch(count)


def error_of(model: nn.Module, given: Any, budget: str, folder: Path) -> str:
    """Name and first line of the error of `mt.auto`."""
    try:
        mt.auto(model, given, loss, budget=budget, batch_size=8, trials=0, fast=True, run=folder / "run")
    except mt.MesaTuneError as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return ""


def run(folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    model = DistributedDataParallel(ViT(depth=1))
    mt.auto(model, only_on_rank_0, loss, budget="90%", batch_size=8, trials=0, fast=True, run=folder / "run")
    conversion = conversion_of(model)
    assert conversion is not None
    loss(model, batch(8)).backward()
    synchronized = nn.SyncBatchNorm.convert_sync_batchnorm(
        nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16))
    )
    return {
        "policy": conversion.policy.dumps(),
        "gradients": [parameter.grad for parameter in model.parameters()],
        "unreachable": error_of(ViT(depth=1), only_on_rank_0, "10kB", folder),
        "synchronized": error_of(synchronized, only_on_rank_0, "90%", folder),
    }


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    step_time.SECONDS = step_time.SHARE = 0.0  # as in tests/conftest.py
    store = f"file://{folder / 'store'}"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD)
    torch.save(run(folder), folder / f"results{rank}")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
