"""`convert`, `revert` and `compress_saved`: a policy put to work on a model that stays as it is (Rule 8)."""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn

from mesa_tune.codecs import Spec
from mesa_tune.conversion import routing
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
from mesa_tune.engine.cache import Settled
from mesa_tune.engine.context import running, state, transformed
from mesa_tune.engine.function import Memories, watch
from mesa_tune.engine.rematerialize import forget_outputs
from mesa_tune.engine.storage import forget_copies
from mesa_tune.formulas.table import own_route
from mesa_tune.notice import warn_once
from mesa_tune.policy import Policy
from mesa_tune.policy.settings import MIN_ELEMENTS

_STEP = 0x9E3779B97F4A7C15 - 2**64  # odd: the forward number runs through all 2⁶⁴ keys
_CPU = torch.device("cpu")
_USUAL = frozenset((nn.Parameter, type(None)))


class _Entries:
    """How often `compress_saved` was entered in this process."""

    number = 0


entries = _Entries()


class Conversion:
    """A policy at work on one model: settings by layer, the noise key, and what is never encoded.

    What is settled when: until a first forward has ended, a call of a function has no index, and the finest
    settings apply. Its backward may run parts of that forward again (checkpointing), and they must then save
    the same. So the final settings wait for the next forward and, if somebody's saved-tensor hooks or a part
    without gradients were met (`waits`), for a backward before it.
    """

    def __init__(self, policy: Policy, catalog: Catalog, seed: int, min_elements: int) -> None:
        self.policy = policy
        self.catalog = catalog
        self.min_elements = min_elements
        self.keys = {_CPU: torch.tensor([_mixed(seed)], dtype=torch.int64)}
        self.specs: dict[str, Spec | None] = {}
        self.settled: dict[str, Settled] = {}
        self.shapes: dict[str, list[torch.Size | None]] = {}  # of each layer's tensors in its last call
        self.static: dict[int, weakref.ref[UntypedStorage]] = {}
        self.derives = any(dict(rule.keys).get("store") == "derive" for rule in policy.rules)
        self.producers: set[str] = set()
        self.memories: dict[str, Memories] = {}
        self.root: nn.Module | None = None
        self.first = True
        self.changed = False  # settings that traced code holds: it is compiled again
        self.ended = False
        self.unseen = False
        self.waits = False
        self.backwards = watch.backwards
        self.owed = 0

    def begin(self, batch: Sequence[Tensor], root: nn.Module | None = None) -> None:
        """An outermost forward of `root` begins: the forward number advances, and its batch becomes known."""
        for key in self.keys.values():
            key.add_(_STEP)
        if torch.compiler.is_compiling():
            return
        if self.first and self.ended and not (self.waits and self.backwards == watch.backwards):
            self.first = False
            self.changed = self._settling_changes()
        forget_copies()
        forget_outputs()
        self.owed = 0
        self.root = root
        self.static = {address: storage for address, storage in self.static.items() if storage() is not None}
        self._never_encode(batch)

    def end(self) -> None:
        """An outermost forward has ended: every layer that ran with gradients is known."""
        if torch.compiler.is_compiling():
            if self.first and self._settling_changes():
                self.first, self.changed = False, True
            return
        self.root = None
        self.ended = True
        if not self.unseen:
            self._settle()

    def passed_over(self, inside: bool) -> None:
        """A module ran without gradients, perhaps to run again in backward (reentrant checkpointing).

        Layers `inside` an outermost forward have not been seen then; one that is outermost has a forward
        number to come.
        """
        if torch.compiler.is_compiling():
            return
        if inside:
            self.unseen = self.waits = True
        else:
            self.owed += 1

    def spec(self, layer: str, tag: str, module: str) -> Spec | None:
        """How `layer` stores what it keeps; None: as PyTorch does."""
        if torch.compiler.is_compiling():
            constant: Spec | None = self._constant_spec(layer, tag, module, self.changed)
            return constant
        return self._known_spec(layer, tag, module)

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _constant_spec(self, layer: str, tag: str, module: str, changed: bool) -> Spec | None:
        return self._known_spec(layer, tag, module)

    def _known_spec(self, layer: str, tag: str, module: str) -> Spec | None:
        return self.specs[layer] if layer in self.specs else self._resolve(layer, tag, module)

    def _resolve(self, layer: str, tag: str, module: str) -> Spec | None:
        if tag == "attention":
            self._bind_attention()
        index = self.catalog.index(layer, tag, module)
        settings = self.policy.settings(tag, index, layer)
        found = Spec.of(settings, self.min_elements)
        if found is not None and self.derives:
            # Who makes whose output again shows in the first forward, unless a search has said so.
            likely = self.first and (found.derive or not self.policy.is_searched)
            found = found._replace(serves=likely or layer in self.producers)
        self.specs[layer] = found
        return found

    def _bind_attention(self) -> None:
        bound = self.policy.bind_attention()
        if bound is not self.policy and not any(rule.tag == "attention" for rule in self.policy.rules):
            self.policy = bound
            for text in bound.warnings:
                warn_once(text)

    def _settle(self) -> None:
        for text in self.catalog.settle(self.policy):
            warn_once(text)

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _settling_changes(self) -> bool:
        before = dict(self.specs)
        self._settle()
        self.specs.clear()
        changed = [
            name for name, spec in before.items() if self._resolve(name, self.catalog.tag(name), "") != spec
        ]
        for name in changed:
            self.settled.pop(name, None)
        return bool(changed)

    def key(self, device: torch.device) -> Tensor:
        """The one-element int64 tensor that rounding noise depends on, on `device`."""
        if device in self.keys:
            return self.keys[device]
        made = self.keys[_CPU].to(device, non_blocking=True)
        if not torch.compiler.is_compiling():
            self.keys[device] = made
        return made

    def recompute_spec(self, module: str) -> Spec | None:
        """How `module` stores its inputs if it keeps nothing else; None if it does not run again."""
        settings = self.policy.recomputed(module)
        return None if settings is None else Spec.of(settings, self.min_elements)

    def note(self, layer: str) -> None:
        """Another layer makes the output of `layer` again, so it goes on keeping what that takes."""
        if torch.compiler.is_compiling():
            self._constant_note(layer)
        else:
            self.producers.add(layer)

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _constant_note(self, layer: str) -> bool:
        self.producers.add(layer)
        return True

    def memory(self, layer: str) -> Memories | None:
        """What codecs remember of `layer` from step to step; None in traced code."""
        return None if torch.compiler.is_compiling() else self.memories.setdefault(layer, {})

    def is_static(self, tensor: Tensor) -> bool:
        """Whether `tensor` lies in the storage of a parameter, a buffer or the batch."""
        if tensor.layout is not torch.strided:
            return False
        storage = tensor.untyped_storage()
        known = self.static.get(storage._cdata)
        if known is not None and known() is storage:
            return True
        if self.root is None or not tensor.is_leaf:
            return False
        # Parameters and buffers are looked up in the forwards that need them. A leaf may stand for a
        # parameter (`torch.func.functional_call`), also that of a module that is never called.
        root, self.root = self.root, None
        self._never_encode(chain(root.parameters(), root.buffers()))
        return self.is_static(tensor)

    def note_swapped(self, module: nn.Module) -> None:
        """Notes what `torch.func.functional_call` has put in the place of parameters of `module`."""
        given: Iterator[Tensor] = module.parameters()
        swapped = [each for each in given if not isinstance(each, nn.Parameter)]
        if not torch.compiler.is_compiling():
            self._never_encode(swapped)
        elif state.frames:  # the outermost module's are among its batch
            state.frames[-1].batch.extend(swapped)

    def _never_encode(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                self.static[storage._cdata] = weakref.ref(storage)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "static": {}, "settled": {}, "shapes": {}, "root": None}


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
            return routing.pass_over(self, args, kwargs) if inside else self.plain(*args, **kwargs)
        if transformed():
            return self.plain(*args, **kwargs)
        if not _USUAL.issuperset(map(type, self.module._parameters.values())):
            self.conversion.note_swapped(self.module)
        run = self.plain if self.recompute is None else self._recomputed
        return routing.enter(self, run, args, kwargs)

    def _again(self, *args: Any, **kwargs: Any) -> Any:
        return routing.enter(self, self.plain, args, kwargs)

    def _recomputed(self, *args: Any, **kwargs: Any) -> Any:
        spec, frame = self.recompute, state.frames[-1]
        assert spec is not None
        packs = not routing.runs_twice(frame)
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
    conversion = Conversion(policy, Catalog.empty(), chosen, MIN_ELEMENTS)
    with routing.entered(conversion, "loss"):
        yield


def _mixed(seed: int) -> int:
    mixed = (seed * 0xBF58476D1CE4E5B9 + of_rank()) % 2**64
    return _signed(mixed)


def of_rank() -> int:
    """What the rank adds to a seed: two processes round differently."""
    known = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank = torch.distributed.get_rank() if known else 0
    return _signed((rank + 1) * 0x94D049BB133111EB % 2**64)


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number
