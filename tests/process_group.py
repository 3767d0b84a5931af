"""A group of two real processes that talk over gloo, and what each of them finds."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed

WORLD = 2
ROOT = Path(__file__).parents[1]


def results(worker: str, folder: Path) -> list[dict[str, Any]]:
    """Return what each process of `python -m WORKER RANK FOLDER` found, and what it `said`."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    group, texts = [], [folder / f"said{rank}" for rank in range(WORLD)]
    for rank, text in enumerate(texts):
        command = [sys.executable, "-m", worker, str(rank), str(folder)]
        with text.open("w") as said:
            group.append(subprocess.Popen(command, stderr=said, cwd=ROOT, env=environment))
    try:
        assert [process.wait(timeout=280) for process in group] == [0] * WORLD
    finally:
        for process, text in zip(group, texts, strict=True):
            process.kill()
            sys.stderr.write(text.read_text())
    found = [torch.load(folder / f"results{rank}", weights_only=False) for rank in range(WORLD)]
    return [each | {"said": text.read_text()} for each, text in zip(found, texts, strict=True)]


def join(find: Callable[[int, Path], dict[str, Any]]) -> None:
    """Find something as one process of the group, whose rank and folder are on the command line."""
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD)
    torch.save(find(rank, folder), folder / f"results{rank}")
    distributed.destroy_process_group()
