"""Layers that the traced step skips and other steps run: the other one of two branches, the head of a task.

What is hard: nothing is known of them but what a plain trace of such a step shows. So each is stored as the
layer of the traced step that is most alike, and a plan's bytes are those of the dearest of these steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mesa_tune.files import typed
from mesa_tune.profiler.entries import LayerEntry
from mesa_tune.profiler.memory.step_trace import StepTrace


@dataclass(frozen=True)
class SkippedLayer:
    """A layer that the traced step skips; `like`: the layer whose settings it gets."""

    name: str
    tag: str
    index: int
    like: str

    def module_like(self, module: str) -> str | None:
        """Return the module that contains this layer as `module` contains the one that is alike."""
        rest = self.like.removeprefix(f"{module}.")
        if rest == self.like or not self.name.endswith(f".{rest}"):
            return None
        return self.name.removesuffix(f".{rest}")


@dataclass(frozen=True)
class OtherStep:
    """A step, by random state and draw, with the layers that no step before it has.

    `share`: of the steps that were looked at, those which run such layers.
    """

    random_state: int
    draw: int
    share: float
    layers: tuple[SkippedLayer, ...]

    @property
    def note(self) -> str:
        """What to know of these layers, in words."""
        if not self.layers:
            return f"{self.share:.0%} of steps run other modules, which stay exact: no layer is like theirs"
        count = f"{len(self.layers)} layers that the traced step skips, as {self.layers[0].name!r}"
        return f"{self.share:.0%} of steps run {count}: they have no price and are stored as the most alike"

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> OtherStep:
        layers = tuple(typed(SkippedLayer, layer) for layer in values["layers"])
        return typed(OtherStep, {**values, "layers": layers})


def skipped_layers(
    layers: Sequence[LayerEntry], known: set[str], trace: StepTrace, tags: Mapping[str, tuple[str, int]]
) -> Iterator[SkippedLayer]:
    """Yield the layers of a plain trace that are not `known`, with the most alike of `layers`; add them.

    That is one of the same tag and shape, or else the largest of the same tag; without one, it stays exact.
    """
    alike: dict[object, str] = {}
    for layer in sorted(layers, key=lambda layer: -layer.own_bytes):
        alike.setdefault((layer.tag, layer.shape), layer.name)
        alike.setdefault(layer.tag, layer.name)
    shapes = {name: item.shape for item in trace.plain.values() for name in reversed(item.layers)}
    for name, (tag, index) in tags.items():
        like = alike.get((tag, shapes.get(name)), alike.get(tag))
        if name not in known and name in shapes and like is not None:
            known.add(name)
            yield SkippedLayer(name, tag, index, like)
