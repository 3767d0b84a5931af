"""The layers of a model, by name, tag and index.

What is hard is that a layer's index must never change its meaning. Modules are found in the model, but calls
of functions only in a forward. So a call has no index until the first forward has ended. A layer that is
first seen later takes the next index of its tag.
"""

import hashlib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from mesa_tune.formulas.table import own_route
from mesa_tune.policy import Policy
from mesa_tune.policy.matching import around

_PARTS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_WRAPPERS = (DataParallel, DistributedDataParallel, AveragedModel)
_PEFT = {
    ("peft.peft_model", "PeftModel"): "base_model",
    ("peft.mixed_model", "PeftMixedModel"): "base_model",
    ("peft.tuners.tuners_utils", "BaseTuner"): "model",
}
"""PEFT's wrappers, by module and class to avoid an import, and the attribute that contains the model."""

Layer = tuple[str, int | None, str]
"""Tag, index (None while unknown), name."""


def named_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module with its name, without the prefixes that wrappers add."""
    wrapped: set[str] = set()
    for name, module in model.named_modules():
        part = _wrapped_part(module)
        if part is not None:
            wrapped.add(f"{name}.{part}" if name else part)
        yield _unwrapped(name, wrapped), module


def modules_by_name(model: nn.Module) -> dict[str, nn.Module]:
    """Return every module by its name, without the prefixes that wrappers add; of several the outermost."""
    return dict(reversed(list(named_layers(model))))


def _wrapped_part(module: nn.Module) -> str | None:
    """Return the attribute of a wrapper that contains the wrapped module; None for other modules."""
    if isinstance(module, _WRAPPERS):
        return "module"
    kinds = ((kind.__module__, kind.__name__) for kind in type(module).__mro__)
    parts = [part for part in _PARTS if part in module._modules] + [_PEFT[k] for k in kinds if k in _PEFT]
    return parts[0] if parts else None


def _unwrapped(name: str, wrapped: set[str]) -> str:
    parts = name.split(".") if name else []
    return ".".join(part for end, part in enumerate(parts, 1) if ".".join(parts[:end]) not in wrapped)


def _class_name(module: nn.Module) -> str:
    """Return the name of the class that `module` had before `torch.distributed` replaced it (FSDP2)."""
    kind = type(module)
    while len(kind.__bases__) == 2 and kind.__bases__[0].__module__.startswith("torch.distributed."):
        kind = kind.__bases__[1]
    return kind.__name__


class Catalog:
    """The layers of a model, and the index of each within its tag.

    `modules`: names of the modules, in order. `layers`: tag and name of those modules that are layers
    themselves.
    """

    def __init__(self, modules: Sequence[str], layers: Sequence[tuple[str, str]], fingerprint: str) -> None:
        self.modules = list(modules)
        self.fingerprint = fingerprint
        self._positions = {name: position for position, name in reversed(list(enumerate(modules)))}
        self._layers = {name: (tag, self._positions[name]) for tag, name in layers}
        self._indices = self._count()
        self._totals: Counter[str] = Counter()
        self._is_final = False
        self._ran: set[str] = set()

    @staticmethod
    def of(model: nn.Module) -> "Catalog":
        """Return the catalog of `model` before any forward."""
        named = list(named_layers(model))
        layers = [(route.tag, name) for name, module in named if (route := own_route(module)) is not None]
        classes = [f"{name}:{_class_name(module)}" for name, module in named if _wrapped_part(module) is None]
        fingerprint = hashlib.sha256("\n".join(classes).encode()).hexdigest()[:16]
        return Catalog([name for name, _ in named], layers, fingerprint)

    @staticmethod
    def empty() -> "Catalog":
        """Return the catalog of a loss: it has no modules, so calls take their indices in order."""
        catalog = Catalog(["loss"], [], "")
        catalog._is_final = True
        return catalog

    def layers(self) -> list[Layer]:
        """Return the layers found so far, modules first."""
        return [(tag, self._indices.get(name), name) for name, (tag, _) in self._layers.items()]

    def index(self, layer: str, tag: str, module: str) -> int | None:
        """Return the index of `layer` within `tag`; None if it has none yet. Add the layer if it is new."""
        self._ran.update((layer, *around(layer)))
        if layer not in self._layers:
            self._layers[layer] = (tag, self._positions.get(module, 0))
            if self._is_final:
                self._indices[layer] = self._totals[tag]
                self._totals[tag] += 1
        return self._indices.get(layer)

    def tag(self, layer: str) -> str:
        """Return the tag of a layer that was found."""
        return self._layers[layer][0]

    def module(self, layer: str) -> str:
        """Return the name of the module that a layer is, or whose forward calls it."""
        return self.modules[self._layers[layer][1]]

    def assign_indices(self, policy: Policy) -> tuple[str, ...]:
        """Give every layer its index after a first forward; return warnings of names that no layer has."""
        if self._is_final:
            return ()
        self._is_final = True
        self._indices = self._count()
        self._totals.update(tag for tag, _ in self._layers.values())
        return self.unmatched(policy, self.skipped)

    @property
    def skipped(self) -> set[str]:
        """The modules that are layers and have not run with gradients yet, and what is around them alone.

        A model may skip them at random (LayerDrop).
        """
        waiting = {name for name in self._layers if name not in self._ran}
        return {module for name in waiting for module in (name, *around(name))} - self._ran

    def unmatched(self, policy: Policy, skipped: Collection[str] = ()) -> tuple[str, ...]:
        """Return warnings of names that no layer has, but for those in modules that were `skipped`."""
        layers = [(tag, self._indices[name], name) for name, (tag, _) in self._layers.items()]
        return policy.unmatched(layers, skipped)

    def state(self) -> dict[str, Any]:
        """Return the layers and their indices as plain values."""
        return {
            "fingerprint": self.fingerprint,
            "layers": {name: list(layer) for name, layer in self._layers.items()},
            "indices": dict(self._indices),
            "totals": dict(self._totals),
            "settled": self._is_final,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over the layers of `state`, with their indices."""
        self._layers = {name: (tag, position) for name, (tag, position) in state["layers"].items()}
        self._indices = dict(state["indices"])
        self._totals = Counter(state["totals"])
        self._is_final = state["settled"]

    def _count(self) -> dict[str, int]:
        indices: dict[str, int] = {}
        totals: Counter[str] = Counter()
        for name, (tag, _) in sorted(self._layers.items(), key=lambda item: item[1][1]):
            indices[name] = totals[tag]
            totals[tag] += 1
        return indices
