"""Leaving a model, its optimizer and the random generators bit for bit as they were."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim import Optimizer

from mesa_tune.conversion import revert
from mesa_tune.conversion.model import conversion_of, install


@contextmanager
def preserved(model: nn.Module, optimizer: Optimizer | None = None) -> Iterator[Callable[[], None]]:
    """`model` is plain in the body, which may train and convert it; afterwards all of it is as before.

    Parameters, buffers, gradients, training mode, optimizer state, conversion and random states. What it
    gives puts the parameters back at once: buffers may tell that the first step is over.
    """
    weights, buffers = (
        [(each, each.detach().clone()) for each in tensors]
        for tensors in (model.parameters(), model.buffers())
    )
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    copies = [None if gradient is None else gradient.clone() for _, gradient in gradients]
    modes = [(module, module.training) for module in model.modules()]
    conversion = conversion_of(model)
    revert(model)
    state = None if optimizer is None else copy.deepcopy(optimizer.state_dict())
    with random_states_kept():
        try:
            yield lambda: _put_back(weights)
        finally:
            _put_back([*weights, *buffers])
            for (parameter, gradient), copied in zip(gradients, copies, strict=True):
                parameter.grad = gradient if copied is None or gradient is None else gradient.copy_(copied)
            for module, training in modes:
                module.training = training
            if optimizer is not None and state is not None:
                optimizer.load_state_dict(state)
            revert(model)
            if conversion is not None:
                install(model, conversion)


@contextmanager
def random_states_kept() -> Iterator[None]:
    """The random generators of torch, on all devices, are afterwards as before."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    with torch.random.fork_rng(devices=devices):
        yield


@torch.no_grad()
def _put_back(tensors: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for tensor, copied in tensors:
        tensor.copy_(copied)
