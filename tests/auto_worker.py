"""One process of a group of two that calls `mt.auto`: `python -m tests.auto_worker RANK FOLDER`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import mesa_tune as mt
from mesa_tune.measure.timing import step_time
from tests import process_group
from tests.builders import ViT, conversion, cross_entropy, images


def only_on_rank_0(count: int) -> tuple[Tensor, Tensor]:
    """A batch that no other rank may ask for."""
    assert distributed.get_rank() == 0
    return images(count)


def auto(model: nn.Module, budget: str, folder: Path) -> nn.Module:
    given: dict[str, Any] = {"batch_size": 8, "trials": 0, "fast": True, "run": folder / "run"}
    return mt.auto(model, only_on_rank_0, cross_entropy, budget=budget, **given)


def error_of(model: nn.Module, budget: str, folder: Path) -> str:
    """Name and first line of the error of `mt.auto`."""
    try:
        auto(model, budget, folder)
    except mt.MesaTuneError as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return ""


def run(_: int, folder: Path) -> dict[str, Any]:
    step_time.TURNS = 1  # as in tests/conftest.py
    torch.manual_seed(0)
    model = DistributedDataParallel(ViT(depth=1))
    auto(model, "90%", folder)
    cross_entropy(model, images(8)).backward()
    norms = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)))
    return {
        "policy": conversion(model).policy.dumps(),
        "gradients": [parameter.grad for parameter in model.parameters()],
        "unreachable": error_of(ViT(depth=1), "10kB", folder),
        "synchronized": error_of(norms, "90%", folder),
    }


if __name__ == "__main__":
    process_group.join(run)
