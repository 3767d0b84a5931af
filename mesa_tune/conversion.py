"""`convert`, `revert` and `compress_saved`: a policy put to work on a model that stays as it is (Rule 8)."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, count
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from mesa_tune import routing
from mesa_tune.catalog import Catalog, named_layers
from mesa_tune.codecs import Spec
from mesa_tune.functional.keeping import forget_copies
from mesa_tune.functional.routes import Route, own_route
from mesa_tune.policy import Policy

MIN_ELEMENTS = 4096
_STEP = 0x9E3779B97F4A7C15 - 2**64  # odd: the forward number runs through all 2⁶⁴ keys
_entries = count()


class Conversion:
    """A policy at work on one model: settings by layer, the noise key, and what is never encoded."""

    def __init__(self, policy: Policy, catalog: Catalog, seed: int, min_elements: int) -> None:
        self.policy = policy
        self.catalog = catalog
        self.min_elements = min_elements
        self.keys = {"cpu": torch.tensor([_mixed(seed)], dtype=torch.int64)}
        self.specs: dict[str, Spec | None] = {}
        self.static: dict[int, StorageWeakRef] = {}
        self.fixed: list[Tensor] = []

    def begin(self, batch: Sequence[Tensor]) -> None:
        """An outermost forward begins: the forward number advances, and its batch becomes known."""
        for key in self.keys.values():
            key.add_(_STEP)
        if torch.compiler.is_compiling():
            return
        forget_copies()
        self.static = {address: storage for address, storage in self.static.items() if not storage.expired()}
        for tensor in chain(batch, self.fixed):
            storage = tensor.untyped_storage()
            self.static[storage._cdata] = StorageWeakRef(storage)

    def end(self) -> None:
        """An outermost forward has ended: every layer of it is known, so indices are."""
        if not torch.compiler.is_compiling() and self.catalog.settle(self.policy):
            self.specs.clear()

    def spec(self, layer: str, tag: str, module: str) -> Spec | None:
        """How `layer` stores what it keeps; None: as PyTorch does."""
        if layer in self.specs:
            return self.specs[layer]
        return self._resolve(layer, tag, module)

    @torch.compiler.assume_constant_result
    def _resolve(self, layer: str, tag: str, module: str) -> Spec | None:
        index = self.catalog.index(layer, tag, module)
        found = Spec.of(self.policy.settings(tag, index, layer), self.min_elements)
        self.specs[layer] = found
        return found

    def key(self, device: torch.device) -> Tensor:
        """The one-element int64 tensor that rounding noise depends on, on `device`."""
        name = str(device)
        if name not in self.keys:
            self.keys[name] = self.keys["cpu"].to(device)
        return self.keys[name]

    def is_static(self, tensor: Tensor) -> bool:
        """Whether `tensor` lies in the storage of a parameter, a buffer or the batch."""
        known = self.static.get(tensor.untyped_storage()._cdata)
        return known is not None and not known.expired()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "static": {}}


class ConvertedForward:
    """A module's forward inside a conversion. Holds the module, so that a deepcopy holds the copy."""

    def __init__(self, module: nn.Module, name: str, conversion: Conversion) -> None:
        self.module = module
        self.name = name
        self.conversion = conversion
        self.own = own_route(module)
        self.before = module.__dict__.get("forward")

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward without us."""
        if self.before is not None:
            return self.before(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.plain(*args, **kwargs)
        return routing.enter(self.conversion, self.name, self.own, self.plain, args, kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        original = self.before or type(self.module).forward.__get__(self.module)
        return inspect.signature(original)


def convert(
    model: nn.Module,
    policy: Policy,
    *,
    seed: int | None = None,
    min_elements: int = MIN_ELEMENTS,
    force: bool = False,
) -> nn.Module:
    """`model` stores activations as `policy` says, from its next forward on; returns `model`, changed in place.

    Parameters, buffers, `state_dict` keys and outputs stay bit for bit what they were. `seed` (default
    `torch.initial_seed()`) decides the rounding noise; tensors of up to `min_elements` elements stay exact.
    Converting again replaces the policy.

    Raises:
        PolicyError: the policy names a layer that `model` does not have, or was made for another model
            (`force=True` applies it anyway).
    """
    revert(model)
    catalog = Catalog.of(model)
    policy.check(
        catalog.known(), fingerprint=catalog.fingerprint, force=force, complete=False, modules=catalog.modules
    )
    conversion = Conversion(policy, catalog, torch.initial_seed() if seed is None else seed, min_elements)
    conversion.fixed = list(model.buffers())
    for name, module in named_layers(model):
        module.forward = ConvertedForward(module, name, conversion)  # type: ignore[method-assign]
    return model


def revert(model: nn.Module) -> nn.Module:
    """`model` is the plain model again; returns it. A model that was not converted is left alone."""
    for module in model.modules():
        wrapped = module.__dict__.get("forward")
        if isinstance(wrapped, ConvertedForward):
            del module.__dict__["forward"]
            if wrapped.before is not None:
                module.forward = wrapped.before  # type: ignore[method-assign]
    return model


def conversion_of(model: nn.Module) -> Conversion | None:
    """The conversion that `model` is under, if any."""
    wrapped = model.__dict__.get("forward")
    return wrapped.conversion if isinstance(wrapped, ConvertedForward) else None


@contextmanager
def compress_saved(policy: Policy, *, seed: int | None = None) -> Iterator[None]:
    """Calls in this context store what they keep by `policy`, under names `loss.<function>.<n>`.

    For the parts of a step outside a converted model, such as a loss on large logits. A converted model inside keeps its own policy;
    an unconverted one counts as part of the loss. The rounding noise depends on `seed`; by default on
    `torch.initial_seed()` and a count of the entries, so that every step has its own.
    """
    chosen = torch.initial_seed() + next(_entries) if seed is None else seed
    conversion = Conversion(policy, Catalog.empty(), chosen, MIN_ELEMENTS)
    with routing.entered(conversion, "loss"):
        yield


def _mixed(seed: int) -> int:
    rank = (
        torch.distributed.get_rank()
        if torch.distributed.is_available() and torch.distributed.is_initialized()
        else 0
    )
    mixed = (seed * 0xBF58476D1CE4E5B9 + (rank + 1) * 0x94D049BB133111EB) % 2**64
    return mixed - 2**64 if mixed >= 2**63 else mixed
