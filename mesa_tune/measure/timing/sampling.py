"""What leaving out rows adds to the time of a step besides encoding.

A linear layer with a quarter of its rows multiplies these alone: on a GPT-2 of 4 layers the step is then
faster than the plain one. A convolution decodes all rows, most of them zero, and takes longer.
So the spans of steps that leave out rows are compared with those of steps that store all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mesa_tune.measure.timing.option_times import form, means
from mesa_tune.policy.settings import LayerSettings
from mesa_tune.profiles.entries import LayerEntry


def with_sampled_times(
    layers: Sequence[LayerEntry], added: Mapping[LayerSettings, Mapping[str, float]]
) -> list[LayerEntry]:
    """Return the layers with `decode_ms` of options that leave out rows as they are in a step.

    `layers`: with their `call_ms`; `added`: settings that leave out rows, and the milliseconds that each
    layer adds under them. Other shares of rows have the difference of the nearest one.
    """
    for settings, ms in added.items():
        found = means([_beyond(layer, settings, ms.get(layer.name)) for layer in layers], map(form, layers))
        layers = [
            _with_beyond(layer, settings, beyond, added) for layer, beyond in zip(layers, found, strict=True)
        ]
    return list(layers)


def _beyond(layer: LayerEntry, settings: LayerSettings, added: float | None) -> float | None:
    """Return what `layer` adds beyond its price under these settings; None if unknown."""
    position = layer.positions.get(settings)
    if position is None or added is None or layer.call_ms is None:
        return None
    return added - layer.call_ms - layer.options[position].ms


def _with_beyond(
    layer: LayerEntry, settings: LayerSettings, beyond: float | None, timed: Mapping[LayerSettings, object]
) -> LayerEntry:
    options = [
        replace(option, decode_ms=option.decode_ms + (beyond or 0.0))
        if option.settings.rows < 1 and _nearest(option.settings, timed) == settings
        else option
        for option in layer.options
    ]
    return replace(layer, options=tuple(options))


def _nearest(wanted: LayerSettings, timed: Mapping[LayerSettings, object]) -> LayerSettings:
    return min(timed, key=lambda settings: abs(math.log(settings.rows / wanted.rows)))
