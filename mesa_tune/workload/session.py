"""A context in which a workload's model and loss run under one policy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from torch import nn

from mesa_tune.codecs import Spec
from mesa_tune.conversion import entering, revert
from mesa_tune.conversion.conversion import Conversion
from mesa_tune.conversion.layers import Catalog
from mesa_tune.conversion.model import install
from mesa_tune.policy import Policy

RAW = Spec("quantize", 8, 0, 256, 0, True, 0)
"""Settings under which our formulas run and save exact tensors."""


class RawConversion(Conversion):
    """Conversion under which every layer runs our formulas and nothing is encoded.

    Layers named in `producers` save what they save when other layers derive from them.
    """

    def _resolve(self, layer: str, tag: str, module: str) -> Spec | None:
        self.catalog.index(layer, tag, module)
        self.specs[layer] = RAW._replace(exposes=layer in self.producers)
        return self.specs[layer]


@dataclass
class Session:
    """A model under a policy, and the layers of the loss under the same policy.

    It can be entered many times, and its conversions keep their cached calls: see `installed`.
    """

    model: nn.Module
    conversion: Conversion
    losses: Conversion

    @classmethod
    def of(
        cls,
        model: nn.Module,
        policy: Policy,
        *,
        seed: int = 0,
        min_elements: int = 0,
        kind: type[Conversion] = Conversion,
    ) -> Session:
        """Return the session of `model` under `policy`; the model is not converted yet."""
        conversion = kind(policy, Catalog.of(model), seed, min_elements)
        return cls(model, conversion, kind(policy, Catalog.empty(), seed, min_elements))

    @contextmanager
    def installed(self) -> Iterator[Session]:
        """Convert the model for the body, and revert it afterwards."""
        revert(self.model)
        install(self.model, self.conversion)
        try:
            yield self
        finally:
            revert(self.model)

    def forward(self) -> AbstractContextManager[None]:
        """Return a context for a forward of the model and its loss, whose layers are named `loss.*`."""
        return entering.enter_loss(self.losses)

    def layers(self) -> dict[str, tuple[str, int]]:
        """Return tag and index of every layer that ran; indices of the loss follow those of the model."""
        return layers_of(self.conversion, self.losses)


def layers_of(conversion: Conversion, losses: Conversion) -> dict[str, tuple[str, int]]:
    """Return tag and index of every layer that ran in a model, and in its loss: their indices follow."""
    layers: dict[str, tuple[str, int]] = {}
    for catalog in (conversion.catalog, losses.catalog):
        before = [tag for tag, _ in layers.values()]
        for tag, index, name in catalog.layers():
            layers[name] = (tag, (index or 0) + before.count(tag))
    return layers


@contextmanager
def session(
    model: nn.Module,
    policy: Policy,
    *,
    seed: int = 0,
    min_elements: int = 0,
    kind: type[Conversion] = Conversion,
) -> Iterator[Session]:
    """Convert `model` with `policy` for the body, and revert it afterwards."""
    opened = Session.of(model, policy, seed=seed, min_elements=min_elements, kind=kind)
    with opened.installed():
        yield opened
