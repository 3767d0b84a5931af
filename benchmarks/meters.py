"""Two meters of saved bytes that share no code with what they measure, nor with each other.

`storages_after_forward` counts the storages that were born in a forward and are alive after it.
`resident_growth` reads from the operating system by how much the process has grown, in a process of its own
whose allocator gives large blocks back at once. A policy of None is the plain model, never converted.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import mesa_tune as mt

Loss = Callable[[nn.Module, Any], Tensor]


def model_under(workload: mt.Workload, policy: mt.Policy | None) -> nn.Module:
    """The workload's model, new, under the policy."""
    model = workload.build()
    return model if policy is None else mt.convert(model, policy, seed=0)


def loss_under(workload: mt.Workload, policy: mt.Policy | None, seed: int = 0) -> Loss:
    """The workload's loss, its own layers under the policy, too."""
    if policy is None:
        return workload.compute_loss

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with mt.compress_saved(policy, seed=seed):
            return workload.compute_loss(model, batch)

    return loss


class Saved(NamedTuple):
    """Bytes alive for backward, and beside them those in which autocast holds copies of parameters."""

    bytes: int
    weight_copies: int


class Births(TorchDispatchMode):
    """Every storage that appears, by weak reference: an independent count of what is alive.

    `given` (parameters, buffers, the batch) is never counted; parameters in another dtype are told apart.
    """

    def __init__(self, given: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self.given = {tensor.untyped_storage().data_ptr() for tensor in given}
        self.seen: list[weakref.ref[torch.UntypedStorage]] = []
        self.copies: list[weakref.ref[torch.UntypedStorage]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_copy = func is torch.ops.aten._to_copy.default and isinstance(args[0], nn.Parameter)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                (self.copies if is_copy else self.seen).append(weakref.ref(leaf.untyped_storage()))
        return result

    def alive(self, without: Sequence[Tensor] = ()) -> Saved:
        """Bytes alive now, each storage once, except those of `without`."""
        excluded = {tensor.untyped_storage().data_ptr() for tensor in without} | self.given
        copies = {place: size for place, size in _living(self.copies).items() if place not in excluded}
        excluded |= copies.keys()  # a copy's views are no others
        others = {place: size for place, size in _living(self.seen).items() if place not in excluded}
        return Saved(sum(others.values()), sum(copies.values()))


def _living(references: Sequence[weakref.ref[torch.UntypedStorage]]) -> dict[int, int]:
    storages = (storage for reference in references if (storage := reference()) is not None)
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def given_tensors(model: nn.Module, batch: Any) -> list[Tensor]:
    """What is there before a step: parameters, buffers and the batch."""
    leaves = (leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
    return [*model.parameters(), *model.buffers(), *leaves]


def storages_after_forward(workload: mt.Workload, policy: mt.Policy | None) -> Saved:
    """Bytes of storages born in the forward and alive after it; parameters, buffers, batch and loss apart."""
    model, batch = model_under(workload, policy), workload.make_batch()
    with Births(given_tensors(model, batch)) as births:
        loss = loss_under(workload, policy)(model, batch)
        # Buffers may have been made anew in the forward.
        return births.alive([*model.buffers(), loss])


def in_own_process(command: Sequence[str], policy: mt.Policy | None) -> dict[str, int]:
    """What `command` prints in a fresh process: it ends in `--resident` and the policy's file, or `plain`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "policy.txt"
        if policy is not None:
            policy.save(path)
        given = [
            sys.executable,
            "-W",
            "ignore",
            *command,
            "--resident",
            "plain" if policy is None else str(path),
        ]
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
        out = subprocess.run(given, env=environment, check=True, capture_output=True, text=True).stdout
    found: dict[str, int] = json.loads(out.splitlines()[-1])
    return found


def resident_growth(workload: mt.Workload, path: str) -> dict[str, int]:
    """Growth of this process's resident memory over its second step: after the forward, and at its peak.

    `path`: the policy's file, or `plain`.
    """
    policy = None if path == "plain" else mt.Policy.load(path)
    # Libraries' own memory for what runs the first time, or in new shapes, is nobody's activation.
    warm = model_under(workload, policy)
    loss_under(workload, policy)(warm, workload.make_batch()).backward()
    del warm
    gc.collect()
    _trim()  # else what was small and freed would be used again, unseen
    model, batch = model_under(workload, policy), workload.make_batch()
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    loss = loss_under(workload, policy)(model, batch)
    _trim()
    saved = resident("VmRSS") - before
    loss.backward()
    return {"saved": saved, "peak": resident("VmHWM") - before}


def _trim() -> None:
    """glibc hands freed memory back to the system, as it does with large blocks at once."""
    ctypes.CDLL(None).malloc_trim(0)


def resident(field: str) -> int:
    """A field of /proc/self/status in bytes."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return 1024 * int(found[1])
