"""Base class of the compat layers, and helpers that convert a model's layers in place.

A compat layer is a subclass of torch's layer: its parameters, `state_dict` and outputs are torch's. Only the
storage of its saved tensors differs. The forward must run in three situations: alone, inside a converted
model (whose policy then decides), and under `torch.compile`.
"""

from abc import abstractmethod
from typing import Any, TypeVar

import torch
from torch import nn

from mesa_tune.codecs import Spec
from mesa_tune.engine.function import Memories
from mesa_tune.formulas.table import own_route
from mesa_tune.functional import SettingsMode, policy_applies
from mesa_tune.notice import warn_once
from mesa_tune.policy.settings import LayerSettings

LayerType = TypeVar("LayerType", bound=nn.Module)
MAX_NAMES = 8


class CompatLayer(nn.Module):
    """Mixin before a torch layer: runs its forward, and stores what it saves by `storage_settings`.

    Inside a converted model the model's policy decides instead.
    """

    layer_name: str | None = None

    @abstractmethod
    def storage_settings(self) -> LayerSettings | Spec | None:
        """Return how the next call stores its saved tensors."""

    def is_compressing(self) -> bool:
        """Return whether the next call compresses: only in training mode, as in the original projects."""
        return self.training

    def memories(self, *args: Any, **kwargs: Any) -> Memories | None:
        """Return the codecs' state for a call with these arguments, by position of the saved tensor."""
        return None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of torch's layer."""
        if policy_applies() or not (torch.is_grad_enabled() and self.is_compressing()):
            return super().forward(*args, **kwargs)
        memories = None if torch.compiler.is_compiling() else self.memories(*args, **kwargs)
        with SettingsMode(self.storage_settings(), self.layer_name, memories):
            return super().forward(*args, **kwargs)


def change_class(module: nn.Module, cls: type[LayerType]) -> LayerType:
    """Make `module` an instance of `cls`, in place: its parameters, buffers, hooks and mode stay."""
    module.__class__ = cls
    assert isinstance(module, cls)
    return module


def name_layers(model: nn.Module) -> None:
    """Tell every compat layer in `model` its name, for use in warnings."""
    for name, module in model.named_modules():
        if isinstance(module, CompatLayer):
            module.layer_name = name


def warn_unconverted(model: nn.Module, why: str) -> None:
    """Warn once with the names of the modules in `model` that save activations as PyTorch does (Rule 9)."""
    names = [
        repr(f"{name} ({type(module).__name__})")
        for name, module in model.named_modules()
        if name and own_route(module) is not None and not isinstance(module, CompatLayer)
    ]
    if names:
        rest = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
        listed = ", ".join(names[:MAX_NAMES]) + rest
        warn_once(f"mesa-tune: left as they are in {type(model).__name__}: {listed}: {why}.")
