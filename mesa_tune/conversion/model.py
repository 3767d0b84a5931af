"""`convert`, `revert` and `compress_saved`: apply a policy to a model without replacing its modules (Rule 8).

What is hard is that only `module.forward` changes, which others wrap, copy, pickle and compile as well.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.jit import ScriptModule

from mesa_tune.conversion import entering
from mesa_tune.conversion.conversion import Conversion, entries
from mesa_tune.conversion.hooks import HOOKS
from mesa_tune.conversion.layers import Catalog, named_layers
from mesa_tune.conversion.python_state.watch import Watch
from mesa_tune.conversion.recompute import Job, recomputed
from mesa_tune.conversion.wrapping import (
    CONVERTED,
    REPLICATE,
    calls_converted,
    is_bound,
    refuse_replicas,
    restore_converted,
)
from mesa_tune.engine.routing import running, state, transformed
from mesa_tune.formulas.table import own_route
from mesa_tune.notice import warn_once
from mesa_tune.policy import Policy
from mesa_tune.policy.settings import MIN_ELEMENTS

_PARAMETER_TYPES = frozenset((nn.Parameter, type(None)))


class ConvertedForward(entering.Entrant):
    """A module's forward inside a conversion. It refers to the module, so a deepcopy refers to the copy.

    `reverted`: it runs the plain forward. It is still called where somebody has wrapped it.

    The `__call__` of each has its own code object. torch.compile limits how often it compiles one code
    object: blocks that are compiled one by one would reach that limit together.
    """

    def __new__(cls, *arguments: Any) -> "ConvertedForward":
        call = cls.__call__
        copy = FunctionType(call.__code__.replace(), call.__globals__, call.__name__)
        return object.__new__(type(cls.__name__, (cls,), {"__call__": copy}))

    watch: Watch | None = None
    """Of the module's Python state, if it runs again."""

    def __reduce__(self) -> Any:
        return _blank, (), {**self.__dict__, "watch": None}

    def __init__(self, module: nn.Module, name: str, conversion: Conversion) -> None:
        self.module = module
        self.route = own_route(module)
        self.previous = module.__dict__.get("forward")
        self.assign(name, conversion)

    def assign(self, name: str, conversion: Conversion) -> None:
        """Make the module part of `conversion`, under `name`."""
        self.name = name
        self.conversion = conversion
        self.recompute = conversion.recompute_spec(name)
        self.reverted = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.reverted:
            return self.plain(*args, **kwargs)
        if not torch.is_grad_enabled():
            inside = running(self.conversion)
            self.conversion.note_without_gradients(inside)
            if inside:
                return entering.run_without_gradients(self, args, kwargs)
            return self.plain(*args, **kwargs)
        if transformed():
            return self.plain(*args, **kwargs)
        if not _PARAMETER_TYPES.issuperset(map(type, self.module._parameters.values())):
            self.conversion.note_replaced_parameters(self.module)
        run = self.plain if self.recompute is None else self._recomputed
        return entering.enter(self, run, args, kwargs)

    def _recomputed(self, *args: Any, **kwargs: Any) -> Any:
        spec, frame = self.recompute, state.frames[-1]
        assert spec is not None
        self.watch = self.watch or Watch(self.module)
        job = Job(
            self.name,
            self.module,
            spec,
            plain=self.plain,
            run=partial(entering.enter, self, self.plain),
            packs=not HOOKS.runs_twice(frame),
            is_static=frame.is_static,
            key=self.conversion.key,
            is_new=self.conversion.first,
            watch=self.watch,
            probe=self._probe,
        )
        return recomputed(job, args, kwargs)

    def _probe(self, *args: Any, **kwargs: Any) -> Any:
        with self.conversion.unnoted():
            return self.plain(*args, **kwargs)


def _blank() -> ConvertedForward:
    return ConvertedForward.__new__(ConvertedForward)


def convert(
    model: nn.Module,
    policy: Policy,
    *,
    seed: int | None = None,
    min_elements: int = MIN_ELEMENTS,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    force: bool = False,
) -> nn.Module:
    """Make `model`, in place, store activations as `policy` says from its next forward on; return `model`.

    Parameters, buffers, `state_dict` keys and outputs stay bitwise equal. `seed` (default
    `torch.initial_seed()`) decides the rounding noise. Tensors of up to `min_elements` elements stay exact.
    `filter_fn(module, name)`: the layers of a module for which it returns False stay exact, whatever the
    policy says. It is asked once for every module, the root `""` and those inside a refused one too.
    Converting again replaces the policy and the filter.

    Raises:
        PolicyError: the policy names a layer that `model` does not have, or was made for another model
            (`force=True` applies it anyway).
    """
    catalog = Catalog.of(model)
    layers, modules = catalog.layers(), catalog.modules
    overruled = policy.check(
        layers, fingerprint=catalog.fingerprint, force=force, complete=False, modules=modules
    )
    policy.require_available()
    for text in (*policy.warnings, *overruled, *_limits(model)):
        warn_once(text)
    revert(model)
    noise_seed = torch.initial_seed() if seed is None else seed
    install(model, Conversion(policy, catalog, noise_seed, min_elements, _excluded(model, filter_fn)))
    return model


def _excluded(model: nn.Module, filter_fn: Callable[[nn.Module, str], bool] | None) -> frozenset[str]:
    """Return the names of the modules that `filter_fn` refuses."""
    if filter_fn is None:
        return frozenset()
    return frozenset(name for name, module in named_layers(model) if not filter_fn(module, name))


def _limits(model: nn.Module) -> Iterator[str]:
    """Yield warnings of modules of torch whose kernels save tensors that no formula can store."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if any(isinstance(module, ScriptModule) for module in model.modules()):
        yield "mesa-tune: what torch.jit compiled stays uncompressed: it runs outside Python."
    for name, module in named_layers(model):
        if isinstance(module, nn.RNNBase):
            yield (
                f"mesa-tune: {name!r} ({type(module).__name__}) is stored by hooks, at 8 bits, and tensors "
                "of single time steps that are too small to encode stay as they are."
            )
        if isinstance(module, nn.SyncBatchNorm) and distributed and torch.distributed.get_world_size() > 1:
            yield f"mesa-tune: {name!r} (SyncBatchNorm) across processes is left uncompressed."


def install(model: nn.Module, conversion: Conversion) -> None:
    """Replace the forward of every module of `model`, for `conversion`."""
    for parameter in model.parameters():
        conversion.key(parameter.device)
    for name, module in named_layers(model):
        if "_orig_mod" in module._modules or isinstance(module, ScriptModule):
            continue  # compile's wrapper passes the call on, and cannot be traced; scripts run outside Python
        converted = module.__dict__.get(CONVERTED)
        if converted is not None and calls_converted(module.__dict__.get("forward")):
            converted.assign(name, conversion)
        else:
            module.__dict__[CONVERTED] = module.__dict__["forward"] = ConvertedForward(
                module, name, conversion
            )
        module.__dict__[REPLICATE] = refuse_replicas


def revert(model: nn.Module) -> nn.Module:
    """Make `model` the plain model again; return it. Leave a model alone that is not converted."""
    for module in model.modules():
        converted = module.__dict__.get(CONVERTED)
        if converted is not None:
            _revert(module, converted)
    return model


def uninstall(model: nn.Module, conversion: Conversion) -> None:
    """Undo `install`, but for modules that were converted since then."""
    for module in model.modules():
        converted = module.__dict__.get(CONVERTED)
        if converted is not None and converted.conversion is conversion:
            _revert(module, converted)


def _revert(module: nn.Module, converted: ConvertedForward) -> None:
    module.__dict__.pop(REPLICATE, None)
    if is_bound(module):
        restore_converted(module)
    if module.__dict__.get("forward") is converted:
        converted.uninstall()
        del module.__dict__[CONVERTED]
    else:
        converted.reverted = True  # somebody has wrapped it, and still calls it


def conversion_of(model: nn.Module) -> Conversion | None:
    """Return the conversion of `model`, if any."""
    return next(conversions_of(model), None)


def conversions_of(model: nn.Module) -> Iterator[Conversion]:
    """Yield the conversion of each module of `model` that has one: parts may be converted apart."""
    forwards = (module.__dict__.get(CONVERTED) for module in model.modules())
    return (forward.conversion for forward in forwards if forward and not forward.reverted)


@contextmanager
def compress_saved(policy: Policy, *, seed: int | None = None) -> Iterator[None]:
    """Make calls in this context store what they save by `policy`, under names `loss.<function>.<n>`.

    This is for the parts of a step outside a converted model, such as a loss on large logits. A converted
    model inside follows its own policy; an unconverted one counts as part of the loss. The rounding noise
    depends on `seed`; by default on `torch.initial_seed()` and the number of entries, so that it differs from
    step to step.
    """
    policy.require_available()
    if entries.off:
        yield
        return
    noise_seed = torch.initial_seed() + entries.number if seed is None else seed
    entries.number += seed is None
    conversion = None if torch.compiler.is_compiling() else _take_finished(policy)
    if conversion is None:
        conversion = Conversion(policy, Catalog.empty(), noise_seed, MIN_ELEMENTS)
    else:
        conversion.restart(noise_seed)
    with entering.enter_loss(conversion):
        yield
    by_index = any(rule.indices not in (None, "all") for rule in policy.rules)  # other calls would shift it
    if not (by_index or torch.compiler.is_compiling()):
        _finished.append((policy, conversion))


_finished: deque[tuple[Policy, Conversion]] = deque(maxlen=4)
"""Conversions of finished `compress_saved` contexts, which have cached calls."""


def _take_finished(policy: Policy) -> Conversion | None:
    """Take the conversion of an equal policy from `_finished`, if there is one."""
    entry = next((entry for entry in tuple(_finished) if entry[0] is policy or entry[0] == policy), None)
    try:
        _finished.remove(entry)  # type: ignore[arg-type]
    except (ValueError, IndexError):  # none, or another thread has taken one
        return None
    return None if entry is None else entry[1]
