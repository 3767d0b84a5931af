"""The sweep over transformers: every model type that builds tiny, plain beside converted, in training mode.

A case is a model type in a variant: a policy (`256`, `16`, `derive`) and a mode (`plain`, `bf16`,
`checkpoint`, `reentrant`), or `profile` and a mode. Each step runs three times, so that first, planned and
cached calls are seen.

Attention whose scores are large amplifies what is rounded. So an error above the bound is compared with that
of the plain model whose queries and keys are rounded in the forward (the control); with `derive`, which makes
activations again of rounded inputs, the inputs of activations too; and under autocast with what bfloat16
itself makes of the gradient.
"""

from __future__ import annotations

import functools
import random
import statistics
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import mesa_tune as mt
from benchmarks.sweeps.architectures import (
    FAILURES,
    Architecture,
    NotBuiltError,
    architecture,
    heads_of,
    model_types,
)
from benchmarks.sweeps.checks import SPREAD
from benchmarks.sweeps.runner import BROKEN, RIGHT, SKIPPED, Case, Outcome, Sweep
from mesa_tune import ops
from mesa_tune.formulas import activation
from mesa_tune.measure.memory.meter import measure_step
from mesa_tune.profiles.entries import REACHED_BY_NONE
from mesa_tune.profiles.profile import Profile

MIN_ELEMENTS = 1024
LARGE = 16 * 1024  # bytes: storages up to this are counted apart
POLICIES = {
    "256": mt.Policy.uniform(level=256),
    "16": mt.Policy.uniform(level=16),
    "derive": mt.Policy.uniform(level=16, store="derive"),
}
MODES = ("plain", "bf16", "checkpoint", "reentrant")
LAYERS = 2.0  # what errors of layers add up to, in those of one
BOUNDS = {
    kind: LAYERS * SPREAD / (level - 1) ** 2 for kind, level in (("256", 256), ("16", 16), ("derive", 16))
}
PREDICTED = 0.01  # of the measured bytes, a prediction may be off
FACTOR = 3.0  # between the errors with and without checkpointing, of one rounding seed each
ENDLESS = {("wavlm", "reentrant")}
"""Models that go back through one checkpoint from inside another, each time through all before it."""
STEPS = 3
SEEDS = 5  # of which the median error counts, where that of the first is above the bound
MB = 10**6


@dataclass(frozen=True)
class Steps:
    """What three steps gave: the losses, and the gradients of the last."""

    losses: list[Tensor]
    grads: dict[str, Tensor]


def cases() -> list[Case]:
    """Every model type that has a class of its own, in every variant."""
    variants = [f"{policy} {mode}" for mode in MODES for policy in POLICIES]
    variants += ["profile plain", "profile checkpoint", "profile reentrant"]
    return [Case(name, variant) for name in model_types() if heads_of(name) for variant in variants]


def run(case: Case) -> Outcome:
    """Try one model type in one variant."""
    kind, mode = case.variant.split()
    if (case.name, mode) in ENDLESS:
        return Outcome(SKIPPED, "plain runs parts again without end")
    try:
        made = _architecture(case.name)
        _with_mode(made.build(), mode)
    except ValueError as error:
        return Outcome(SKIPPED, _said(error))
    if kind == "profile":
        return _profiled(made, mode)
    return _trained(made, kind, mode)


def _architecture(name: str) -> Architecture:
    found = _tried(name)
    if isinstance(found, NotBuiltError):
        raise found
    return found


@functools.lru_cache(maxsize=2)
def _tried(name: str) -> Architecture | NotBuiltError:
    try:
        return architecture(name)
    except NotBuiltError as error:
        return error


def _trained(made: Architecture, kind: str, mode: str) -> Outcome:
    try:
        plain = _plain(made.model_type, mode)
    except FAILURES as error:
        return Outcome(SKIPPED, f"plain raises {_said(error)}")
    try:
        mine = steps(made, mode, POLICIES[kind])
    except FAILURES as error:
        return Outcome(BROKEN, f"raises {_said(error)}", {"head": made.head})
    return _compared(made, kind, mode, plain, mine)


@functools.lru_cache(maxsize=4)
def _plain(name: str, mode: str) -> Steps:
    return steps(_architecture(name), mode, None)


@functools.lru_cache(maxsize=4)
def _unchecked(name: str, kind: str) -> float:
    """The gradient error without checkpointing."""
    return _typical_error(_architecture(name), kind, "plain", _plain(name, "plain"))


def _typical_error(
    made: Architecture, kind: str, mode: str, plain: Steps, first: Steps | None = None
) -> float:
    """The error of the first rounding seed; the median of `SEEDS` where that is above the bound."""
    first = first or steps(made, mode, POLICIES[kind])
    found = error(first.grads, plain.grads)
    if found <= BOUNDS[kind]:
        return found
    more = [error(steps(made, mode, POLICIES[kind], seed).grads, plain.grads) for seed in range(1, SEEDS)]
    return statistics.median([found, *more])


class _Rounded(TorchFunctionMode):
    """Attention of rounded queries and keys, and activations of rounded inputs where `activations` is set.

    Gradients pass as if nothing were rounded.
    """

    def __init__(self, bits: int, activations: bool) -> None:
        super().__init__()
        self.bits, self.activations = bits, activations

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            args = (*(self._rounded(each) for each in args[:2]), *args[2:])
        elif self.activations and func in activation.ROUTES:
            args = tuple([self._rounded(each) if _is_large(each) else each for each in args])
        return func(*args, **(kwargs or {}))

    def _rounded(self, x: Tensor) -> Tensor:
        return x + (ops.dequantize(ops.quantize(x, self.bits, seed=0)) - x.detach())


def _is_large(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.numel() > MIN_ELEMENTS


def _control(made: Architecture, kind: str, mode: str, plain: Steps) -> float:
    """The error of the plain model that rounds in its forward, to as many bits or to bfloat16."""
    with _Rounded(8 if kind == "256" else 4, activations=kind == "derive"):
        found = steps(made, mode, None)
    rounded = error(found.grads, plain.grads)
    if mode != "bf16":
        return rounded
    return max(rounded, error(plain.grads, _plain(made.model_type, "plain").grads))


def steps(made: Architecture, mode: str, policy: mt.Policy | None, seed: int = 0) -> Steps:
    """Three forwards and backwards on one batch, each under the same random state."""
    _seed(0)
    model, batch = _with_mode(made.build(), mode), made.batch()
    if policy is not None:
        mt.convert(model, policy, seed=seed, min_elements=MIN_ELEMENTS)
    losses = []
    for _ in range(STEPS):
        model.zero_grad(set_to_none=True)
        _seed(1)
        with torch.autocast("cpu", torch.bfloat16, enabled=mode == "bf16"):
            loss = made.loss(model, batch)
        loss.backward()
        losses.append(loss.detach())
    mt.revert(model)  # some types of models have one module in common
    return Steps(
        losses, {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    )


def _seed(seed: int) -> None:
    """Seed every generator that models draw from: some draw masks from NumPy."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def _with_mode(model: nn.Module, mode: str) -> nn.Module:
    if mode in {"checkpoint", "reentrant"}:
        enable: Any = model.gradient_checkpointing_enable
        enable(gradient_checkpointing_kwargs={"use_reentrant": mode == "reentrant"})
    return model


def _with_every_layer(model: nn.Module) -> nn.Module:
    """The model without layers that are left out at random: another step would have other bytes."""
    for module in model.modules():
        for holder in (module, getattr(module, "config", None) or module):
            for name in [each for each in vars(holder) if each.endswith("layerdrop")]:
                setattr(holder, name, 0.0)
    return model


def error(grads: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """The squared relative error of the whole gradient."""
    off = sum((grads[name] - exact[name]).double().square().sum() for name in exact)
    size = sum(each.double().square().sum() for each in exact.values())
    return float(off / size)


def _compared(made: Architecture, kind: str, mode: str, plain: Steps, mine: Steps) -> Outcome:
    figures: dict[str, Any] = {"head": made.head}
    fault = _difference(plain, mine)
    if fault and _difference(plain, steps(made, mode, None)):
        return Outcome(SKIPPED, "plain is not deterministic")
    if fault:
        return Outcome(BROKEN, fault, figures)
    figures["error"] = found = _typical_error(made, kind, mode, plain, mine)
    if found > BOUNDS[kind]:
        figures["control"] = _control(made, kind, mode, plain)
    if found > max(BOUNDS[kind], FACTOR * figures.get("control", 0.0)):
        return Outcome(BROKEN, f"error {found:.2g} above {BOUNDS[kind]:g}", figures)
    if mode in {"checkpoint", "reentrant"}:
        return _beside_unchecked(made, kind, plain, found, figures)
    return Outcome(RIGHT, "", figures)


def _beside_unchecked(
    made: Architecture, kind: str, plain: Steps, found: float, figures: dict[str, Any]
) -> Outcome:
    """Whether the error is that without checkpointing, where that trains the same parameters."""
    if plain.grads.keys() == _plain(made.model_type, "plain").grads.keys():
        # What cannot be derived under somebody else's hooks is stored.
        kinds = ("derive", "16") if kind == "derive" else (kind,)
        unchecked = [_unchecked(made.model_type, each) for each in kinds]
        figures["unchecked"] = unchecked[0]
        if not min(unchecked) / FACTOR <= found <= max(unchecked) * FACTOR:
            return Outcome(BROKEN, f"error {found:.2g}, without checkpointing {unchecked[0]:.2g}", figures)
    return Outcome(RIGHT, "", figures)


def _difference(plain: Steps, mine: Steps) -> str:
    """What is wrong beside rounding; empty if nothing is."""
    for number, (first, second) in enumerate(zip(plain.losses, mine.losses, strict=True)):
        if not torch.equal(first, second):
            return f"loss of step {number} is {second.item():.9g}, plain {first.item():.9g}"
    if missing := plain.grads.keys() ^ mine.grads.keys():
        return f"{len(missing)} parameters have a gradient in one of both only: {min(missing)}"
    for name, exact in plain.grads.items():
        if torch.isfinite(exact).all() and not torch.isfinite(mine.grads[name]).all():
            return f"gradient of {name} is not finite"
    return ""


def _profiled(made: Architecture, mode: str) -> Outcome:
    try:
        _plain(made.model_type, mode)
    except FAILURES as error:
        return Outcome(SKIPPED, f"plain raises {_said(error)}")
    work = mt.Workload(
        lambda: _with_every_layer(_with_mode(made.build(), mode)),
        lambda _: made.batch(),
        made.loss,
        lambda parameters: torch.optim.SGD(parameters, lr=0.0),  # routed tokens go where they went
        batch_size=1,
    )
    try:
        profile = mt.profile(work, options=[])
    except FAILURES as error:
        return Outcome(BROKEN, f"raises {_said(error)}", {"head": made.head})
    figures = {"head": made.head, **_shares(profile)}
    for policy in (None, POLICIES["16"]):
        predicted = profile.saved_bytes if policy is None else profile.predict(policy).saved_bytes
        found = _measured(work, policy)
        name = "plain" if policy is None else "16"
        figures |= {f"predicted {name}": predicted, f"measured {name}": found}
        if abs(predicted - found) > PREDICTED * found:
            cause = f"{name}: predicted {predicted} saved bytes, measured {found}"
            return Outcome(BROKEN, cause, figures)
    return Outcome(RIGHT, "", figures)


def _measured(work: mt.Workload, policy: mt.Policy | None) -> int:
    """Saved bytes of a real step."""
    model, batch = work.build(), work.make_batch()
    if policy is None:
        return measure_step(model, batch, work.compute_loss, work.make_optimizer(model)).saved_bytes
    mt.convert(model, policy, seed=0)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with mt.compress_saved(policy, seed=0):
            return work.compute_loss(model, batch)

    found = measure_step(model, batch, loss, work.make_optimizer(model)).saved_bytes
    mt.revert(model)
    return found


def _shares(profile: Profile) -> dict[str, Any]:
    """Shares of plain's saved bytes that no formula serves: large tensors by function, small ones in sum."""
    functions: dict[str, float] = {}
    small = 0.0
    for entry in profile.exact:
        share = entry.bytes / profile.saved_bytes
        if entry.why not in REACHED_BY_NONE or entry.bytes <= LARGE:
            small += share * (entry.bytes <= LARGE)
        else:
            functions[entry.function] = functions.get(entry.function, 0.0) + share
    return {"no_formula": functions, "small": small}


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


SWEEP = Sweep("transformers", cases, run, limit_s=120, refresh=1500)
