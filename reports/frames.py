"""The data of every figure and table of a report, as DataFrames; nothing here draws or writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from mesa_tune.policy.settings import EXACT, LayerSettings
from mesa_tune.profiler.profile import Prediction, Profile
from mesa_tune.profiler.timeline import Assignment, SavedSpan, SizedTimeline

if TYPE_CHECKING:
    from mesa_tune.profiler.verification import Verification

UNIFORM_LEVELS = (256, 64, 16, 8, 4, 2)
OUTSIDE = "(no layer)"


def timeline_frame(
    profile: Profile, assignment: Assignment | None = None, batch_size: int | None = None
) -> pd.DataFrame:
    """Bytes alive in each slot of the step: `slot, phase, layer, before`, with an assignment also `after`."""
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
    """A row for each layer, as they run; without an assignment only what stands before `after`.

    `name, tag, index, module, shape, dtype, before, shared_with`, then `after, settings, exact, bits,
    gradient_error`. `before` and `after` are the saved bytes of the tensors that the layer owns: they sum to
    the saved bytes of the step. What belongs to no layer has a row of its own, last.
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
        return _with_rest(frame, {"before": before, "after": after})
    return _with_rest(frame, {"before": before})


def running_order(profile: Profile) -> list[str]:
    """The layers' names in the order in which they first run.

    A profile lists them by module, and last what only hooks reach. Of those no moment is known: they stand
    behind the layer whose tensors are the youngest that are no younger than theirs.
    """
    births = _first((name, tensor.id) for tensor in profile.tensors for name in tensor.layers)
    turns = _first((slot.layer, turn) for turn, slot in enumerate(profile.timeline.slots) if slot.layer)
    known = sorted((births[name], -turn, turn) for name, turn in turns.items() if name in births)
    keys, latest = {}, -1.0
    for name in (layer.name for layer in profile.layers):
        if name in turns:
            latest = turns[name]
        elif name in births:
            before = [turn for birth, _, turn in known if birth <= births[name]]
            latest = before[-1] + 0.5 if before else -0.5
        keys[name] = latest
    return sorted(keys, key=lambda name: keys[name])


def _first(moments: Iterable[tuple[str, int]]) -> dict[str, int]:
    """The earliest moment of each name."""
    return dict(sorted(moments, key=lambda pair: -pair[1]))


def saved_by_layer(sized: SizedTimeline, assignment: Assignment) -> dict[str, int]:
    """Saved bytes by the layer that owns them; their sum is the saved bytes of the step."""
    used = sized.compressed(assignment)
    found: dict[str, int] = {}
    plain = [item.layers for item in sized.timeline.kept if item.kind == "plain" and item.layers]
    for item, size in zip(sized.spans, sized.sizes, strict=True):
        if sized.is_saved(item):
            owner = _owner(item, plain)
            found[owner] = found.get(owner, 0) + sized.span_bytes(item, size, used)
    return found


def _owner(item: SavedSpan, plain: Sequence[tuple[str, ...]]) -> str:
    """The first keeper of the plain tensor that `item` stands for: a packed copy has the tensor's owner."""
    if not item.layers:
        return OUTSIDE
    keepers = [layers for layers in plain if set(item.layers) <= set(layers)]
    return min(keepers, key=len, default=item.layers)[0]


def bits_frame(profile: Profile, assignment: Assignment) -> pd.DataFrame:
    """The layers that keep something, along the depth: `depth, name, tag, bits, exact, before, after`.

    `depth` is the row of `layers_frame`.
    """
    frame = layers_frame(profile, assignment)
    kept = frame[(frame["before"] > 0) & (frame["name"] != OUTSIDE)]
    numbered = kept.rename_axis("depth").reset_index()
    return numbered[["depth", "name", "tag", "settings", "bits", "exact", "before", "after"]]


def mean_bits(profile: Profile, assignment: Assignment) -> float:
    """Bits that an element of the compressed tensors takes on average, their ranges included."""
    sized = profile.timeline.at(profile.batch_size)
    used = sized.compressed(assignment)
    packed = [
        (size, sized.span_bytes(item, size, used))
        for item, size in zip(sized.spans, sized.sizes, strict=True)
        if size > profile.timeline.min_elements and _is_packed(item, sized, used)
    ]
    elements = sum(size for size, _ in packed)
    return 8 * sum(count for _, count in packed) / elements if elements else float("nan")


def budgets_between(smallest: int, largest: int, count: int = 12) -> list[int]:
    """`count` budgets at equal steps from the smallest reachable peak on; the plain one would be next."""
    return [smallest + (largest - smallest) * number // count for number in range(count)]


def pareto_frame(
    solve: Callable[[int], Prediction | None],
    budgets: Iterable[int],
    uniform: Mapping[str, Prediction],
    marked: Mapping[str, Prediction],
) -> pd.DataFrame:
    """Gradient error against peak: `kind, label, budget, peak_bytes, saved_bytes, gradient_error`.

    `solved`: what `solve` finds for each of the `budgets` (None: not reachable); `uniform`: the same settings
    for every layer; `marked`: single points with a name, such as the chosen policy.
    """
    rows = []
    for budget in budgets:
        found = solve(budget)
        if found is not None:
            rows.append(_point("solved", "", found, budget))
    rows += [_point("uniform", label, found) for label, found in uniform.items()]
    rows += [_point(label, label, found) for label, found in marked.items()]
    columns = ["kind", "label", "budget", "peak_bytes", "saved_bytes", "gradient_error"]
    return pd.DataFrame(rows, columns=columns).astype({"gradient_error": float})


def uniform_predictions(
    profile: Profile, batch_size: int | None = None, levels: Sequence[int] = UNIFORM_LEVELS
) -> dict[str, Prediction]:
    """Label (`4 bits`) -> prediction, for every layer stored with the same number of levels."""
    found = {}
    for level in levels:
        settings = LayerSettings(level=level)
        assignment = {layer.name: settings for layer in profile.layers}
        label = settings.label.split(" / ", maxsplit=1)[0]
        found[label] = profile.predict_assignment(assignment, batch_size=batch_size)
    return found


def comparison_frame(predicted: Mapping[str, Any] | None, verification: Verification | None) -> pd.DataFrame:
    """Predicted beside measured: `quantity, unit, plain, predicted, measured, difference`, None: not known.

    `difference` is measured over predicted, less one.
    """
    measured = verification.to_dict() if verification else {}
    quantities = {
        "saved_bytes": "bytes",
        "peak_bytes": "bytes",
        "step_ms": "ms",
        "gradient_error": "",
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
    expected, found = predicted.get(name), measured.get(name)
    return {
        "quantity": name,
        "unit": unit,
        "plain": 0.0 if name == "gradient_error" else plain.get(name),
        "predicted": expected,
        "measured": found,
        "difference": found / expected - 1 if expected and found is not None else None,
    }


def _layer_row(profile: Profile, name: str) -> dict[str, Any]:
    layer = profile.layer(name)
    plain = {key: getattr(layer, key) for key in ("name", "tag", "index", "module", "dtype")}
    shape = "×".join(str(extent) for extent in layer.shape)
    return {**plain, "shape": shape, "shared_with": ", ".join(layer.shared_with)}


def _settings_columns(
    profile: Profile, order: Sequence[str], sized: SizedTimeline, assignment: Assignment
) -> pd.DataFrame:
    """The settings as they take effect: not below what hooks can do, and exact for tensors too small."""
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
    """The layers that store anything in another way once they are told to."""
    pairs = zip(sized.spans, sized.sizes, strict=True)
    smallest = {"coded": sized.timeline.min_elements, "side": 0}
    return {
        name
        for item, size in pairs
        if item.kind in smallest and size > smallest[item.kind]
        for name in item.layers
    }


def _with_rest(frame: pd.DataFrame, columns: Mapping[str, Mapping[str, int]]) -> pd.DataFrame:
    """`frame` with a last row for the bytes that no layer of it owns, if there are any."""
    named = set(frame["name"])
    rest = {
        column: sum(count for owner, count in counts.items() if owner not in named)
        for column, counts in columns.items()
    }
    if not any(rest.values()):
        return frame
    row = {"name": OUTSIDE, "tag": "", "module": "", "shape": "", "dtype": "", "shared_with": "", **rest}
    if "settings" in frame:
        row |= {"settings": "exact", "exact": True, "gradient_error": 0.0}
    return pd.concat([frame, pd.DataFrame([row])], ignore_index=True)


def _is_packed(item: SavedSpan, sized: SizedTimeline, used: Assignment) -> bool:
    return item.kind == "coded" and sized.is_saved(item) and any(layer in used for layer in item.layers)


def _point(kind: str, label: str, found: Prediction, budget: int | None = None) -> dict[str, Any]:
    return {
        "kind": kind,
        "label": label,
        "budget": budget,
        "peak_bytes": found.peak_bytes,
        "saved_bytes": found.saved_bytes,
        "gradient_error": found.gradient_error,
    }
