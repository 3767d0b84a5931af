"""Contexts that restore a model, its optimizer and the random generators bitwise."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mesa_tune.conversion import revert
from mesa_tune.conversion.conversion import Conversion
from mesa_tune.conversion.model import conversion_of, install
from mesa_tune.conversion.python_state.watch import Watch, undone


@contextmanager
def preserved(
    model: nn.Module, optimizer: Optimizer | None = None, again: Callable[[], nn.Module] | None = None
) -> Iterator[Callable[[], None]]:
    """Revert the conversion of `model` for the body, and restore everything afterwards.

    That is: parameters, buffers, gradients, training modes, optimizer state, conversion, random states and
    what modules have in attributes and other variables.
    The body may train and convert the model. The context yields a function that restores the parameters
    alone, and drops gradients: a buffer may record that the first step is over. `again`: builds a model with
    the parameters that `model` has now; without it they are copied, those of a GPU to the host.
    """
    parameters, buffers = list(model.parameters()), list(model.buffers())
    values, buffer_values = [] if again else _copies(parameters), _copies(buffers)
    gradients = [(parameter, parameter.grad) for parameter in parameters]
    copies = [None if gradient is None else gradient.clone() for _, gradient in gradients]
    modes = [(module, module.training) for module in model.modules()]
    conversion = conversion_of(model)
    revert(model)
    state = None if optimizer is None else copy.deepcopy(optimizer.state_dict())

    def restore() -> None:
        for parameter in parameters:
            parameter.grad = None  # before a second model takes memory
        _restore(parameters, again().parameters() if again else values)

    with preserved_random_states(), undone(Watch(model)):
        try:
            yield restore
        finally:
            if optimizer is not None and state is not None:
                optimizer.load_state_dict(state)
            restore()
            _restore(buffers, buffer_values)
            for (parameter, gradient), copied in zip(gradients, copies, strict=True):
                parameter.grad = gradient if copied is None or gradient is None else gradient.copy_(copied)
            _restore_modes(modes)
            _reinstall(model, conversion)


@contextmanager
def set_aside(model: nn.Module) -> Iterator[None]:
    """Set the gradients and the conversion of `model` aside for the body, and restore them and its modes.

    Nothing is copied: parameters and buffers must be restored by the body.
    """
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]
    conversion = conversion_of(model)
    revert(model)
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        _restore_modes(modes)
        _reinstall(model, conversion)


@contextmanager
def preserved_random_states() -> Iterator[None]:
    """Restore the random states of torch on all devices after the body."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    with torch.random.fork_rng(devices=devices):
        yield


def _restore_modes(modes: Iterable[tuple[nn.Module, bool]]) -> None:
    for module, training in modes:
        module.training = training


def _reinstall(model: nn.Module, conversion: Conversion | None) -> None:
    revert(model)
    if conversion is not None:
        install(model, conversion)


def _copies(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return copies; on the host, because the memory of a GPU is scarce."""
    return [tensor.detach().to("cpu", copy=True) for tensor in tensors]


@torch.no_grad()
def _restore(tensors: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)
