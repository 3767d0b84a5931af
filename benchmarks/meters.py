"""Two independent meters of saved bytes: they share no code with each other or with mesa-tune's own meter.

`storages_after_forward` counts the storages that were created in a forward and are alive after it.
`resident_growth` reads the growth of the process from the operating system, in a separate process whose
allocator returns large blocks at once. A policy of None means the plain model, never converted.

What is hard: autocast's copies of parameters, and memory that libraries allocate once, are not activations.
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
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import mesa_tune as mt

Loss = Callable[[nn.Module, Any], Tensor]


def model_under(workload: mt.Workload, policy: mt.Policy | None) -> nn.Module:
    """Build the workload's model and convert it by `policy`."""
    model = workload.build()
    return model if policy is None else mt.convert(model, policy, seed=0)


def loss_under(workload: mt.Workload, policy: mt.Policy | None, seed: int = 0) -> Loss:
    """Return the workload's loss function, with its own layers under `policy`."""
    if policy is None:
        return workload.compute_loss

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with mt.compress_saved(policy, seed=seed):
            return workload.compute_loss(model, batch)

    return loss


class Saved(NamedTuple):
    """Bytes alive for backward, and separately the bytes of autocast's copies of parameters."""

    bytes: int
    weight_copies: int


class CreatedStorages(TorchDispatchMode):
    """Weak references to all storages created while the mode is entered; `alive` counts their bytes.

    The storages of `excluded` (parameters, buffers, the batch) are never counted. Copies of parameters in
    another dtype are counted separately.
    """

    def __init__(self, excluded: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self.excluded = {tensor.untyped_storage().data_ptr() for tensor in excluded}
        self.activations: list[weakref.ref[torch.UntypedStorage]] = []
        self.copies: list[weakref.ref[torch.UntypedStorage]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_copy = func is torch.ops.aten._to_copy.default and isinstance(args[0], nn.Parameter)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                (self.copies if is_copy else self.activations).append(weakref.ref(leaf.untyped_storage()))
        return result

    def alive(self, without: Sequence[Tensor] = ()) -> Saved:
        """Return the bytes alive now, each storage once, except those of `without`."""
        excluded = {tensor.untyped_storage().data_ptr() for tensor in without} | self.excluded
        copies = {address: size for address, size in _alive(self.copies).items() if address not in excluded}
        excluded |= copies.keys()  # views of a copy have its storage
        activations = _alive(self.activations).items()
        return Saved(
            sum(size for address, size in activations if address not in excluded), sum(copies.values())
        )


def _alive(references: Sequence[weakref.ref[torch.UntypedStorage]]) -> dict[int, int]:
    storages = (storage for reference in references if (storage := reference()) is not None)
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def given_tensors(model: nn.Module, batch: Any) -> list[Tensor]:
    """Return the tensors that exist before a step: parameters, buffers and the batch."""
    leaves = (leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
    return [*model.parameters(), *model.buffers(), *leaves]


def storages_after_forward(workload: mt.Workload, policy: mt.Policy | None) -> Saved:
    """Return the bytes of storages created in the forward and alive after it, without batch and loss."""
    model, batch = model_under(workload, policy), workload.make_batch()
    with CreatedStorages(given_tensors(model, batch)) as created:
        loss = loss_under(workload, policy)(model, batch)
        # The forward may have replaced buffers by new tensors.
        return created.alive([*model.buffers(), loss])


def train(chosen: mt.Workload, policy: mt.Policy | None, count: int) -> None:
    """Take `count` plain training steps of a new model under `policy`."""
    model = chosen.build()
    if policy is not None:
        mt.convert(model, policy, seed=0)
    optimizer, batch = chosen.make_optimizer(model), chosen.make_batch()
    for _ in range(count):
        optimizer.zero_grad()
        with mt.compress_saved(policy or mt.Policy.parse("")):
            loss = chosen.compute_loss(model, batch)
        loss.backward()
        del loss
        optimizer.step()


def in_own_process(command: Sequence[str], policy: mt.Policy | None) -> dict[str, int]:
    """Run `command --resident FILE` in a new process (FILE: the policy, or `plain`); return its JSON."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "policy.txt"
        if policy is not None:
            policy.save(path)
        source = "plain" if policy is None else str(path)
        full_command = [sys.executable, "-W", "ignore", *command, "--resident", source]
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
        out = subprocess.run(full_command, env=environment, check=True, capture_output=True, text=True).stdout
    measured: dict[str, int] = json.loads(out.splitlines()[-1])
    return measured


def resident_growth(workload: mt.Workload, path: str) -> dict[str, int]:
    """Return the growth of resident memory in the second step: after the forward, and at the peak.

    `path`: the policy's file, or `plain`.
    """
    policy = None if path == "plain" else mt.Policy.load(path)
    # The first step also allocates memory of libraries, which is not activations.
    warm = model_under(workload, policy)
    loss_under(workload, policy)(warm, workload.make_batch()).backward()
    del warm
    gc.collect()
    trim()  # small freed blocks would otherwise be reused without growth
    model, batch = model_under(workload, policy), workload.make_batch()
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    loss = loss_under(workload, policy)(model, batch)
    trim()
    saved = resident("VmRSS") - before
    loss.backward()
    return {"saved": saved, "peak": resident("VmHWM") - before}


def peak_growth(run: Callable[[], object]) -> int:
    """Return by how many bytes resident memory grows to its peak while `run` runs."""
    gc.collect()
    trim()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    run()
    return resident("VmHWM") - before


def within_memory_budget(budget: float | None) -> Any:
    """Return a context in which `torch.compile` has this `activation_memory_budget`; None: its default."""
    from torch._functorch import config

    return nullcontext() if budget is None else config.patch(activation_memory_budget=budget)  # type: ignore[attr-defined]


def trim() -> None:
    """Make glibc return freed memory to the system; it returns only large blocks by itself."""
    ctypes.CDLL(None).malloc_trim(0)


def resident(field: str) -> int:
    """Return a field of /proc/self/status in bytes."""
    match = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match
    return 1024 * int(match[1])
