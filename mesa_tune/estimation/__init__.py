"""`mt.estimate`: the bytes of a training step, and whether it fits, without the memory that it takes.

What is hard: the answer must be that of the real step. So the step itself runs, under the policy itself, on
fake tensors. For CUDA two things are modelled: what its kernels save, and how the caching allocator reserves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, overload

from torch import Tensor, nn
from torch.optim import Optimizer

from mesa_tune.errors import BudgetError, WorkloadError
from mesa_tune.free_memory import CPU_MARGIN, CUDA_MARGIN, is_cuda, needed_bytes
from mesa_tune.measure.fake_steps import FakeSteps
from mesa_tune.measure.parallel import Parallelization, Parallelize
from mesa_tune.measure.rerun_modules.blocks import block_levels
from mesa_tune.policy import Policy
from mesa_tune.profiles.prediction import Peak
from mesa_tune.units import parse_bytes
from mesa_tune.workload.fake import FakeWorkload, fake_copy
from mesa_tune.workload.instance.given_batches import GivenBatches, preserved_generators
from mesa_tune.workload.instance.instance import instance_workload
from mesa_tune.workload.workload import Workload, default_device

if TYPE_CHECKING:
    import pandas as pd

_LARGEST_BATCH = 1 << 20
_GROWTH = 16
_LEAST_LIMIT = 1 << 16
"""Fewer bytes are no memory that anybody has: a number without a unit that forgot it."""


@dataclass(frozen=True)
class Estimate:
    """The bytes of one training step, estimated without running it.

    `static_bytes`: weights, gradients that survive steps, optimizer state, buffers, batch, DDP's buckets.
    `saved_bytes`: alive for backward when the forward ends, with parameters that FSDP2 has gathered.
    `peak_bytes`: the most that is needed at once, on the CPU with the workspaces of kernels, which no tensor
    owns. `tensor_bytes`: the most of tensors alone, to the byte those of a real step. `reserved_bytes`: on
    CUDA what PyTorch's caching allocator would reserve; on the CPU the peak. `library_bytes`: what oneDNN
    keeps besides; 0 for CUDA. `margin`: the share that `fits` adds, of `reserved_bytes`, on CUDA of what of
    these is not static. `verified`: False for CUDA, whose model one GPU has checked, on a few models.
    """

    batch_size: int
    device: str
    static_bytes: int
    saved_bytes: int
    peak_bytes: int
    tensor_bytes: int
    reserved_bytes: int
    library_bytes: int
    margin: float
    verified: bool
    _steps: FakeSteps = field(repr=False, compare=False)

    @property
    def at_peak(self) -> Peak:
        """When the step needs the most bytes, and of which kinds they are."""
        return self._steps.at(self.batch_size).at_peak

    @property
    def needed_bytes(self) -> int:
        """What `fits` compares: reserved bytes with the margin, library bytes, and what else a process takes.

        That is 8 MB and 10 MB for each thread of PyTorch, on CUDA 600 MB.
        """
        return _needed(self._steps, self.batch_size)

    def at(self, batch_size: int) -> Estimate:
        """Return the estimate of the same step at another batch size."""
        return _of_steps(self._steps, batch_size, self.device)

    def fits(self, limit: str | int) -> bool:
        """Return whether the step fits into `limit`: bytes, or text such as `24GB` or `24GiB`."""
        return self.needed_bytes <= parse_limit(limit)

    def largest_batch(self, limit: str | int) -> int:
        """Return the largest batch size whose step fits into `limit`, at most 2²⁰; 0 if none does.

        Steps are traced at sizes close to it, so it is exact where the bytes grow with the batch.
        """
        return _largest(lambda size: _needed(self._steps, size), parse_limit(limit), self.batch_size)

    def frame(self) -> pd.DataFrame:
        """Return a table with one row for each layer: the tensors and bytes that it owns for backward.

        The bytes sum to `saved_bytes`.
        """
        import pandas as pd

        return pd.DataFrame(self.rows(), columns=["layer", "tag", "tensors", "bytes"])

    def largest_length(self, limit: str | int) -> int:
        """Return about the largest length of samples whose step fits into `limit`; 0 if none does.

        It does fit. Raise WorkloadError for a workload without `length`.
        """
        steps, length = self._steps, self._steps.fake.length
        if length is None:
            raise WorkloadError(
                "largest_length: the samples of the workload have no length\n"
                "give it length=2048 (LENGTH = 2048 in a model file), and batch(batch_size, length)"
            )
        return fitting(lambda size: _needed(steps, self.batch_size, size), length, parse_limit(limit))

    def rows(self) -> list[tuple[str, str, int, int]]:
        """Return the rows of `frame`, without pandas."""
        return self._steps.at(self.batch_size).rows()


@overload
def estimate(
    workload: Workload,
    policy: Policy | None = None,
    *,
    batch_size: int | None = None,
    device: str | None = None,
    parallelize: Parallelize | None = None,
    world_size: int | None = None,
) -> Estimate: ...


@overload
def estimate(
    model: nn.Module,
    batch: Any,
    loss: Callable[[nn.Module, Any], Tensor],
    policy: Policy | None = None,
    *,
    optimizer: Optimizer | Callable[[Iterable[nn.Parameter]], Optimizer] | None = None,
    autocast: str | None = None,
    accumulation: int = 1,
    batch_size: int | None = None,
    device: str | None = None,
    parallelize: Parallelize | None = None,
    world_size: int | None = None,
) -> Estimate: ...


def estimate(
    *arguments: Any,
    batch_size: int | None = None,
    device: str | None = None,
    parallelize: Parallelize | None = None,
    world_size: int | None = None,
    **options: Any,
) -> Estimate:
    """Return the bytes that a training step takes, plain or under `policy`; no model is allocated.

    `estimate(workload)` or `estimate(model, batch, loss)`: `model` an instance, also one on the meta device,
    which stays as it is; `batch` one batch, whose first dimension counts samples, an iterable of batches (of
    eight, the longest counts), or `callable(n)`; `loss(model, batch)` a scalar; `optimizer` an instance or
    `callable(parameters)`, default AdamW.
    `device`: `cpu` or `cuda`, which this machine need not have; default: the workload's.

    `parallelize`: `DistributedDataParallel`, or a function that applies `fully_shard` to parts of the model;
    it returns the wrapped model, or None. The step is then one of `world_size` processes that train together:
    bytes and batch size are those of the first process (rank 0). It runs in a fake process group, in which
    nothing communicates. A group that exists stays as it is, but no other thread may use it meanwhile.

    Raise WorkloadError for a step whose shapes or branches depend on the values of tensors, for a
    `parallelize` that raises or returns something else, for a `world_size` below 1, and for anything but a
    workload or a model.
    """
    subject = next(iter(arguments), options.get("workload", options.get("model")))
    if not isinstance(subject, (Workload, nn.Module)):
        raise WorkloadError(
            f"{subject!r}: is neither a Workload nor an nn.Module\n"
            'read a file by mt.Workload.load("model.py", device="cpu"); for hf:CONFIG use the command:\n'
            "mesa-tune profile hf:CONFIG --bytes-only --fits 24GB"
        )
    make = _of_workload if isinstance(subject, Workload) else _of_instance
    fake, policy, own_device = make(*arguments, **options)
    device = device or own_device
    cuda = is_cuda(device)
    parallel = _parallelization(parallelize, world_size)
    steps = FakeSteps(fake, policy or Policy.parse(""), cuda, parallel)
    batch_size = fake.batch_size if batch_size is None else batch_size
    estimated = _of_steps(steps, batch_size, device)
    if isinstance(fake.batch, GivenBatches):
        fake.batch.close()  # other sizes are made from the batches that were drawn
    return estimated


def _of_steps(steps: FakeSteps, batch_size: int, device: str) -> Estimate:
    traced = steps.at(batch_size)
    return Estimate(
        batch_size,
        device,
        traced.static,
        traced.trace.saved_bytes,
        traced.peak,
        traced.tensors,
        traced.reserved,
        traced.libraries,
        CUDA_MARGIN if steps.cuda else CPU_MARGIN,
        not steps.cuda,
        steps,
    )


def _parallelization(parallelize: Parallelize | None, world_size: int | None) -> Parallelization | None:
    if parallelize is None and world_size is None:
        return None
    if parallelize is None or world_size is None:
        raise WorkloadError(
            "parallelize and world_size: give both or none\n"
            "such as parallelize=DistributedDataParallel, world_size=8"
        )
    return Parallelization(parallelize, world_size)


def _of_workload(workload: Workload, policy: Policy | None = None) -> tuple[FakeWorkload, Policy | None, str]:
    """Return the fake workload, the policy, and the device by default."""
    return FakeWorkload.of(workload), policy, workload.device


def _of_instance(
    model: nn.Module,
    batch: Any,
    loss: Callable[[nn.Module, Any], Tensor],
    policy: Policy | None = None,
    *,
    optimizer: Any = None,
    **step: Any,
) -> tuple[FakeWorkload, Policy | None, str]:
    """Return the fake workload of a model instance, the policy, and the device by default."""
    with preserved_generators(batch):
        workload = instance_workload(model, batch, loss, optimizer, device="cpu", **step)
    fake = FakeWorkload.of(workload)
    return replace(fake, model=lambda: fake_copy(fake.mode, model)), policy, default_device()


def blocks_of(estimated: Estimate) -> tuple[str, ...]:
    """Return the blocks of the model that could run again in backward: those of the outermost level."""
    fake = estimated._steps.fake
    with fake.faking():
        model = fake.build()
    return next(block_levels(model, estimated._steps.at(estimated.batch_size).trace), ())


def parse_limit(limit: str | int) -> int:
    """Return the bytes of `limit`; raise BudgetError for anything but an amount of memory."""
    parsed = parse_bytes(limit, "limit", _LEAST_LIMIT)
    if parsed.bytes is None:
        raise BudgetError(
            f"limit {limit!r}: must be an amount of memory, not a share\nwrite it like 24GB or 24GiB"
        )
    return parsed.bytes


def _needed(steps: FakeSteps, batch_size: int, length: int | None = None) -> int:
    """Return the bytes to compare with a limit: those of `Estimate.needed_bytes`."""
    step = steps.at(batch_size, length)
    return needed_bytes(step.reserved, step.static, step.libraries, cuda=steps.cuda)


def fitting(needed: Callable[[int], int], size: int, limit: int) -> int:
    """Return about the largest size that needs at most `limit` bytes, where a line through two meets it.

    That size does fit; few are asked. 0 if none does.
    """
    known = needed(size)
    other = size * limit // known
    other = max(1, size + 1 if other == size else other)
    slope = (needed(other) - known) / (other - size) if other != size else 0
    guess = size + math.floor((limit - known) / slope) if slope > 0 else other
    while guess > 0 and (found := needed(guess)) > limit:
        guess = min(guess - 1, guess * limit // found)
    return max(0, guess)


def _largest(needed: Callable[[int], int], limit: int, start: int) -> int:
    """Return the largest batch size that needs at most `limit` bytes.

    The next size to try is where the line through the last two meets the limit, between what fits and what
    does not, and no more than `_GROWTH` times the last one: small steps may grow in the optimizer's step
    alone. It is halfway between what fits and what does not, where the last size did not halve that range: a
    caching allocator's bytes grow in stairs.
    """
    fits, fails, size = 0, _LARGEST_BATCH + 1, start
    last = (0, 0)
    while fails - fits > 1:
        between, bytes_now = fails - fits, needed(size)
        fits, fails = (size, fails) if bytes_now <= limit else (fits, size)
        slope = (bytes_now - last[1]) / (size - last[0]) if size != last[0] else 0
        guess = min(size + int((limit - bytes_now) / slope) if slope > 0 else 2 * size, _GROWTH * size)
        if fails <= _LARGEST_BATCH and 2 * (fails - fits) > between:
            guess = (fits + fails) // 2
        last, size = (size, bytes_now), min(max(guess, fits + 1), fails - 1)
    return fits
