"""`convert`, `revert` and `compress_saved`: a policy put to work on a model that stays as it is (Rule 8)."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import nn

from mesa_tune.conversion import entering
from mesa_tune.conversion.conversion import Conversion, entries
from mesa_tune.conversion.hooks import HOOKS
from mesa_tune.conversion.layers import Catalog, named_layers
from mesa_tune.conversion.recompute import Job, recomputed
from mesa_tune.conversion.wrapping import (
    OWN,
    REPLICATE,
    Rebindable,
    is_bound,
    leads_to_ours,
    put_back,
    refuse_replicas,
)
from mesa_tune.engine.routing import running, state, transformed
from mesa_tune.formulas.table import own_route
from mesa_tune.notice import warn_once
from mesa_tune.policy import Policy
from mesa_tune.policy.settings import MIN_ELEMENTS

_USUAL = frozenset((nn.Parameter, type(None)))


class ConvertedForward(Rebindable):
    """A module's forward inside a conversion. Holds the module, so that a deepcopy holds the copy.

    `reverted`: it runs the plain forward. It is still called where somebody has wrapped it.

    Each has a `__call__` with a code object of its own. torch.compile keeps what it made of a function with
    the code, and makes only so much for one: blocks that are compiled one by one would use it up together.
    """

    def __new__(cls, *arguments: Any) -> "ConvertedForward":
        called = cls.__call__
        own = FunctionType(called.__code__.replace(), called.__globals__, called.__name__)
        return object.__new__(type(cls.__name__, (cls,), {"__call__": own}))

    def __reduce__(self) -> Any:
        return _blank, (), self.__dict__

    def __init__(self, module: nn.Module, name: str, conversion: Conversion) -> None:
        self.module = module
        self.own = own_route(module)
        self.before = module.__dict__.get("forward")
        self.assign(name, conversion)

    def assign(self, name: str, conversion: Conversion) -> None:
        """Makes the module part of `conversion`, under `name`."""
        self.name = name
        self.conversion = conversion
        self.recompute = conversion.recompute_spec(name)
        self.reverted = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.reverted:
            return self.plain(*args, **kwargs)
        if not torch.is_grad_enabled():
            inside = running(self.conversion)
            self.conversion.passed_over(inside)
            return entering.pass_over(self, args, kwargs) if inside else self.plain(*args, **kwargs)
        if transformed():
            return self.plain(*args, **kwargs)
        if not _USUAL.issuperset(map(type, self.module._parameters.values())):
            self.conversion.note_swapped(self.module)
        run = self.plain if self.recompute is None else self._recomputed
        return entering.enter(self, run, args, kwargs)

    def _again(self, *args: Any, **kwargs: Any) -> Any:
        return entering.enter(self, self.plain, args, kwargs)

    def _recomputed(self, *args: Any, **kwargs: Any) -> Any:
        spec, frame = self.recompute, state.frames[-1]
        assert spec is not None
        packs = not HOOKS.runs_twice(frame)
        job = Job(
            self.name,
            self.module,
            spec,
            self.plain,
            self._again,
            packs,
            frame.is_static,
            self.conversion.key,
        )
        return recomputed(job, args, kwargs)


def _blank() -> ConvertedForward:
    return ConvertedForward.__new__(ConvertedForward)


def convert(
    model: nn.Module,
    policy: Policy,
    *,
    seed: int | None = None,
    min_elements: int = MIN_ELEMENTS,
    force: bool = False,
) -> nn.Module:
    """`model` stores activations as `policy` says, from its next forward on; returns `model`, changed in
    place.

    Parameters, buffers, `state_dict` keys and outputs stay bit for bit what they were. `seed` (default
    `torch.initial_seed()`) decides the rounding noise; tensors of up to `min_elements` elements stay exact.
    Converting again replaces the policy.

    Raises:
        PolicyError: the policy names a layer that `model` does not have, or was made for another model
            (`force=True` applies it anyway).
    """
    catalog = Catalog.of(model)
    overruled = policy.check(
        catalog.known(), fingerprint=catalog.fingerprint, force=force, complete=False, modules=catalog.modules
    )
    policy.require_available()
    for text in (*policy.warnings, *overruled):
        warn_once(text)
    for text in _hard_to_reach(model):
        warn_once(text)
    revert(model)
    install(model, Conversion(policy, catalog, torch.initial_seed() if seed is None else seed, min_elements))
    return model


def _hard_to_reach(model: nn.Module) -> Iterator[str]:
    """Texts on modules of torch whose kernels keep what no function of ours can keep for them."""
    grouped = torch.distributed.is_available() and torch.distributed.is_initialized()
    for name, module in named_layers(model):
        if isinstance(module, nn.RNNBase):
            yield (
                f"mesa-tune: {name!r} ({type(module).__name__}) is stored by hooks, at 8 bits, and tensors "
                "of single time steps that are too small to encode stay as they are."
            )
        if isinstance(module, nn.SyncBatchNorm) and grouped and torch.distributed.get_world_size() > 1:
            yield f"mesa-tune: {name!r} (SyncBatchNorm) across processes is left uncompressed."


def install(model: nn.Module, conversion: Conversion) -> None:
    """Wraps the forward of every module of `model`, for `conversion`."""
    for parameter in model.parameters():
        conversion.key(parameter.device)
    for name, module in named_layers(model):
        # What torch.compile wraps around a module only passes the call on, and is not for tracing.
        if "_orig_mod" not in module._modules:
            _install(module, name, conversion)


def _install(module: nn.Module, name: str, conversion: Conversion) -> None:
    own = module.__dict__.get(OWN)
    if own is not None and leads_to_ours(module.__dict__.get("forward")):
        own.assign(name, conversion)
    else:
        module.__dict__[OWN] = module.__dict__["forward"] = ConvertedForward(module, name, conversion)
    module.__dict__[REPLICATE] = refuse_replicas


def revert(model: nn.Module) -> nn.Module:
    """`model` is the plain model again; returns it. A model that was not converted is left alone."""
    for module in model.modules():
        own = module.__dict__.get(OWN)
        if own is not None:
            _revert(module, own)
    return model


def _revert(module: nn.Module, own: ConvertedForward) -> None:
    module.__dict__.pop(REPLICATE, None)
    if is_bound(module):
        put_back(module)
    if module.__dict__.get("forward") is not own:
        own.reverted = True  # somebody has wrapped it, and goes on calling it
        return
    del module.__dict__["forward"], module.__dict__[OWN]
    if own.before is not None:
        module.forward = own.before


def conversion_of(model: nn.Module) -> Conversion | None:
    """The conversion that `model` is under, if any."""
    owned = (module.__dict__.get(OWN) for module in model.modules())
    return next((own.conversion for own in owned if own is not None and not own.reverted), None)


@contextmanager
def compress_saved(policy: Policy, *, seed: int | None = None) -> Iterator[None]:
    """Calls in this context store what they keep by `policy`, under names `loss.<function>.<n>`.

    For the parts of a step outside a converted model, such as a loss on large logits. A converted model
    inside keeps its own policy;
    an unconverted one counts as part of the loss. The rounding noise depends on `seed`; by default on
    `torch.initial_seed()` and a count of the entries, so that every step has its own.
    """
    policy.require_available()
    chosen = torch.initial_seed() + entries.number if seed is None else seed
    entries.number += seed is None
    conversion = None if torch.compiler.is_compiling() else _left(policy)
    if conversion is None:
        conversion = Conversion(policy, Catalog.empty(), chosen, MIN_ELEMENTS)
    else:
        conversion.restart(chosen)
    with entering.entered(conversion, "loss"):
        yield
    if not torch.compiler.is_compiling():
        _last.append((policy, conversion))


_last: deque[tuple[Policy, Conversion]] = deque(maxlen=4)
"""Conversions that `compress_saved` has left, with their cached calls."""


def _left(policy: Policy) -> Conversion | None:
    """Take the conversion of an equal policy from `_last`, if there is one."""
    entry = next((entry for entry in tuple(_last) if entry[0] is policy or entry[0] == policy), None)
    try:
        _last.remove(entry)  # type: ignore[arg-type]
    except ValueError:  # none, or another thread has taken it
        return None
    return None if entry is None else entry[1]
