"""The layers of a model, by name, tag and index.

Modules are known from the model alone, calls of functions only after one forward: until that ends, a
function's layer has no index, and a layer first seen later takes the next one, so that an index never
changes its meaning afterwards.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from mesa_tune.formulas.table import own_route
from mesa_tune.policy import Policy

_PARTS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_WRAPPERS = (DataParallel, DistributedDataParallel, AveragedModel)
_PEFT = {
    ("peft.peft_model", "PeftModel"): "base_model",
    ("peft.mixed_model", "PeftMixedModel"): "base_model",
    ("peft.tuners.tuners_utils", "BaseTuner"): "model",
}
"""PEFT's wrappers, which are not imported for this, and the attribute under which each has the model."""

Layer = tuple[str, int | None, str]
"""Tag, index (None while unknown), name."""


def named_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module with its name, less the prefixes that wrappers add."""
    wrapped: set[str] = set()
    for name, module in model.named_modules():
        part = _wrapped_part(module)
        if part is not None:
            wrapped.add(f"{name}.{part}" if name else part)
        yield _unwrapped(name, wrapped), module


def _wrapped_part(module: nn.Module) -> str | None:
    """The attribute under which a wrapper has the module it wraps; None for a module that is no wrapper."""
    if isinstance(module, _WRAPPERS):
        return "module"
    kinds = ((kind.__module__, kind.__name__) for kind in type(module).__mro__)
    known = (*(part for part in _PARTS if part in module._modules), *(_PEFT[k] for k in kinds if k in _PEFT))
    return next(iter(known), None)


def _unwrapped(name: str, wrapped: set[str]) -> str:
    parts = name.split(".") if name else []
    own = [part for place, part in enumerate(parts, 1) if ".".join(parts[:place]) not in wrapped]
    return ".".join(own)


def _class_name(module: nn.Module) -> str:
    """The name of the class that `module` had before `torch.distributed` swapped in its own (FSDP2)."""
    kind = type(module)
    while len(kind.__bases__) == 2 and kind.__bases__[0].__module__.startswith("torch.distributed."):
        kind = kind.__bases__[1]
    return kind.__name__


class Catalog:
    """Which layers there are, and which index each has within its tag."""

    def __init__(self, modules: Sequence[str], own: Sequence[tuple[str, str]], fingerprint: str) -> None:
        self.modules = list(modules)
        self.fingerprint = fingerprint
        self._place = {name: place for place, name in reversed(list(enumerate(modules)))}
        self._layers: dict[str, tuple[str, int]] = {name: (tag, self._place[name]) for tag, name in own}
        self._indices = self._count()
        self._totals: Counter[str] = Counter()
        self._settled = False

    @staticmethod
    def of(model: nn.Module) -> "Catalog":
        """The catalog of `model` before any forward."""
        named = list(named_layers(model))
        own = [(route.tag, name) for name, module in named if (route := own_route(module)) is not None]
        text = "\n".join(
            f"{name}:{_class_name(module)}" for name, module in named if _wrapped_part(module) is None
        )
        return Catalog([name for name, _ in named], own, hashlib.sha256(text.encode()).hexdigest()[:16])

    @staticmethod
    def empty() -> "Catalog":
        """The catalog of a loss: no modules, so that the order of the calls is all there is to know."""
        catalog = Catalog(["loss"], [], "")
        catalog._settled = True
        return catalog

    def known(self) -> list[Layer]:
        """The layers known so far, in the order of their modules."""
        return [(tag, self._indices.get(name), name) for name, (tag, _) in self._layers.items()]

    def index(self, layer: str, tag: str, module: str) -> int | None:
        """The index of `layer` within `tag`; None while it is not known. Notes a layer that is new."""
        if layer not in self._layers:
            self._layers[layer] = (tag, self._place.get(module, 0))
            if self._settled:
                self._indices[layer] = self._totals[tag]
                self._totals[tag] += 1
        return self._indices.get(layer)

    def tag(self, layer: str) -> str:
        """The tag of a layer that is known."""
        return self._layers[layer][0]

    def settle(self, policy: Policy) -> tuple[str, ...]:
        """After a first forward: gives every layer its index, for good. Returns texts on names that no
        layer has.
        """
        if self._settled:
            return ()
        self._settled = True
        self._indices = self._count()
        self._totals.update(tag for tag, _ in self._layers.values())
        return policy.unmatched([(tag, self._indices[name], name) for name, (tag, _) in self._layers.items()])

    def state(self) -> dict[str, Any]:
        """What is known of the layers, as plain values."""
        return {
            "fingerprint": self.fingerprint,
            "layers": {name: list(layer) for name, layer in self._layers.items()},
            "indices": dict(self._indices),
            "totals": dict(self._totals),
            "settled": self._settled,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Knows the layers that `state` names, with their indices."""
        self._layers = {name: (tag, place) for name, (tag, place) in state["layers"].items()}
        self._indices = dict(state["indices"])
        self._totals = Counter(state["totals"])
        self._settled = state["settled"]

    def _count(self) -> dict[str, int]:
        indices: dict[str, int] = {}
        totals: dict[str, int] = {}
        for name, (tag, _) in sorted(self._layers.items(), key=lambda item: item[1][1]):
            indices[name] = totals.get(tag, 0)
            totals[tag] = indices[name] + 1
        return indices
