"""What the layers of all four projects share: they *are* torch's, and only what they keep differs."""

from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import nn

from mesa_tune.codecs import Spec
from mesa_tune.engine.function import Memories
from mesa_tune.formulas.table import own_route
from mesa_tune.functional import StandingAlone, policy_at_work
from mesa_tune.notice import warn_once
from mesa_tune.policy.settings import LayerSettings

Kind = TypeVar("Kind", bound=nn.Module)
SHOWN = 8


class Keeping(nn.Module):
    """Runs its twin's forward; what is kept for backward follows `kept_by()` wherever `is_compressing()`.

    Inside a converted model the policy decides instead.
    """

    layer_name: str | None = None

    def kept_by(self) -> LayerSettings | Spec | None:
        """How this layer stores what it keeps, now."""
        raise NotImplementedError

    def is_compressing(self) -> bool:
        """Whether to compress in this call: in training only, as the projects do."""
        return self.training

    def memories(self, *args: Any, **kwargs: Any) -> Memories | None:
        """What codecs remember of this layer, by the place of what a call with these arguments keeps."""
        return None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The twin's forward."""
        if policy_at_work() or not (torch.is_grad_enabled() and self.is_compressing()):
            return super().forward(*args, **kwargs)
        memories = None if torch.compiler.is_compiling() else self.memories(*args, **kwargs)
        with StandingAlone(self.kept_by(), self.layer_name, memories):
            return super().forward(*args, **kwargs)


def become(module: nn.Module, kind: type[Kind]) -> Kind:
    """`module`, from now on a `kind`: parameters, buffers, hooks, mode and every reference to it stay."""
    module.__class__ = kind
    assert isinstance(module, kind)
    return module


def name_layers(model: nn.Module) -> None:
    """Gives every layer of ours in `model` its name there, for warnings."""
    for name, module in model.named_modules():
        if isinstance(module, Keeping):
            module.layer_name = name


def warn_left_alone(model: nn.Module, names: Iterable[str], why: str) -> None:
    """One warning that names the layers of `model` that keep what torch keeps (Rule 9)."""
    found = list(names)
    if found:
        more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        shown = ", ".join(repr(name) for name in found[:SHOWN]) + more
        warn_once(f"mesa-tune: left as they are in {type(model).__name__}: {shown}: {why}.")


def keepers_of_torch(model: nn.Module) -> list[str]:
    """Names of the modules below `model` that keep activations and are torch's own."""
    return [
        f"{name} ({type(module).__name__})"
        for name, module in model.named_modules()
        if name and own_route(module) is not None and not isinstance(module, Keeping)
    ]
