"""Contexts that restore a model, its optimizer and the random generators bitwise."""

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
    """Revert the conversion of `model` for the body, and restore everything afterwards.

    That is: parameters, buffers, gradients, training modes, optimizer state, conversion and random states.
    The body may train and convert the model. The context yields a function that restores the parameters
    alone: a buffer may record that the first step is over.
    """
    parameters, buffers = (
        [(tensor, tensor.detach().clone()) for tensor in tensors]
        for tensors in (model.parameters(), model.buffers())
    )
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    copies = [None if gradient is None else gradient.clone() for _, gradient in gradients]
    modes = [(module, module.training) for module in model.modules()]
    conversion = conversion_of(model)
    revert(model)
    state = None if optimizer is None else copy.deepcopy(optimizer.state_dict())
    with preserved_random_states():
        try:
            yield lambda: _restore(parameters)
        finally:
            _restore([*parameters, *buffers])
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
def preserved_random_states() -> Iterator[None]:
    """Restore the random states of torch on all devices after the body."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    with torch.random.fork_rng(devices=devices):
        yield


@torch.no_grad()
def _restore(tensors: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for tensor, copied in tensors:
        tensor.copy_(copied)
