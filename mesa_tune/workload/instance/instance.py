"""`instance_workload`: the workload of a model instance, with the batches and the optimizer of a script."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from mesa_tune.errors import WorkloadError
from mesa_tune.workload.instance.given_batches import GivenBatches
from mesa_tune.workload.instance.optimizers import remade
from mesa_tune.workload.user_code import explaining, mixed_seed, seeded
from mesa_tune.workload.workload import DEFAULT_BATCH_SIZE, Workload


def instance_workload(
    model: nn.Module,
    batch: Any,
    loss: Callable[[nn.Module, Any], Tensor],
    optimizer: Any = None,
    *,
    batch_size: int | None = None,
    device: str | None = None,
    **step: Any,
) -> Workload:
    """Return the workload whose `model()` is this instance, on `device` (default: that of its parameters).

    `batch`: one batch, an iterable of batches, or `callable(n)`, then of `batch_size` samples (default 32).
    `optimizer`: an instance, of which others are made, or `callable(parameters)`. Raise WorkloadError for
    parameters on several devices, and as `GivenBatches` and `remade` do.
    """
    make = remade(optimizer, model) if isinstance(optimizer, Optimizer) else optimizer
    size = batch_size or DEFAULT_BATCH_SIZE
    device = _device_of(model) if device is None else device
    workload = Workload(lambda: model, batch, loss, make, batch_size=size, device=device, **step)
    if callable(batch):
        return workload
    seed = mixed_seed(workload.seed, 0)
    with seeded(seed, workload.device), explaining("an iteration over the batches", loss):
        given = GivenBatches(batch)
    return replace(workload, batch=given, batch_size=given.size)


def _device_of(model: nn.Module) -> str:
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) > 1:
        raise WorkloadError(
            f"the model is on several devices: {', '.join(devices)}\n"
            "call this before the model is distributed, or on a part of it"
        )
    return devices[0] if devices else "cpu"
