"""Another optimizer like that of a training: a profile needs its bytes and times, and must not touch it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from mesa_tune.errors import WorkloadError
from mesa_tune.notice import warn_once


def remade(optimizer: Optimizer, model: nn.Module) -> Callable[[Iterable[nn.Parameter]], Optimizer]:
    """Return a function that makes an optimizer of the same class, groups and options, without state.

    It takes the trainable parameters of `model`, or of a copy, in their order. Raise WorkloadError if the
    class cannot be made from groups and options, or if `optimizer` has no parameter of the model.
    """
    inner = unwrapped(optimizer)
    positions = {id(each): index for index, each in enumerate(filter(_is_trainable, model.parameters()))}
    kind: Any = type(inner)
    accepted = inspect.signature(kind).parameters
    defaults = {name: value for name, value in inner.defaults.items() if name in accepted}

    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        given = list(parameters)
        groups = [
            {
                **group,
                "params": [given[positions[id(each)]] for each in group["params"] if id(each) in positions],
            }
            for group in inner.param_groups
        ]
        if not any(group["params"] for group in groups):
            raise WorkloadError(
                "optimizer: has no trainable parameter of the model\nmake it from model.parameters()"
            )
        try:
            made: Optimizer = kind([group for group in groups if group["params"]], **defaults)
        except TypeError as error:
            raise WorkloadError(
                f"optimizer: another {kind.__name__} cannot be made from its groups and options: {error}\n"
                "give a function of the parameters that makes one"
            ) from error
        return made

    return make


def advice(optimizer: Any) -> str | None:
    """Return what to know before an optimizer trains on rounded activations; None if there is nothing."""
    kinds = type(unwrapped(optimizer)).__mro__ if isinstance(optimizer, Optimizer) else ()
    name = next((kind.__name__ for kind in kinds if "LBFGS" in kind.__name__.upper()), None)
    if name is None:
        return None
    return (
        f"{name} divides by differences of gradients, which rounded activations change much more than the "
        "gradients themselves: compare its losses with those of plain training"
    )


def warn_of(optimizer: Any) -> None:
    """Warn of an optimizer that rounding disturbs, once in a training whose activations are compressed."""
    if text := advice(optimizer):
        warn_once(f"mesa-tune: {text}")


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer inside wrappers such as accelerate's."""
    inner = getattr(optimizer, "optimizer", None)
    return unwrapped(inner) if isinstance(inner, Optimizer) else optimizer


def _is_trainable(parameter: nn.Parameter) -> bool:
    return parameter.requires_grad
