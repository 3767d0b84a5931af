"""Data-parallel steps, and the bytes that they take in real processes.

    python -m tests.parallel_cases RANK FOLDER

Each process takes the steps of all `CASES`, and writes saved and peak bytes. They are counted from before the
model exists, so that the peak has whatever the wrappers allocate.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import mesa_tune as mt
from mesa_tune.measure.memory.meter import Meter, bytes_of, tensors_in
from tests import process_group
from tests.builders import ViT

POLICIES = {"plain": mt.Policy.parse(""), "4 bits": mt.Policy.uniform(level=16)}


def sharded(model: Any, **options: Any) -> None:
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)


BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
Wrap = Callable[[nn.Module], nn.Module | None]
WRAPS: dict[str, Wrap] = {
    "DDP": DistributedDataParallel,
    "DDP, views": partial(DistributedDataParallel, gradient_as_bucket_view=True),
    "DDP, small buckets": partial(DistributedDataParallel, bucket_cap_mb=0.01, find_unused_parameters=True),
    "DDP, static graph": partial(DistributedDataParallel, static_graph=True),
    "FSDP2": sharded,
    "FSDP2, resharded": partial(sharded, reshard_after_forward=True),
    "FSDP2, not resharded": partial(sharded, reshard_after_forward=False),
    "FSDP2, bfloat16": partial(sharded, mp_policy=BFLOAT16),
}


class Case(NamedTuple):
    """A wrapper, a policy, and the micro-batches of a step; all of them communicate (no `no_sync`)."""

    wrap: str
    policy: str
    accumulation: int = 1

    @property
    def name(self) -> str:
        return f"{self.wrap}, {self.policy}, x{self.accumulation}"


CASES = [Case(wrap, policy) for wrap in WRAPS for policy in POLICIES]
CASES += [Case(wrap, policy, 2) for wrap in ("DDP", "DDP, views", "FSDP2") for policy in POLICIES]


def small_vit() -> nn.Module:
    return ViT(depth=1)


def batch(count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 16, 16), torch.randint(10, (count,))


def loss(model: nn.Module, samples: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(samples[0]).float(), samples[1])


def workload(accumulation: int = 1) -> mt.Workload:
    return mt.Workload(small_vit, batch, loss, batch_size=8, accumulation=accumulation)


def measured(case: Case) -> tuple[int, int]:
    """Return the saved and the peak bytes of a step: the least of four, after two.

    A thread of gloo may still have the tensors of a collective that has ended. This adds to the bytes, and
    differs from step to step.
    """
    with Meter() as meter:
        model: nn.Module = small_vit()
        model = WRAPS[case.wrap](model) or model
        samples = batch(8)
        optimizer = torch.optim.AdamW(model.parameters())
        if case.policy != "plain":
            mt.convert(model, POLICIES[case.policy], seed=0)
        steps = [_step(case, model, samples, optimizer, meter) for _ in range(6)]
    counts = tensors_in(optimizer.state)  # Adam's counts of steps are born in `torch.tensor`, unseen
    unseen = bytes_of(counts) - meter.counted_bytes(counts)
    saved, peak = (min(values) for values in zip(*steps[2:], strict=True))
    return saved, peak + unseen


def _step(case: Case, model: nn.Module, samples: Any, optimizer: Any, meter: Meter) -> tuple[int, int]:
    """Take a step; return the saved bytes of its last micro-batch, and the most bytes alive in it."""
    optimizer.zero_grad()
    gc.collect()
    meter.reset_peak()
    saved = 0
    for _ in range(case.accumulation):
        mark = meter.mark()
        with mt.compress_saved(POLICIES[case.policy], seed=0):
            value = loss(model, samples)
        saved = meter.live_since(mark, without=[value])
        (value if case.accumulation == 1 else value / case.accumulation).backward()
        del value
    optimizer.step()
    return saved, meter.tensor_peak


def found(*_: Any) -> dict[str, Any]:
    gc.freeze()  # the modules are no work for the many collections
    return {case.name: measured(case) for case in CASES}


if __name__ == "__main__":
    process_group.join(found)
