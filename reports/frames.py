"""Data of a report's figures and tables, as DataFrames. Nothing here draws or writes.

What is hard: the bytes of a tensor that several layers share must be counted once, for its owner; and layers
stand in the order in which they run, which a profile records for most of them only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from mesa_tune.policy.settings import EXACT, LayerSettings
from mesa_tune.profiles.prediction import moment_text
from mesa_tune.profiles.profile import Prediction, Profile
from mesa_tune.profiles.tiled_step import without_slices
from mesa_tune.profiles.timeline.distinct import Assignment
from mesa_tune.profiles.timeline.sized_timeline import SizedSpan, SizedTimeline
from mesa_tune.profiles.timeline.step_arrays import block_of
from mesa_tune.units import shorten

if TYPE_CHECKING:
    from mesa_tune.profiles.verification import Verification
    from mesa_tune.search.plan import Plan

NO_LAYER = "(no layer)"


def timeline_frame(
    profile: Profile, assignment: Assignment | None = None, batch_size: int | None = None
) -> pd.DataFrame:
    """Return the bytes alive in each slot of the step: `slot, phase, layer, before`, and `after` a policy.

    A step with losses in slices has other slots than the plain one. Each forward, backward and update then
    has as many rows as the step with more slots in it, and rows of the other step repeat; `layer_after` is
    the layer under the policy.
    """
    before = _slots(profile, {}, batch_size).rename(columns={"live": "before"})
    if assignment is None:
        return before
    after = _slots(profile, assignment, batch_size).rename(columns={"live": "after", "layer": "layer_after"})
    parts = [list(_phases(side)) for side in (before, after)]
    if len(parts[0]) != len(parts[1]):
        parts = [[before], [after]]
    frame = pd.concat(map(_side_by_side, *parts), ignore_index=True)
    return frame.assign(slot=range(len(frame)))


def _phases(frame: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """Yield the rows of each forward, backward and update, in order."""
    begins = frame["phase"] != frame["phase"].shift()
    yield from (part for _, part in frame.groupby(begins.cumsum()))


def _slots(profile: Profile, assignment: Assignment, batch_size: int | None) -> pd.DataFrame:
    sized, exact = sized_step(profile, assignment, batch_size)
    slots = sized.slots
    return pd.DataFrame(
        {
            "slot": range(len(slots)),
            "phase": [slot.phase for slot in slots],
            "layer": [slot.layer for slot in slots],
            "live": sized.live(exact),
        }
    )


def _side_by_side(before: pd.DataFrame, after: pd.DataFrame) -> pd.DataFrame:
    """Return the columns of both, with rows of the shorter one repeated evenly."""
    count = max(len(before), len(after))
    first, second = (
        side.iloc[np.arange(count) * len(side) // count].reset_index(drop=True) for side in (before, after)
    )
    return first.join(second[["layer_after", "after"]])


def sized_step(
    profile: Profile, assignment: Assignment, batch_size: int | None = None
) -> tuple[SizedTimeline, Assignment]:
    """Return the timeline of the step under `assignment`, and the settings for it: without slices."""
    sliced = any(settings.tile > 1 for settings in assignment.values())
    timeline = profile.in_slices.timeline if sliced else profile.timeline
    return timeline.at(batch_size or profile.batch_size), without_slices(assignment) if sliced else assignment


def peak_text(frame: pd.DataFrame, column: str, layer: str = "layer") -> str:
    """Return when the bytes of `column` are highest: `in the backward of blocks.5.mlp.2`."""
    row = frame.iloc[int(frame[column].to_numpy().argmax())]
    name = row[layer]
    return moment_text(row["phase"], shorten(name, 48) if isinstance(name, str) else None)


def alive_frame(plain: Prediction, chosen: Prediction | None = None) -> pd.DataFrame:
    """Return what is alive at the peak of the step: `kind, before`, and `after` a policy, largest first."""
    columns = {"before": plain.peak} if chosen is None else {"before": plain.peak, "after": chosen.peak}
    frame = pd.DataFrame({name: dict(peak.bytes) if peak else {} for name, peak in columns.items()})
    frame = frame.fillna(0).astype("int64").rename_axis("kind").reset_index()
    frame = frame[frame[list(columns)].sum(axis=1) > 0]
    return frame.sort_values("before", ascending=False, kind="stable", ignore_index=True)


def layers_frame(
    profile: Profile, assignment: Assignment | None = None, batch_size: int | None = None
) -> pd.DataFrame:
    """Return one row per layer, in the order in which the layers run.

    Columns: `name, tag, index, module, shape, dtype, shared_with, runs, before`; with an assignment also
    `after, settings, stored, exact, bits, gradient_error`. `runs`: in which share of steps. `stored`: `4
    bits`, `exact`, `derive`, `recompute`, `tile` or `offload`. `before` and `after` are the saved bytes of
    the tensors that the layer owns: they sum to the saved bytes of the step. Modules that run again have rows
    of their own below, with the tag `module`, for their inputs. The last row has the bytes that belong to no
    layer, if any.
    """
    order = running_order(profile)
    rows = [_layer_row(profile, name) for name in order]
    frame = pd.DataFrame(
        rows, columns=["name", "tag", "index", "module", "shape", "dtype", "shared_with", "runs"]
    )
    frame = frame.astype({"index": "Int64"})  # of integers, also where the last row has none
    before = saved_by_layer(*sized_step(profile, {}, batch_size))
    frame["before"] = frame["name"].map(before).fillna(0).astype("int64")
    if assignment is not None:
        sized, exact = sized_step(profile, assignment, batch_size)
        after = saved_by_layer(sized, exact)
        frame["after"] = frame["name"].map(after).fillna(0).astype("int64")
        frame = frame.join(_settings_columns(profile, frame, sized, assignment))
        return _with_unowned(frame, {"before": before, "after": after}, assignment)
    return _with_unowned(frame, {"before": before}, {})


def tags_frame(layers: pd.DataFrame) -> pd.DataFrame:
    """Return the saved bytes by tag: `tag, layers, before`, and `after` if `layers` has it, largest first."""
    named = layers.assign(tag=layers["tag"].where(layers["tag"] != "", NO_LAYER))
    columns = [name for name in ("before", "after") if name in layers]
    frame = named.groupby("tag", sort=False)[columns].sum()
    frame.insert(0, "layers", named.groupby("tag", sort=False).size())
    frame = frame[frame[columns].sum(axis=1) > 0].reset_index()
    return frame.sort_values("before", ascending=False, kind="stable", ignore_index=True)


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


def storage_frame(layers: pd.DataFrame) -> pd.DataFrame:
    """Return the layers that save anything: `depth, name, tag, settings, stored, bits, before, after`.

    `layers`: a `layers_frame` with an assignment; `depth` is the row in it.
    """
    saving = layers[(layers["before"] > 0) & (layers["name"] != NO_LAYER)]
    numbered = saving.rename_axis("depth").reset_index()
    return numbered[["depth", "name", "tag", "settings", "stored", "bits", "before", "after"]]


def mean_bits(profile: Profile, assignment: Assignment) -> float:
    """Return the average bits per element of the compressed tensors, ranges included."""
    sized, exact = sized_step(profile, assignment)
    step = sized.under(exact)
    packed = sized.coded.any(step.used) & sized.saved
    elements = int(sized.sizes[packed].sum())
    return 8 * int(step.spans[packed].sum()) / elements if elements else float("nan")


def comparison_frame(predicted: Prediction | None, verification: Verification) -> pd.DataFrame:
    """Return predictions beside measurements, a row for each of `Verification.compared`; unknown is NaN."""
    frame = pd.DataFrame(verification.compared(predicted))
    return frame.astype(dict.fromkeys(frame.columns.difference(["quantity", "unit"]), float))


def study_frame(plan: Plan) -> pd.DataFrame:
    """Return the trials of the study: `trial`, the fields of `TrialEntry`, and `best`.

    `best`: the least value so far, of trials that are whole and within the limits, and of the first.
    """
    frame = pd.DataFrame([vars(trial) for trial in plan.history]).astype(
        dict.fromkeys(("value", "gradient_error", "noise_ratio"), float)
    )
    counts = frame["is_whole"] & frame["is_within"] | (frame.index == 0)
    frame["best"] = frame["value"].where(counts).cummin().ffill()
    frame.insert(0, "trial", range(1, len(frame) + 1))
    return frame


def _layer_row(profile: Profile, name: str) -> dict[str, Any]:
    layer = profile.layer(name)
    plain = {key: getattr(layer, key) for key in ("name", "tag", "index", "module", "dtype")}
    shape = "×".join(str(extent) for extent in layer.shape)
    return {**plain, "shape": shape, "shared_with": ", ".join(layer.shared_with), "runs": layer.share}


def _settings_columns(
    profile: Profile, layers: pd.DataFrame, sized: SizedTimeline, assignment: Assignment
) -> pd.DataFrame:
    """Return the settings in effect: at least the bits that hooks need, and exact for tensors too small."""
    used = sized.compressed(assignment) | {name: assignment.get(name, EXACT) for name in profile.skipped}
    encoded = _encoded_layers(sized) | profile.skipped
    again = sized.under(assignment).reruns
    rows = []
    for name, before, after in zip(layers["name"], layers["before"], layers["after"], strict=True):
        settings = assignment.get(name, EXACT)
        if settings.tile == 1:
            settings = used.get(name, EXACT) if name in encoded else EXACT
        stored = _stored(
            settings, derives=before > 0 and not after, again=block_of(name, sorted(again)) is not None
        )
        rows.append(
            {
                "settings": settings.label,
                "stored": stored,
                "exact": settings.exact,
                "bits": float("nan") if settings.exact or settings.store == "offload" else settings.bits,
                "gradient_error": profile.layer_error(
                    profile.layer(name), without_slices({name: settings})[name]
                ),
            }
        )
    columns = ["settings", "stored", "exact", "bits", "gradient_error"]
    return pd.DataFrame(rows, columns=columns).astype({"bits": float, "gradient_error": float})


def _stored(settings: LayerSettings, *, derives: bool, again: bool) -> str:
    """Return how a layer stores what it saves, in a word of policy.txt, or as its bits."""
    if again:
        return "recompute"
    if settings.tile > 1:
        return "tile"
    if settings.exact or settings.store == "offload":
        return "exact" if settings.exact else "offload"
    return "derive" if derives else f"{settings.bits} bit{'s' if settings.bits > 1 else ''}"


def _encoded_layers(sized: SizedTimeline) -> set[str]:
    """Return the layers whose settings change what they store."""
    return {
        name
        for item in sized.spans
        if item.kind in ("coded", "side") and item.size > 0
        for name in item.layers
    }


def _with_unowned(
    frame: pd.DataFrame, columns: Mapping[str, Mapping[str, int]], assignment: Assignment
) -> pd.DataFrame:
    """Append rows for the bytes that no layer of `frame` owns.

    These are the inputs of modules that run again, and in one last row the bytes of no layer.
    """
    named = set(frame["name"])
    unowned: dict[str, dict[str, int]] = {}
    for column, counts in columns.items():
        for name, count in counts.items():
            if name not in named:
                owner = name if name in assignment else NO_LAYER
                unowned.setdefault(owner, dict.fromkeys(columns, 0))[column] += count
    last = sorted(unowned, key=lambda owner: owner == NO_LAYER)
    rows = [
        _unowned_row(owner, assignment.get(owner)) | unowned[owner]
        for owner in last
        if any(unowned[owner].values())
    ]
    if not rows:
        return frame
    added = pd.DataFrame(rows)
    return pd.concat([frame, added[added.columns.intersection(frame.columns)]], ignore_index=True)


def _unowned_row(owner: str, settings: LayerSettings | None) -> dict[str, Any]:
    """Return a row of the layer table; `settings`: of a module that runs again, None for no layer."""
    row: dict[str, Any] = dict.fromkeys(("module", "shape", "dtype", "shared_with"), "")
    row |= {"name": owner, "runs": 1.0}
    if settings is None:
        return {
            **row,
            "tag": "",
            "settings": "exact",
            "stored": "exact",
            "exact": True,
            "gradient_error": 0.0,
        }
    stored = {"settings": settings.label, "stored": "recompute", "bits": settings.bits, "exact": False}
    return {**row, "tag": "module", **stored}
