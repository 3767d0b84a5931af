"""Figures of memory: through the step, by layer, by tag."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from matplotlib.patheffects import withStroke

from mesa_tune.reports import frames, style
from mesa_tune.reports.style import AFTER, BEFORE, BUDGET_LINE, INK, MUTED, SHEET
from mesa_tune.units import counted, format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAMED_LAYERS = 36
"""The largest number of layers whose names are written beside the bars."""


def memory_through_step(frame: pd.DataFrame, budget: int | None = None) -> Figure:
    """Draw the bytes alive through the step, plain and under the policy, with the budget as a line."""
    with style.styled():
        unit, name = style.byte_unit(frame["before"].max())
        figure, axes = style.sheet(4.3, _step_title(frame, budget), _step_subtitle(frame))
        _draw_step(axes, frame, unit)
        if budget:
            axes.axhline(budget / unit, **BUDGET_LINE, label=f"budget {format_bytes(budget)}")
        _mark_peaks(axes, frame, unit)
        _mark_phases(axes, frame)
        axes.set_ylabel(f"memory ({name})")
        axes.set_xlabel("moment of the training step")
        axes.set_ylim(0, 1.12 * max(frame["before"].max(), budget or 0) / unit)
        style.legend_above(axes)
        return figure


def memory_by_layer(frame: pd.DataFrame) -> Figure:
    """Draw the saved bytes of each layer, plain and under the policy: by name if names fit, else by depth."""
    saving = frame[frame["before"] > 0]
    named = len(saving) <= NAMED_LAYERS
    with style.styled():
        unit, name = style.byte_unit(saving["before"].max() if len(saving) else 1)
        height = 1.7 + 0.235 * max(len(saving), 4) if named else 4.2
        figure, axes = style.sheet(height, _layer_title(frame), _layer_subtitle(saving))
        _draw_named_layers(axes, saving, unit) if named else _draw_depth(axes, frame, unit)
        label = f"saved for backward ({name})"
        axes.set(xlabel=label) if named else axes.set(ylabel=label)
        style.legend_above(axes)
        return figure


def memory_by_tag(frame: pd.DataFrame) -> Figure:
    """Draw the saved bytes of each tag, plain and under the policy, with their numbers."""
    with style.styled():
        unit, name = style.byte_unit(frame["before"].max() if len(frame) else 1)
        figure, axes = style.sheet(1.6 + 0.42 * max(len(frame), 2), _tag_title(frame))
        rows = np.arange(len(frame))
        axes.barh(rows, frame["before"] / unit, height=0.74, color=BEFORE, label="before")
        if "after" in frame:
            axes.barh(rows, frame["after"] / unit, height=0.4, color=AFTER, label="after")
        for row, values in zip(rows, frame.to_dict("records"), strict=True):
            text = (
                style.change(values["before"], values["after"])
                if "after" in values
                else format_bytes(values["before"])
            )
            largest = max(values["before"], values.get("after", 0))
            axes.annotate(text, (largest / unit, row), xytext=(6, 0), textcoords="offset points", va="center",
                          fontsize=8.5, color=INK)  # fmt: skip
        axes.set_yticks(rows, map(_tag_label, frame["tag"], frame["layers"].astype(int)))
        axes.set_ylim(len(frame) - 0.4, -0.6)
        axes.set_xlim(0, 1.35 * max(frame["before"].max() if len(frame) else 1, 1) / unit)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(f"saved for backward ({name})")
        style.legend_above(axes)
        return figure


def _step_title(frame: pd.DataFrame, budget: int | None) -> str:
    before = int(frame["before"].max())
    if "after" not in frame:
        return f"The plain step peaks at {format_bytes(before)}"
    after = int(frame["after"].max())
    fits = ""
    if budget:
        fits = ", within the budget" if after <= budget else ", above the budget"
    return f"The step’s peak: {style.change(before, after)}{fits}"


def _step_subtitle(frame: pd.DataFrame) -> str:
    plain = style.escaped(frames.peak_text(frame, "before"))
    if "after" not in frame:
        return f"it is {plain}; weights and optimizer included"
    after = style.escaped(frames.peak_text(frame, "after", "layer_after"))
    return f"it is {after}" + ("" if after == plain else f"; the plain step’s is {plain}")


def _mark_peaks(axes: Axes, frame: pd.DataFrame, unit: int) -> None:
    """Mark the highest moment of each step with its bytes."""
    for column, color in (("before", MUTED), ("after", AFTER)):
        if column in frame:
            slot, most = int(frame[column].to_numpy().argmax()), int(frame[column].max())
            axes.plot(slot + 0.5, most / unit, marker="o", markersize=6, color=color, zorder=5)
            text = axes.annotate(format_bytes(most), (slot + 0.5, most / unit), xytext=(0, 7), color=color,
                                 textcoords="offset points", ha="center", fontsize=9, fontweight="bold",
                                 zorder=6)  # fmt: skip
            text.set_path_effects([withStroke(linewidth=3, foreground=SHEET)])


def _draw_step(axes: Axes, frame: pd.DataFrame, unit: int) -> None:
    edges = np.arange(len(frame) + 1)
    columns = {"before": BEFORE, "after": AFTER}
    for column, color in columns.items():
        if column in frame:
            values = frame[column].to_numpy() / unit
            axes.stairs(values, edges, fill=True, color=color, alpha=0.28 if column == "before" else 0.35)
            axes.stairs(values, edges, baseline=None, color=color, linewidth=1.5, label=column)
    axes.set_xlim(0, len(frame))


def _mark_phases(axes: Axes, frame: pd.DataFrame) -> None:
    """Label the time axis with the names of the phases, with a line where a phase begins."""
    starts = [0, *(frame.index[frame["phase"] != frame["phase"].shift()][1:]), len(frame)]
    spans = [(first, last) for first, last in pairwise(starts) if last > first]
    wide = [span for span in spans if (span[1] - span[0]) >= 0.04 * len(frame)]
    names = {"forward": "forward", "backward": "backward", "step": "optimizer"}
    axes.set_xticks(
        [(first + last) / 2 for first, last in wide],
        [names.get(str(frame["phase"].iloc[first]), "") for first, _ in wide],
    )
    axes.tick_params(axis="x", length=0)
    axes.grid(visible=False, axis="x")
    for first, _ in spans[1:]:
        axes.axvline(first, color=MUTED, linewidth=0.8, linestyle=":")


def _draw_named_layers(axes: Axes, frame: pd.DataFrame, unit: int) -> None:
    rows = np.arange(len(frame))
    axes.barh(rows, frame["before"] / unit, height=0.74, color=BEFORE, label="before")
    if "after" in frame:
        axes.barh(rows, frame["after"] / unit, height=0.4, color=AFTER, label="after")
    names = zip(frame.index, style.short_names(frame["name"], 40), strict=True)
    axes.set_yticks(rows, [f"{name}  {number}" for number, name in names], fontsize=8.5)
    axes.set_ylim(len(frame) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")


def _draw_depth(axes: Axes, frame: pd.DataFrame, unit: int) -> None:
    edges = np.arange(len(frame) + 1) - 0.5
    axes.stairs(frame["before"] / unit, edges, fill=True, color=BEFORE, label="before")
    if "after" in frame:
        axes.stairs(frame["after"] / unit, edges, fill=True, color=AFTER, label="after")
    axes.grid(visible=False, axis="x")
    style.number_depth(axes)


def _layer_title(frame: pd.DataFrame) -> str:
    before = int(frame["before"].sum())
    if "after" not in frame:
        return f"The layers save {format_bytes(before)} for backward"
    return f"Saved for backward: {style.change(before, int(frame['after'].sum()))}"


def _layer_subtitle(saving: pd.DataFrame) -> str:
    by_tag = saving.groupby("tag")["before"].sum()
    if by_tag.empty:
        return "no layer saves anything"
    share = 100 * by_tag.max() / max(int(by_tag.sum()), 1)
    return f"{len(saving)} layers save something, most of it in {by_tag.idxmax()} layers ({share:.0f} %)"


def _tag_label(tag: str, count: int) -> str:
    if tag == frames.NO_LAYER:
        return tag
    return f"{tag}  ({counted(count, 'module' if tag == 'module' else 'layer')})"


def _tag_title(frame: pd.DataFrame) -> str:
    if frame.empty:
        return "No layer saves anything"
    if "after" not in frame:
        return f"Most bytes are saved by {frame['tag'][0]} layers"
    saved = frame["before"] - frame["after"]
    if saved.max() <= 0:
        return "No layer saves less than before"
    share = 100 * saved.max() / max(int(saved.sum()), 1)
    most = frame["tag"].iloc[int(saved.to_numpy().argmax())]
    return f"{most} layers give {min(share, 100):.0f} % of what the policy frees"
