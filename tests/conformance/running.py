"""One step of a case, plain or converted, in every situation that a training script may put it in."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mesa_tune as mt
from mesa_tune.measure.memory.meter import Meter
from mesa_tune.policy import Policy
from tests.builders import conversion
from tests.conformance.cases import Case, SelfAttention
from tests.step_memory import Composed


def _lifted(model: Any, x: Tensor) -> Tensor:
    """A case's layer inside a model: its input is an activation, not the batch; something may follow it."""
    situation: Situation = model.situation
    h = x if situation.on_batch else x + model.shift[: len(x)]
    if situation.non_contiguous:
        h = h.transpose(0, -1).contiguous().transpose(0, -1)
    return situation.after(situation.around(model.layer, h))


def _call(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    return function(*args)


def _nothing(y: Tensor) -> Tensor:
    return y


@dataclass(frozen=True)
class Situation:
    """What is unusual about a step. `around` calls the layer, `outside` the model, `after` follows it."""

    id: str = "train"
    training: bool = True
    autocast: bool = False
    dtype: torch.dtype = torch.float32
    frozen_weight: bool = False
    frozen_input: bool = False
    on_batch: bool = False
    non_contiguous: bool = False
    zero_batch: bool = False
    after: Callable[[Tensor], Tensor] = _nothing
    around: Callable[..., Tensor] = _call
    outside: Callable[..., Tensor] = _call


def _in_place_on_view(y: Tensor) -> Tensor:
    (y[:1] if y.dim() else y.view(1)).mul_(2)
    return y


_REENTRANT = partial(checkpoint, use_reentrant=True)
_CHECKPOINT = partial(checkpoint, use_reentrant=False)

SITUATIONS: tuple[Situation, ...] = (
    Situation(),
    Situation("eval", training=False),
    Situation("autocast", autocast=True),
    Situation("autocast-eval", autocast=True, training=False),
    Situation("bfloat16", dtype=torch.bfloat16),
    Situation("frozen-weight", frozen_weight=True),
    Situation("frozen-input", frozen_input=True),
    Situation("on-the-batch", on_batch=True),
    Situation("non-contiguous", non_contiguous=True),
    Situation("zero-batch", zero_batch=True),
    Situation("dropout-after", after=lambda y: F.dropout(y, 0.1, training=True)),
    Situation("in-place-after", after=lambda y: y.mul_(2).add_(1)),
    Situation("in-place-relu-after", after=lambda y: F.relu(y, inplace=True)),
    Situation("in-place-on-a-view-after", after=_in_place_on_view),
    Situation("checkpoint", around=_CHECKPOINT),
    Situation("checkpoint-reentrant", around=_REENTRANT),
    Situation("checkpoint-function", around=lambda f, h: _CHECKPOINT(lambda x: f(x) * 1.0, h)),
    Situation("checkpoint-function-reentrant", around=lambda f, h: _REENTRANT(lambda x: f(x) * 1.0, h)),
    Situation("checkpoint-outside", outside=_CHECKPOINT),
    # Reentrant checkpointing gives gradients only where an input wants one.
    Situation(
        "checkpoint-outside-reentrant", outside=lambda f, x: _REENTRANT(f, x.detach().requires_grad_())
    ),
)
PLAIN = SITUATIONS[0]


@dataclass(frozen=True)
class Outcome:
    """Output, gradients by parameter, buffers, and the random state after a step."""

    output: Tensor
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    random_state: Tensor


_OTHERWISE_IN_EVAL = (nn.modules.batchnorm._NormBase, nn.modules.dropout._DropoutNd, SelfAttention)


def applies(case: Case, situation: Situation) -> bool:
    """Whether the situation is possible with this case in PyTorch itself, and is none of the others."""
    if situation.zero_batch and (case.min_batch or case.id.startswith(("MultiheadAttention", "Conv3d"))):
        return False
    layer = case.module()
    if not situation.training and not isinstance(layer, _OTHERWISE_IN_EVAL):
        return False
    needs_parameters = situation.frozen_weight or situation.frozen_input or situation.on_batch
    return not needs_parameters or any(True for _ in layer.parameters())


def build(case: Case, situation: Situation = PLAIN) -> tuple[nn.Module, Tensor]:
    """The plain model of a case, and its batch."""
    torch.manual_seed(3)
    shift, layer = nn.Parameter(torch.zeros(case.shape)), case.module()
    model: Any = Composed(_lifted, shift=shift, layer=layer, situation=situation)
    model.to(situation.dtype).train(situation.training)
    for parameter in model.layer.parameters() if situation.frozen_weight else ():
        parameter.requires_grad_(False)
    model.shift.requires_grad_(not situation.frozen_input)
    shape = (0, *case.shape[1:]) if situation.zero_batch else case.shape
    return model, torch.randn(shape, dtype=situation.dtype)


def converted(model: nn.Module, *, level: int = 256, seed: int = 1, **settings: Any) -> nn.Module:
    """A converted copy of `model`; nothing is too small to be encoded."""
    settings.setdefault("group_size", None if settings.get("quant_groups") else 64)
    policy = Policy.uniform(level=level, **{k: v for k, v in settings.items() if v is not None})
    return mt.convert(copy.deepcopy(model), policy, seed=seed, min_elements=0)


def uncoded(model: nn.Module) -> nn.Module:
    """A converted copy whose functions are ours and keep their tensors as they are."""
    made = converted(model)
    inner = conversion(made)
    resolve = inner._resolve

    def raw(layer: str, tag: str, module: str) -> Any:
        spec = resolve(layer, tag, module)
        return None if spec is None else spec._replace(levels=0)

    inner._resolve = raw  # type: ignore[method-assign]
    return made


def forward(model: nn.Module, x: Tensor, situation: Situation = PLAIN) -> Tensor:
    """The model's output in the situation, from a fixed random state."""
    torch.manual_seed(5)
    with torch.autocast("cpu", torch.bfloat16, enabled=situation.autocast):
        return situation.outside(model, x)


def scored(output: Tensor) -> Tensor:
    """A loss whose gradient differs from element to element."""
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(9))
    return (output.float() * weights).sum()


def step(model: nn.Module, x: Tensor, situation: Situation = PLAIN) -> Outcome:
    """A forward and a backward from zero gradients."""
    model.zero_grad(set_to_none=True)
    output = forward(model, x, situation)
    kept = output.detach().clone()
    random_state = torch.get_rng_state()
    scored(output).backward()
    return Outcome(kept, gradients(model), {k: b.clone() for k, b in model.named_buffers()}, random_state)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradients there are, by parameter."""
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


def relative_error(found: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """‖ĝ − g‖² / ‖g‖² over all parameters."""
    assert found.keys() == right.keys()
    difference = sum(float((found[k].double() - right[k].double()).square().sum()) for k in right)
    scale = sum(float(right[k].double().square().sum()) for k in right)
    assert not math.isnan(difference), "a gradient is NaN"
    return difference / scale if scale else difference


def saved_bytes(model: nn.Module, x: Tensor, situation: Situation = PLAIN) -> int:
    """Bytes that are born in a second forward and live for its backward, by the outside meter."""
    step(model, x, situation)
    model.zero_grad(set_to_none=True)
    with Meter() as meter:
        loss = forward(model, x, situation).sum()  # a sum keeps nothing
        alive: int = meter.live_since(0, without=[loss, *model.buffers()])
    return alive
