"""Layers that the traced step skips and other steps run: the other one of two branches, the head of a task.

What is hard: the timeline, on which a plan is made, knows nothing of them. So each is stored as the layer of
the traced step that is most alike, its price counts in the share of steps that run it, and a plan's bytes are
those of the dearest of these steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from mesa_tune.measure.memory.rows import Rows
from mesa_tune.profiles.entries import UNLISTED, LayerEntry


def skipped_layers(layers: Sequence[LayerEntry], rows: Rows, share: float) -> Iterator[LayerEntry]:
    """Yield the `rows` of another step that `layers` lack, with the most alike layer of the traced step.

    That is one of the same tag and shape, or else the largest of the same tag. Without one, and without
    anything that can be compressed, the layer stays exact.
    """
    alike: dict[object, str] = {}
    for layer in sorted(layers, key=lambda layer: -layer.own_bytes):
        if layer.index != UNLISTED and layer.stored_like is None:
            alike.setdefault((layer.tag, layer.shape), layer.name)
            alike.setdefault(layer.tag, layer.name)
    known = {layer.name for layer in layers}
    for row in rows.entries():
        if row.name not in known:
            like = alike.get((row.tag, row.shape), alike.get(row.tag))
            like = like if rows.can_be_stored([row.name]) else None
            yield replace(row, own_bytes=0, shared_with=(), share=share, stored_like=like)
