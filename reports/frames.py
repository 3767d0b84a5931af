"""Data of a report's figures and tables, as DataFrames. Nothing here draws or writes.

What is hard: the bytes of a tensor that several layers share must be counted once, for its owner; and layers
stand in the order in which they run, which a profile records for most of them only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from mesa_tune.policy.settings import EXACT
from mesa_tune.profiler.memory.distinct import Assignment
from mesa_tune.profiler.memory.sized_timeline import SizedSpan, SizedTimeline
from mesa_tune.profiler.profile import Profile

if TYPE_CHECKING:
    from mesa_tune.profiler.verification import Verification

NO_LAYER = "(no layer)"


def timeline_frame(
    profile: Profile, assignment: Assignment | None = None, batch_size: int | None = None
) -> pd.DataFrame:
    """Return the bytes alive in each slot of the step: `slot, phase, layer, before`, and `after` a policy."""
    sized = profile.timeline.at(batch_size or profile.batch_size)
    slots = profile.timeline.slots
    frame = pd.DataFrame(
        {
            "slot": range(len(slots)),
            "phase": [slot.phase for slot in slots],
            "layer": [slot.layer for slot in slots],
            "before": sized.live({}),
        }
    )
    return frame if assignment is None else frame.assign(after=sized.live(assignment))


def layers_frame(
    profile: Profile, assignment: Assignment | None = None, batch_size: int | None = None
) -> pd.DataFrame:
    """Return one row per layer, in the order in which the layers run.

    Columns: `name, tag, index, module, shape, dtype, shared_with, before`; with an assignment also `settings,
    exact, bits, gradient_error, after`. `before` and `after` are the saved bytes of the tensors that the
    layer owns: they sum to the saved bytes of the step. The last row has the bytes that belong to no layer,
    if any.
    """
    sized = profile.timeline.at(batch_size or profile.batch_size)
    order = running_order(profile)
    rows = [_layer_row(profile, name) for name in order]
    frame = pd.DataFrame(rows, columns=["name", "tag", "index", "module", "shape", "dtype", "shared_with"])
    before = saved_by_layer(sized, {})
    frame["before"] = frame["name"].map(before).fillna(0).astype("int64")
    if assignment is not None:
        frame = frame.join(_settings_columns(profile, order, sized, assignment))
        after = saved_by_layer(sized, assignment)
        frame["after"] = frame["name"].map(after).fillna(0).astype("int64")
        return _with_unowned(frame, {"before": before, "after": after})
    return _with_unowned(frame, {"before": before})


def running_order(profile: Profile) -> list[str]:
    """Return the layers' names in the order in which they first run.

    A profile lists layers by module, and at the end the layers that only hooks reach. The timeline has no
    slot for those; each is inserted after the layer that saved the last tensor before its own first tensor.
    """
    first_tensor = _earliest((name, tensor.id) for tensor in profile.tensors for name in tensor.layers)
    slots = enumerate(profile.timeline.slots)
    first_slot = _earliest((slot.layer, number) for number, slot in slots if slot.layer)
    timed = sorted(
        (first_tensor[name], -slot, slot) for name, slot in first_slot.items() if name in first_tensor
    )
    keys, latest = {}, -1.0
    for name in (layer.name for layer in profile.layers):
        if name in first_slot:
            latest = first_slot[name]
        elif name in first_tensor:
            before = [slot for tensor, _, slot in timed if tensor <= first_tensor[name]]
            latest = before[-1] + 0.5 if before else -0.5
        keys[name] = latest
    return sorted(keys, key=lambda name: keys[name])


def _earliest(moments: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Return the smallest number of each name."""
    return dict(sorted(moments, key=lambda pair: -pair[1]))


def saved_by_layer(sized: SizedTimeline, assignment: Assignment) -> dict[str, int]:
    """Return the saved bytes by owner; their sum is the saved bytes of the step."""
    saved: dict[str, int] = {}
    plain = [
        item.layers
        for item, saved in zip(sized.spans, sized.saved, strict=True)
        if saved and item.kind == "plain" and item.layers
    ]
    counts = sized.under(assignment).spans
    for number in np.flatnonzero(sized.saved).tolist():
        owner = _owner(sized.spans[number], plain)
        saved[owner] = saved.get(owner, 0) + int(counts[number])
    return saved


def _owner(item: SizedSpan, plain: Sequence[tuple[str, ...]]) -> str:
    """Return the first layer that saves the plain tensor of `item`: a packed copy has the tensor's owner."""
    if not item.layers:
        return NO_LAYER
    savers = [layers for layers in plain if set(item.layers) <= set(layers)]
    return min(savers, key=len, default=item.layers)[0]


def bits_frame(profile: Profile, assignment: Assignment) -> pd.DataFrame:
    """Return the layers that save anything: `depth, name, tag, settings, bits, exact, before, after`.

    `depth` is the row in `layers_frame`.
    """
    frame = layers_frame(profile, assignment)
    saving = frame[(frame["before"] > 0) & (frame["name"] != NO_LAYER)]
    numbered = saving.rename_axis("depth").reset_index()
    return numbered[["depth", "name", "tag", "settings", "bits", "exact", "before", "after"]]


def mean_bits(profile: Profile, assignment: Assignment) -> float:
    """Return the average bits per element of the compressed tensors, ranges included."""
    sized = profile.timeline.at(profile.batch_size)
    step = sized.under(assignment)
    packed = sized.coded.any(step.used) & sized.saved
    elements = int(sized.sizes[packed].sum())
    return 8 * int(step.spans[packed].sum()) / elements if elements else float("nan")


def comparison_frame(predicted: Mapping[str, Any] | None, verification: Verification | None) -> pd.DataFrame:
    """Return predictions beside measurements: `quantity, unit, plain, predicted, measured, difference`.

    `difference` is measured / predicted − 1. Unknown values are NaN.
    """
    measured = verification.to_dict() if verification else {}
    quantities = {
        "saved_bytes": "bytes",
        "peak_bytes": "bytes",
        "step_ms": "ms",
        "gradient_error": "",
        "gradient_noise_ratio": "",
    }
    rows = [
        _compared(name, unit, predicted or {}, measured.get("policy", {}), measured.get("baseline", {}))
        for name, unit in quantities.items()
    ]
    columns = ["quantity", "unit", "plain", "predicted", "measured", "difference"]
    frame = pd.DataFrame(rows, columns=columns)
    numbers = columns[2:]
    return frame.astype(dict.fromkeys(numbers, float))


def _compared(
    name: str, unit: str, predicted: Mapping[str, Any], measured: Mapping[str, Any], plain: Mapping[str, Any]
) -> dict[str, Any]:
    expected, actual = predicted.get(name), measured.get(name)
    return {
        "quantity": name,
        "unit": unit,
        "plain": 0.0 if name.startswith("gradient_") else plain.get(name),
        "predicted": expected,
        "measured": actual,
        "difference": actual / expected - 1 if expected and actual is not None else None,
    }


def _layer_row(profile: Profile, name: str) -> dict[str, Any]:
    layer = profile.layer(name)
    plain = {key: getattr(layer, key) for key in ("name", "tag", "index", "module", "dtype")}
    shape = "×".join(str(extent) for extent in layer.shape)
    return {**plain, "shape": shape, "shared_with": ", ".join(layer.shared_with)}


def _settings_columns(
    profile: Profile, order: Sequence[str], sized: SizedTimeline, assignment: Assignment
) -> pd.DataFrame:
    """Return the settings in effect: at least the bits that hooks need, and exact for tensors too small."""
    used, encoded = sized.compressed(assignment), _encoded_layers(sized)
    chosen = [used.get(name, EXACT) if name in encoded else EXACT for name in order]
    errors = [
        profile.layer_error(profile.layer(name), settings)
        for name, settings in zip(order, chosen, strict=True)
    ]
    return pd.DataFrame(
        {
            "settings": [settings.label for settings in chosen],
            "exact": [settings.exact for settings in chosen],
            "bits": [float("nan") if settings.exact else settings.bits for settings in chosen],
            "gradient_error": errors,
        }
    ).astype({"bits": float, "gradient_error": float})


def _encoded_layers(sized: SizedTimeline) -> set[str]:
    """Return the layers whose settings change what they store."""
    return {
        name
        for item in sized.spans
        if item.kind in ("coded", "side") and item.size > 0
        for name in item.layers
    }


def _with_unowned(frame: pd.DataFrame, columns: Mapping[str, Mapping[str, int]]) -> pd.DataFrame:
    """Append a row for the bytes that no layer of `frame` owns, if there are any."""
    named = set(frame["name"])
    unowned = {
        column: sum(count for owner, count in counts.items() if owner not in named)
        for column, counts in columns.items()
    }
    if not any(unowned.values()):
        return frame
    row = {"name": NO_LAYER, "tag": "", "module": "", "shape": "", "dtype": "", "shared_with": "", **unowned}
    if "settings" in frame:
        row |= {"settings": "exact", "exact": True, "gradient_error": 0.0}
    return pd.concat([frame, pd.DataFrame([row])], ignore_index=True)
