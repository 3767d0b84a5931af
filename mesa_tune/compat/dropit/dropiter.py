"""DropIT's `to_dropit` and `DropITer`: layers that store only the largest elements of their input.

A layer saves the int(numel · (1 − γ)) elements of largest magnitude in its whole input. Their values are
exact; their positions take 1 bit per element of the input. Backward reads zeros for all other elements, so
the gradient of the weight is biased, as in DropIT. `rounding` has no effect.

What is hard is to combine DropIT with Mesa's layers, with GACT's controller and with `mt.convert`.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn

from mesa_tune.codecs import Spec
from mesa_tune.compat.gact.controller import controllers_suspended
from mesa_tune.compat.layers import name_layers
from mesa_tune.compat.mesa import layers as ms
from mesa_tune.conversion.model import conversion_of
from mesa_tune.conversion.wrapping import ReplacementForward
from mesa_tune.functional import SettingsMode, policy_applies
from mesa_tune.notice import warn_once
from mesa_tune.policy.settings import LayerSettings

STRATEGIES = ("mink", "mink_cpuidx", "vrandom")


class DropITer:
    """How a layer drops: DropIT's `strategy`, `gamma` and `reserve` (the share of elements that is saved).

    Layers store by `spec()`. `select` and `pad` are for autograd functions that save a tensor themselves, as
    DropIT's do. `autocast` is only recorded, as in DropIT.
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
        """The same choice as `LayerSettings`."""
        return LayerSettings(drop=self.gamma, store="exact")

    def spec(self) -> Spec | None:
        """Return the codec spec of the input, which is encoded whatever its size."""
        spec = Spec.of(self.settings, 0)
        return spec._replace(codec="vrandom") if spec is not None and self.strategy == "vrandom" else spec

    def select(self, x: Tensor, ctx: Any = None) -> Tensor:
        """Return the saved elements of `x`, in one dimension; set `ctx.idxs` (their indices) and `ctx.numel`.

        `vrandom` returns all elements, with zeros for the dropped ones, and needs no `ctx`.
        """
        flat = x.reshape(-1)
        if self.strategy == "vrandom":
            return (torch.rand_like(flat) <= self.reserve) * flat
        indices = flat.abs().topk(int(flat.numel() * self.reserve), sorted=False).indices
        ctx.idxs, ctx.numel = indices.to(torch.int32), flat.numel()
        selected: Tensor = flat[indices]
        selected.dropped = True  # type: ignore[attr-defined]
        return selected

    def pad(self, x: Tensor, ctx: Any = None) -> Tensor:
        """Return the whole tensor, in one dimension: `x` from `select`, and zeros elsewhere."""
        if self.strategy == "vrandom":
            return x
        whole = torch.zeros(ctx.numel, device=x.device, dtype=x.dtype)
        return whole.scatter_(0, ctx.idxs.to(x.device, torch.int64), x)

    @staticmethod
    def transfer(model: nn.Module, strategy: str, gamma: float, autocast: bool | None) -> nn.Module:
        """Call `to_dropit`."""
        return to_dropit(model, strategy, gamma, autocast)


class DroppingForward(ReplacementForward):
    """Forward of a module that drops. It refers to the module, so a deepcopy refers to the copy."""

    def __init__(self, module: nn.Module, name: str, dropiter: DropITer) -> None:
        self.module = module
        self.name = name
        self.dropiter = dropiter
        self.install()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if policy_applies() or not (self.module.training and torch.is_grad_enabled()):
            return self.plain(*args, **kwargs)
        with SettingsMode(self.dropiter.spec(), self.name):
            return self.plain(*args, **kwargs)


def to_dropit(
    model: nn.Module, strategy: str = "mink", gamma: float = 0.9, autocast: bool | None = None
) -> nn.Module:
    """Make Linear, Conv2d and transformers' Conv1D in `model` save what DropIT saves; return `model`.

    `strategy`: `mink` (largest magnitudes), `mink_cpuidx` (the same here: our index has 1 bit per element and
    is not worth a transfer), `vrandom` (random elements, each with probability 1 − γ). `gamma`: in [0, 1).
    `autocast` is ignored: the autocast around the forward decides, dtype included. Modules with an attribute
    `no_dropit` stay unchanged.

    With Mesa: `ms.Linear` and `ms.Conv2d` that a policy enables drop instead of quantizing. With GACT's
    `Controller`: these layers drop, and the controller compresses the other layers. In a model converted by
    `mt.convert` the policy decides, and a warning says so.

    Raises:
        ValueError: another strategy or gamma.
    """
    DropITer(strategy, gamma)
    with controllers_suspended(model):
        if conversion_of(model) is None:
            _transfer(model, strategy, gamma, autocast)
        else:
            warn_once(
                "mesa-tune: to_dropit has no effect here: in a model converted by mt.convert, the policy "
                f"decides. Write `drop: {gamma}` and `store: exact` into the policy."
            )
    name_layers(model)
    return model


def _transfer(model: nn.Module, strategy: str, gamma: float, autocast: bool | None) -> None:
    classes = supported()
    for name, module in model.named_modules():
        if hasattr(module, "no_dropit") or not isinstance(module, classes):
            continue
        if type(module) in classes:
            _install(module, name, strategy, gamma, autocast)
        else:
            warn_once(
                f"mesa-tune: DropIT leaves {name!r} as it is: {type(module).__name__} is not supported."
            )


def supported() -> tuple[type[nn.Module], ...]:
    """Return the module classes that DropIT converts, with transformers' Conv1D if it is imported."""
    classes = (nn.Linear, nn.Conv2d, ms.Linear, ms.Conv2d)
    # No import: a model can contain a Conv1D only after transformers was imported.
    loaded = sys.modules.get("transformers.pytorch_utils")
    return classes if loaded is None else (*classes, loaded.Conv1D)


def _install(module: nn.Module, name: str, strategy: str, gamma: float, autocast: bool | None) -> None:
    remove(module)
    dropiter = DropITer(strategy, gamma)
    dropiter.autocast = autocast
    module.__dict__["dropiter"] = dropiter
    if isinstance(module, (ms.Linear, ms.Conv2d)):
        module.dropit_spec = dropiter.spec()
    else:
        DroppingForward(module, name, dropiter)


def remove(module: nn.Module) -> None:
    """Undo `to_dropit` for `module`, if it was applied."""
    module.__dict__.pop("dropiter", None)
    forward = module.__dict__.get("forward")
    if isinstance(module, (ms.Linear, ms.Conv2d)):
        module.dropit_spec = None
    elif isinstance(forward, DroppingForward):
        forward.uninstall()
