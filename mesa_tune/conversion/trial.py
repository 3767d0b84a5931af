"""`Trial`: run a converted model plain, or with only some of its layers compressed, and leave no trace in it.

What is hard: the model is being trained, and perhaps compiled. Its noise keys, running ranges and layer
indices must not move, and compiled code depends on its forwards. So the forwards stay; while a trial runs,
they refer to a copy of the conversion.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

from torch import nn

from mesa_tune.codecs import Spec
from mesa_tune.conversion.conversion import Conversion, entries
from mesa_tune.conversion.model import ConvertedForward, convert
from mesa_tune.conversion.wrapping import CONVERTED
from mesa_tune.engine.observer import watch
from mesa_tune.errors import RunError
from mesa_tune.policy import Policy
from mesa_tune.policy.rules import MODULE
from mesa_tune.policy.settings import EXACT

LOSS = "loss.*"
"""Name in a trial of all layers in `compress_saved`, outside the model."""


class _TrialConversion(Conversion):
    """Copy of a conversion, in which only some layers are compressed (`only`; None: all).

    `share`: that of a batch on which the model runs. As many tensors are large enough to be encoded as in the
    whole batch.
    """

    def __init__(self, original: Conversion, share: float) -> None:
        self.__dict__.update(original.__getstate__())
        self.original = original
        self.only: Collection[str] | None = None
        self.watched = 0  # the training's gradients may be alive
        self.min_elements = int(share * original.min_elements)
        self.keys = {device: key.clone() for device, key in original.keys.items()}
        self.catalog = copy.deepcopy(original.catalog)
        self.producers = set(original.producers)
        self.specs, self.memories = {}, {}

    def start(self, seed: int, only: Collection[str] | None) -> None:
        """Begin a run with this rounding seed, from the running ranges of the original."""
        ended = self.ended
        self.restart(seed)
        self.ended = ended
        for layer, memories in self.original.memories.items():
            self.memories.setdefault(layer, {}).update(copy.deepcopy(memories))
        if self.only != only:
            self.only = only
            self.specs.clear()
            self.calls.clear()

    def _resolve(self, layer: str, tag: str, module: str) -> Spec | None:
        spec = super()._resolve(layer, tag, module)
        if spec is not None and self._is_off(layer):
            self.specs[layer] = spec = _exact(spec)
        return spec

    def recompute_spec(self, module: str) -> Spec | None:
        spec = super().recompute_spec(module)
        return _exact(spec) if spec is not None and self._is_off(module) else spec

    def _is_off(self, name: str) -> bool:
        return self.only is not None and name not in self.only


def _exact(spec: Spec) -> Spec:
    """Return the spec that stores nothing lossy, but goes backward in the same slices (`tile`)."""
    return Spec.plain(spec.min_elements, spec.tile)._replace(feeds_tiled=spec.feeds_tiled)


class Trial:
    """Runs of a converted model on parts of a batch, each a `share` of it.

    Raise RunError if `model` is not converted, or if its parts were converted one by one.
    """

    def __init__(self, model: nn.Module, share: float) -> None:
        self.forwards = list(_forwards(model))
        conversions = list(dict.fromkeys(forward.conversion for forward in self.forwards))
        if len(conversions) != 1:
            what = "its parts were converted one by one" if conversions else "it is not converted"
            raise RunError(
                f"the model cannot be measured: {what}\ncall mt.convert(model, policy) once, on all of it"
            )
        self.original = conversions[0]
        self.conversion = _TrialConversion(self.original, share)

    @property
    def is_new(self) -> bool:
        """Whether no forward has shown all layers yet: until one has, some may be stored in more bits."""
        return self.conversion.first and not self.conversion.ended

    def layers(self) -> dict[str, str]:
        """Return the tags of the layers that the last run compressed, `module` for modules that run again."""
        layers = {
            name: self.conversion.catalog.tag(name)
            for name, spec in self.conversion.specs.items()
            if spec is not None and spec.levels > 0 and (spec.drop > 0 or not spec.exact)
        }
        return layers | {forward.name: MODULE for forward in self.forwards if forward.recompute is not None}

    def make_exact(self, layers: Mapping[str, str], seed: int) -> None:
        """Convert the model again, with `layers` (tags by name) stored exactly."""
        policy = self.original.policy
        for name, tag in layers.items():
            policy = policy.with_settings(tag, [name], EXACT)
        self.convert(policy, seed)

    def convert(self, policy: Policy, seed: int) -> None:
        """Convert the model again, with another policy and this rounding seed."""
        convert(self.forwards[0].module, policy, seed=seed, min_elements=self.original.min_elements)

    @contextmanager
    def plain(self) -> Iterator[None]:
        """Run the body on the plain model; `compress_saved` in it does nothing."""
        entries.off = True
        for forward in self.forwards:
            forward.reverted = True
        try:
            yield
        finally:
            entries.off = False
            for forward in self.forwards:
                forward.reverted = False

    @contextmanager
    def stored(self, seed: int, only: Collection[str] | None = None) -> Iterator[None]:
        """Run the body on the compressed model; `only`: with no other layers than these."""
        self.conversion.start(seed, only)
        number, backwards = entries.number, watch.backwards
        entries.off = only is not None and LOSS not in only
        for forward in self.forwards:
            forward.assign(forward.name, self.conversion)
        try:
            yield
        finally:
            entries.off, entries.number, watch.backwards = False, number, backwards
            for forward in self.forwards:
                forward.assign(forward.name, self.original)


def _forwards(model: nn.Module) -> Iterator[ConvertedForward]:
    for module in model.modules():
        forward = module.__dict__.get(CONVERTED)
        if forward is not None and not forward.reverted:
            yield forward
