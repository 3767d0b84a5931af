"""Do DDP and FSDP2 with a searched policy reach the accuracy of plain training in one process?

    python benchmarks/distributed.py [--seeds 3] [--budget 40% | --policy policy.txt]

The digits ViT is trained in two processes on this machine (gloo), each with half of every batch. All use one
policy file, searched on the plain model in one process. The model is converted before DDP wraps it, and after
`fully_shard` shards it. A seed determines initialization and data order of all kinds, so the differences to
one plain process are paired.
"""

from __future__ import annotations

import argparse
import os
import socket
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from accuracy import describe, differences, load_example, searched_plan
from common import append
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

import mesa_tune as mt

PROCESSES = 2
KINDS = ("plain", "DDP searched", "FSDP2 searched")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each kind (at least 2)")
    parser.add_argument("--budget", default="40%", help="budget of the policy, which is searched first")
    parser.add_argument("--policy", type=Path, help="a policy searched before, instead of --budget")
    arguments = parser.parse_args()
    if arguments.seeds < 2:
        parser.error("--seeds must be at least 2: one training has no spread")
    path = arguments.policy
    policy = mt.Policy.load(path) if path is not None else searched_plan(arguments.budget).policy
    with TemporaryDirectory() as folder:
        policy.save(Path(folder) / "policy.txt")
        accuracies = {
            kind: [accuracy(kind, seed, Path(folder)) for seed in range(arguments.seeds)] for kind in KINDS
        }
    result = {
        "subject": f"test accuracy of the digits ViT in {PROCESSES} processes",
        "budget": arguments.budget if path is None else None,
        "policy": policy.dumps(),
        "accuracies": accuracies,
        "differences": differences(accuracies),
    }
    for line in describe(result):
        print(line)
    print(f"appended to {append('distributed', result)}")


def accuracy(kind: str, seed: int, folder: Path) -> float:
    """Train one kind, and return the accuracy, 0 to 1."""
    processes = 1 if kind == "plain" else PROCESSES
    spawn(train, (kind, seed, processes, free_port(), folder), nprocs=processes)
    result = float((folder / "accuracy").read_text())
    print(f"{kind}, seed {seed}: {100 * result:.2f} %", flush=True)
    return result


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
    return port


def train(rank: int, kind: str, seed: int, processes: int, port: int, folder: Path) -> None:
    """Train in one process, as the example does; rank 0 writes the accuracy."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    address = f"tcp://127.0.0.1:{port}"
    distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=processes)
    example = load_example()
    torch.manual_seed(seed)
    network, compressed = prepared(example, kind, seed, folder)
    stepper = example.optimizer(list(network.parameters()))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        stepper, example.LEARNING_RATE, total_steps=example.STEPS, pct_start=example.WARMUP
    )
    for _ in range(example.STEPS):
        images, labels = example.batch(example.BATCH_SIZE)
        with compressed():
            value = example.loss(network, (images.chunk(processes)[rank], labels.chunk(processes)[rank]))
        stepper.zero_grad()
        value.backward()
        stepper.step()
        schedule.step()
    result = example.accuracy(network)
    if rank == 0:
        (folder / "accuracy").write_text(str(result))
    distributed.destroy_process_group()


def prepared(example: Any, kind: str, seed: int, folder: Path) -> tuple[nn.Module, Any]:
    """Return the model, wrapped and converted, and the context of its loss."""
    network: nn.Module = example.model()
    policy = mt.Policy.load(folder / "policy.txt") if kind.endswith("searched") else None
    if kind.startswith("FSDP2"):
        shard(network)
    compressed = example.compression(network, policy, seed)
    return (DistributedDataParallel(network) if kind.startswith("DDP") else network), compressed


def shard(network: Any) -> None:
    """Shard the model by FSDP2, one group per block."""
    for block in network.blocks:
        fully_shard(block)
    fully_shard(network)


if __name__ == "__main__":
    main()
