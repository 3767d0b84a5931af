"""One process of a group of two: `python -m tests.distributed_worker RANK FOLDER`.

Wraps and converts a small model in every way, and saves what each way gives: the whole gradient of a step,
the same for both processes, and the own gradient of each.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import mesa_tune as mt
from mesa_tune.search.again import replan
from tests import process_group
from tests.builders import ViT, conversion
from tests.parallel_cases import sharded
from tests.process_group import WORLD

SAMPLES = 8
HEAD = "# mesa-tune policy 1\n"
SETTINGS = "on {}:\n    by_index: all\n    level: 16\n"
FINE = "".join(SETTINGS.format(tag) for tag in ("fc", "layernorm", "gelu", "attention"))
POLICIES = {"exact": "", "4 bits": FINE, "derive": FINE.replace("16\n", "16\n    store: derive\n")}
WRAPPERS = ("DDP", "FSDP2")
ORDERS = ("convert first", "wrap first")
STEPS = 3

Gradients = dict[str, Tensor]


def model() -> ViT:
    torch.manual_seed(0)
    return ViT()


def batch(turn: int) -> tuple[Tensor, Tensor]:
    """What both processes see of step `turn` together."""
    random = torch.Generator().manual_seed(turn)
    return torch.randn(SAMPLES, 24, 16, generator=random), torch.randint(0, 10, (SAMPLES,), generator=random)


def loss(network: nn.Module, samples: tuple[Tensor, Tensor], rank: int | None) -> Tensor:
    """The loss of one process's half of the samples; of all of them for None."""
    x, y = samples if rank is None else (each.chunk(WORLD)[rank] for each in samples)
    return F.cross_entropy(network(x), y)


def convert(network: nn.Module, path: Path, seed: int = 1) -> nn.Module:
    return mt.convert(network, mt.Policy.load(path), seed=seed, min_elements=0)


def wrap(network: nn.Module, how: str) -> nn.Module:
    if how == "DDP":
        return DistributedDataParallel(network)
    sharded(network)
    return network


def made(how: str, order: str, path: Path) -> nn.Module:
    network: nn.Module = model()
    if order == "convert first":
        return wrap(convert(network, path), how)
    return convert(wrap(network, how), path)


def gradients(network: nn.Module) -> Gradients:
    found: dict[str, Any] = {name: p.grad for name, p in network.named_parameters()}
    whole = {key: grad.full_tensor() if hasattr(grad, "full_tensor") else grad for key, grad in found.items()}
    return {name.removeprefix("module."): each.clone() for name, each in whole.items()}


def steps(network: nn.Module, rank: int | None) -> list[Gradients]:
    """The gradients of some steps, the parameters left as they are."""
    found = []
    for turn in range(STEPS):
        network.zero_grad()
        loss(network, batch(turn), rank).backward()
        found.append(gradients(network))
    return found


def own_gradient(path: Path) -> Gradients:
    """The gradient before it is averaged, of samples that both processes have."""
    network = DistributedDataParallel(convert(model(), path))
    with network.no_sync():
        loss(network, batch(0), None).backward()
    return gradients(network)


def trained(
    network: nn.Module, rank: int | None, turns: int = 20, monitor: mt.Monitor | None = None
) -> list[float]:
    """The loss of all samples before each of some steps of a training."""
    optimizer, losses = torch.optim.AdamW(network.parameters(), lr=1e-3), []
    for turn in range(turns):
        optimizer.zero_grad()
        value = loss(network, batch(turn % 4), rank)
        value.backward()
        optimizer.step()
        if monitor is not None:
            monitor.step(batch(turn % 4))
        losses.append(value.detach())
    whole = torch.stack(losses)
    if rank is not None:
        distributed.all_reduce(whole)
        whole /= WORLD
    return [float(each) for each in whole]


def monitored(network: nn.Module, rank: int) -> tuple[list[float], int]:
    """The losses of a training that only rank 0 monitors, and the number of its readings."""
    monitor = mt.Monitor(network, lambda model, samples: loss(model, samples, None), every=5, limit=1e6)
    losses = trained(network, rank, monitor=monitor if rank == 0 else None)
    return losses, len(monitor.history)


def planned_again(rank: int, run: Path) -> dict[str, Any]:
    """Policies before and after a reading of both ranks, whatever plan it finds, and what each has of it."""
    replan._LESS = math.inf
    inner = mt.convert(model(), mt.Plan.load(run / "plan.json").policy, seed=1)
    network = DistributedDataParallel(inner)
    each = lambda model, samples: loss(model, samples, None)  # noqa: E731
    files = run if rank == 0 else run / "elsewhere"  # only rank 0 has them
    monitor = mt.Monitor(network, each, every=2, limit=1e-6, remedy="plan", run=files)
    before = conversion(inner).policy.dumps()
    losses = trained(network, rank, 2, monitor)
    policies = before, conversion(inner).policy.dumps()
    return {"policies": policies, "readings": monitor.history, "losses": losses + trained(network, rank, 2)}


def run(rank: int, folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for policy in POLICIES:
        path = folder / f"{policy}.txt"
        for how in WRAPPERS:
            for order in ORDERS:
                results[f"{policy}, {how}, {order}"] = steps(made(how, order, path), rank)
    fine = folder / "4 bits.txt"
    for how in WRAPPERS:
        results[f"{how} trained"] = trained(made(how, "wrap first", fine), rank)
    results["DDP monitored by one"] = monitored(made("DDP", "wrap first", fine), rank)
    try:
        mt.Monitor(made("FSDP2", "wrap first", fine), lambda model, samples: loss(model, samples, None))
    except mt.RunError as error:
        results["FSDP2 monitored"] = str(error)
    results["planned again"] = planned_again(rank, folder)
    results["own gradient"] = own_gradient(fine)
    results["key"] = int(conversion(convert(model(), fine)).key(torch.device("cpu")))
    return results


if __name__ == "__main__":
    process_group.join(run)
