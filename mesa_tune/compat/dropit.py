"""DropIT (arXiv 2202.13808) as its users write it: `from mesa_tune.compat.dropit import to_dropit`.

A layer keeps the int(numel · (1 − γ)) elements of its input that are largest in magnitude, over the whole
tensor, and their values exactly; where they are takes one bit an element. The rest counts as zero, so the
gradient of the weight is biased: that is DropIT's bargain, and `rounding` has no part in it.
"""

import inspect
import sys
from typing import Any

import torch
from torch import nn

from mesa_tune.codecs import Spec
from mesa_tune.compat.layers import name_layers
from mesa_tune.compat.mesa import layers as ms
from mesa_tune.functional.public import StandingAlone, policy_at_work
from mesa_tune.notice import warn_once
from mesa_tune.settings import LayerSettings

STRATEGIES = ("mink", "mink_cpuidx", "vrandom")


class DropITer:
    """How a module's input is kept, and its forward by that. Holds the module: a deepcopy holds the copy.

    `strategy`, `gamma`, `reserve` and `autocast` are DropIT's; `settings` say the same in our words.
    """

    def __init__(
        self, module: nn.Module, name: str, strategy: str, gamma: float, autocast: bool | None
    ) -> None:
        self.module = module
        self.name = name
        self.strategy = strategy
        self.gamma = gamma
        self.autocast = autocast
        self.before = module.__dict__.get("forward")

    @property
    def reserve(self) -> float:
        """The share of elements that are kept."""
        return 1 - self.gamma

    @property
    def settings(self) -> LayerSettings:
        """The same as settings of a layer."""
        return LayerSettings(drop=self.gamma, store="exact")

    def spec(self) -> Spec | None:
        """How the input is stored, whatever its size."""
        spec = Spec.of(self.settings, 0)
        return spec._replace(codec="vrandom") if spec is not None and self.strategy == "vrandom" else spec

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if policy_at_work() or not (self.module.training and torch.is_grad_enabled()):
            return self._plain(*args, **kwargs)
        with StandingAlone(self.spec(), self.name):
            return self._plain(*args, **kwargs)

    def _plain(self, *args: Any, **kwargs: Any) -> Any:
        if self.before is not None:
            return self.before(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.before or type(self.module).forward.__get__(self.module))


def to_dropit(
    model: nn.Module, strategy: str = "mink", gamma: float = 0.9, autocast: bool | None = None
) -> nn.Module:
    """`model`, changed in place: its Linear, Conv2d and transformers' Conv1D keep what DropIT keeps.

    `strategy`: `mink` (by magnitude), `mink_cpuidx` (the same: our index is a bit an element, and moving it
    would save nothing worth a transfer), `vrandom` (elements at random, each with probability 1 − γ). `gamma`
    in [0, 1). Modules with an attribute `no_dropit` are left alone. `autocast` may say anything: the autocast
    that surrounds the forward counts, with its dtype. Of Mesa's layers, `ms.Linear` and `ms.Conv2d` that a
    policy enables drop instead of quantizing. Raises ValueError for another strategy or gamma.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy must be one of {', '.join(STRATEGIES)}, but got {strategy!r}")
    if not 0 <= gamma < 1:
        raise ValueError(f"`0 <= gamma < 1` must hold, but got (gamma={gamma})")
    kinds = supported()
    for name, module in model.named_modules():
        if hasattr(module, "no_dropit") or not isinstance(module, kinds):
            continue
        if type(module) in kinds:
            _install(module, name, strategy, gamma, autocast)
        else:
            kind = type(module).__name__
            warn_once(f"mesa-tune: DropIT leaves {name!r} as it is: {kind} is not supported.")
    name_layers(model)
    return model


def supported() -> tuple[type[nn.Module], ...]:
    """The modules that DropIT knows; transformers' Conv1D is one wherever transformers is loaded."""
    kinds = (nn.Linear, nn.Conv2d, ms.Linear, ms.Conv2d)
    # Nobody has a Conv1D without having imported it.
    loaded = sys.modules.get("transformers.pytorch_utils")
    return kinds if loaded is None else (*kinds, loaded.Conv1D)


def _install(module: nn.Module, name: str, strategy: str, gamma: float, autocast: bool | None) -> None:
    remove(module)
    dropiter = DropITer(module, name, strategy, gamma, autocast)
    module.__dict__["dropiter"] = dropiter
    if isinstance(module, (ms.Linear, ms.Conv2d)):
        module.instead = dropiter.spec()
    else:
        module.__dict__["forward"] = dropiter


def remove(module: nn.Module) -> None:
    """`module` keeps again what it kept before DropIT; one without it is left alone."""
    dropiter = module.__dict__.pop("dropiter", None)
    if isinstance(module, (ms.Linear, ms.Conv2d)):
        module.instead = None
    elif module.__dict__.get("forward") is dropiter and isinstance(dropiter, DropITer):
        before = dropiter.before
        del module.__dict__["forward"]
        if before is not None:
            module.__dict__["forward"] = before
