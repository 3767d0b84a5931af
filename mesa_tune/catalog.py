"""The layers of a model, by name, tag and index.

Modules are known from the model alone, calls of functions only after one forward: until that ends, a
function's layer has no index, and a layer first seen later takes the next one, so that an index never
changes its meaning afterwards.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from mesa_tune.functional.table import own_route
from mesa_tune.policy import Policy

_ALWAYS = ("_orig_mod", "_checkpoint_wrapped_module")
_WRAPPERS = (DataParallel, DistributedDataParallel, AveragedModel)

Layer = tuple[str, int | None, str]
"""Tag, index (None while unknown), name."""


def named_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module with its name, less the prefixes that wrappers add."""
    wrappers = {name for name, module in model.named_modules() if isinstance(module, _WRAPPERS)}
    for name, module in model.named_modules():
        yield _unwrapped(name, wrappers), module


def _unwrapped(name: str, wrappers: set[str]) -> str:
    parts = name.split(".") if name else []
    kept = [
        part
        for place, part in enumerate(parts)
        if part not in _ALWAYS and not (part == "module" and ".".join(parts[:place]) in wrappers)
    ]
    return ".".join(kept)


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
            f"{name}:{type(module).__name__}" for name, module in named if not _is_wrapper(module)
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

    def _count(self) -> dict[str, int]:
        indices: dict[str, int] = {}
        totals: dict[str, int] = {}
        for name, (tag, _) in sorted(self._layers.items(), key=lambda item: item[1][1]):
            indices[name] = totals.get(tag, 0)
            totals[tag] = indices[name] + 1
        return indices


def _is_wrapper(module: nn.Module) -> bool:
    return (
        isinstance(module, _WRAPPERS)
        or hasattr(module, "_orig_mod")
        or hasattr(module, "_checkpoint_wrapped_module")
    )
