"""A workload's model and loss under one policy for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from mesa_tune.codecs import Spec
from mesa_tune.conversion import entering, revert
from mesa_tune.conversion.conversion import Conversion
from mesa_tune.conversion.layers import Catalog
from mesa_tune.conversion.model import install
from mesa_tune.policy import Policy
from mesa_tune.workload.workload import Workload

RAW = Spec("quantize", 8, 0, 256, 0, True, 0)
"""Our functions' own formulas, over tensors kept as they are."""


class RawConversion(Conversion):
    """Every layer goes through our functions, and nothing is encoded.

    Layers named in `producers` keep what they keep when others derive from them.
    """

    def _resolve(self, layer: str, tag: str, module: str) -> Spec | None:
        self.catalog.index(layer, tag, module)
        self.specs[layer] = RAW._replace(exposes=layer in self.producers)
        return self.specs[layer]


@dataclass
class Session:
    """A model under a policy, and the loss with its own layers under it, too."""

    workload: Workload
    model: nn.Module
    conversion: Conversion
    losses: Conversion

    def loss(self, batch: Any) -> Tensor:
        """The loss of the model on `batch`, named `loss.*`."""
        with entering.entered(self.losses, "loss"):
            return self.workload.compute_loss(self.model, batch)

    def layers(self) -> dict[str, tuple[str, int]]:
        """Tag and index of every layer met; the loss's come after the model's."""
        found: dict[str, tuple[str, int]] = {}
        for catalog in (self.conversion.catalog, self.losses.catalog):
            before = [tag for tag, _ in found.values()]
            for tag, index, name in catalog.known():
                found[name] = (tag, (index or 0) + before.count(tag))
        return found


@contextmanager
def session(
    workload: Workload,
    model: nn.Module,
    policy: Policy,
    *,
    seed: int = 0,
    min_elements: int = 0,
    kind: type[Conversion] = Conversion,
) -> Iterator[Session]:
    """`model` under `policy` in the body, plain again after it."""
    revert(model)
    conversion = kind(policy, Catalog.of(model), seed, min_elements)
    install(model, conversion)
    try:
        yield Session(workload, model, conversion, kind(policy, Catalog.empty(), seed, min_elements))
    finally:
        revert(model)
