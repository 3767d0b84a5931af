"""`to_dropit`, and how a layer drops: `DropITer`.

A layer keeps the int(numel · (1 − γ)) elements of its input that are largest in magnitude, over the whole
tensor, and their values exactly; where they are takes one bit an element. The rest counts as zero, so the
gradient of the weight is biased: that is DropIT's bargain, and `rounding` has no part in it.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn

from mesa_tune.codecs import Spec
from mesa_tune.compat.gact.controller import controllers_lifted
from mesa_tune.compat.layers import name_layers
from mesa_tune.compat.mesa import layers as ms
from mesa_tune.conversion.model import conversion_of
from mesa_tune.conversion.wrapping import Instead
from mesa_tune.functional import StandingAlone, policy_at_work
from mesa_tune.notice import warn_once
from mesa_tune.policy.settings import LayerSettings

STRATEGIES = ("mink", "mink_cpuidx", "vrandom")


class DropITer:
    """How a layer drops: DropIT's `strategy`, `gamma` and `reserve` (the share of elements that is saved).

    Layers store by `spec()`. `select` and `pad` are for functions that save a tensor themselves, as DropIT's
    do. `autocast` is a note, as in DropIT.
    """

    def __init__(self, strategy: str, gamma: float) -> None:
        if strategy not in STRATEGIES:
            raise ValueError(f"strategy must be one of {', '.join(STRATEGIES)}, but got {strategy!r}")
        if not 0 <= gamma < 1:
            raise ValueError(f"`0 <= gamma < 1` must hold, but got (gamma={gamma})")
        self.strategy = strategy
        self.gamma = gamma
        self.reserve = 1 - gamma
        self.autocast: bool | None = None

    @property
    def settings(self) -> LayerSettings:
        """The same as settings of a layer."""
        return LayerSettings(drop=self.gamma, store="exact")

    def spec(self) -> Spec | None:
        """How the input is stored, whatever its size."""
        spec = Spec.of(self.settings, 0)
        return spec._replace(codec="vrandom") if spec is not None and self.strategy == "vrandom" else spec

    def select(self, x: Tensor, ctx: Any = None) -> Tensor:
        """What is saved of `x`, in one dimension. `ctx` gets `idxs`, the places of it, and `numel`.

        `vrandom` saves zeros where it drops, and needs no `ctx`.
        """
        flat = x.reshape(-1)
        if self.strategy == "vrandom":
            return (torch.rand_like(flat) <= self.reserve) * flat
        places = flat.abs().topk(int(flat.numel() * self.reserve), sorted=False).indices
        ctx.idxs, ctx.numel = places.to(torch.int32), flat.numel()
        selected: Tensor = flat[places]
        selected.dropped = True  # type: ignore[attr-defined]
        return selected

    def pad(self, x: Tensor, ctx: Any = None) -> Tensor:
        """What `select` returned with zeros in the other places, in one dimension."""
        if self.strategy == "vrandom":
            return x
        whole = torch.zeros(ctx.numel, device=x.device, dtype=x.dtype)
        return whole.scatter_(0, ctx.idxs.to(x.device, torch.int64), x)

    @staticmethod
    def transfer(model: nn.Module, strategy: str, gamma: float, autocast: bool | None) -> nn.Module:
        """`to_dropit`."""
        return to_dropit(model, strategy, gamma, autocast)


class DroppingForward(Instead):
    """The forward of a module that drops. Holds the module: a deepcopy holds the copy."""

    def __init__(self, module: nn.Module, name: str, dropiter: DropITer) -> None:
        self.module = module
        self.name = name
        self.dropiter = dropiter
        self.hang()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if policy_at_work() or not (self.module.training and torch.is_grad_enabled()):
            return self.plain(*args, **kwargs)
        with StandingAlone(self.dropiter.spec(), self.name):
            return self.plain(*args, **kwargs)


def to_dropit(
    model: nn.Module, strategy: str = "mink", gamma: float = 0.9, autocast: bool | None = None
) -> nn.Module:
    """`model`, changed in place: its Linear, Conv2d and transformers' Conv1D keep what DropIT keeps.

    `strategy`: `mink` (by magnitude), `mink_cpuidx` (the same: our index is a bit an element, and moving it
    would save nothing worth a transfer), `vrandom` (elements at random, each with probability 1 − γ). `gamma`
    in [0, 1). Modules with an attribute `no_dropit` are left alone. `autocast` may say anything: the autocast
    that surrounds the forward counts, with its dtype. Of Mesa's layers, `ms.Linear` and `ms.Conv2d` that a
    policy enables drop instead of quantizing. A model that GACT's `Controller` compresses drops, too, and the
    controller compresses the rest. In one that `mt.convert` took the policy decides, and a warning says so.
    Raises ValueError for another strategy or gamma.
    """
    DropITer(strategy, gamma)
    with controllers_lifted(model):
        if conversion_of(model) is None:
            _transfer(model, strategy, gamma, autocast)
        else:
            warn_once(
                "mesa-tune: to_dropit has no effect here: in a model that mt.convert took, the policy "
                f"decides. Write `drop: {gamma}` and `store: exact` into the policy."
            )
    name_layers(model)
    return model


def _transfer(model: nn.Module, strategy: str, gamma: float, autocast: bool | None) -> None:
    kinds = supported()
    for name, module in model.named_modules():
        if hasattr(module, "no_dropit") or not isinstance(module, kinds):
            continue
        if type(module) in kinds:
            _install(module, name, strategy, gamma, autocast)
        else:
            kind = type(module).__name__
            warn_once(f"mesa-tune: DropIT leaves {name!r} as it is: {kind} is not supported.")


def supported() -> tuple[type[nn.Module], ...]:
    """The modules that DropIT knows; transformers' Conv1D is one wherever transformers is loaded."""
    kinds = (nn.Linear, nn.Conv2d, ms.Linear, ms.Conv2d)
    # Nobody has a Conv1D without having imported it.
    loaded = sys.modules.get("transformers.pytorch_utils")
    return kinds if loaded is None else (*kinds, loaded.Conv1D)


def _install(module: nn.Module, name: str, strategy: str, gamma: float, autocast: bool | None) -> None:
    remove(module)
    dropiter = DropITer(strategy, gamma)
    dropiter.autocast = autocast
    module.__dict__["dropiter"] = dropiter
    if isinstance(module, (ms.Linear, ms.Conv2d)):
        module.instead = dropiter.spec()
    else:
        DroppingForward(module, name, dropiter)


def remove(module: nn.Module) -> None:
    """`module` saves again what it saved before DropIT; one without it is left alone."""
    module.__dict__.pop("dropiter", None)
    forward = module.__dict__.get("forward")
    if isinstance(module, (ms.Linear, ms.Conv2d)):
        module.instead = None
    elif isinstance(forward, DroppingForward):
        forward.take_down()
