"""One figure per frame: DataFrame in, matplotlib Figure out. The title of a figure says its finding.

What is hard: figures must stay readable for 5 layers and for 500, and titles true for every result.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from math import isnan
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from mesa_tune.reports import style
from mesa_tune.reports.style import AFTER, BEFORE, BUDGET, CHOSEN, INK, MUTED, SHEET
from mesa_tune.units import format_bytes, format_time

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAMED_LAYERS = 36
"""The largest number of layers whose names are written beside the bars."""
EXACT_HEIGHT = 9.2
"""Height of exact layers on the axis of bits per element, above 8 bits."""
_BUDGET_LINE: Any = {"color": BUDGET, "linestyle": (0, (5, 3)), "linewidth": 1.6, "zorder": 4}


def memory_through_step(frame: pd.DataFrame, budget: int | None = None) -> Figure:
    """Draw the bytes alive through the step, plain and under the policy, with the budget as a line."""
    with style.styled():
        unit, name = style.byte_unit(frame["before"].max())
        figure, axes = style.sheet(
            4.3, _step_title(frame, budget), "bytes alive, weights and optimizer included"
        )
        _draw_step(axes, frame, unit)
        if budget:
            axes.axhline(budget / unit, **_BUDGET_LINE, label=f"budget {format_bytes(budget)}")
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


def bits_along_depth(frame: pd.DataFrame, mean: float) -> Figure:
    """Draw the bits per element of every layer that saves anything, by depth; the colour is the tag."""
    rematerialized = _rematerialized(frame)
    title = (
        "Every layer saves its tensors exactly"
        if isnan(mean)
        else f"Compressed layers take {mean:.2g} bits per element on average, ranges included"
    )
    with style.styled():
        figure, axes = style.sheet(4.2, title, _bits_subtitle(frame))
        largest = max(float(frame["before"].max()), 1.0)
        shrink = min(1.0, 110 / max(len(frame), 1))
        heights = frame["bits"].where(~frame["exact"].astype(bool), EXACT_HEIGHT).where(~rematerialized, 0)
        for number, tag in enumerate(dict.fromkeys(frame["tag"])):
            part = frame[frame["tag"] == tag]
            sizes = shrink * (18 + 150 * part["before"] / largest)
            color, marker = style.CATEGORIES[number % 8], style.MARKERS[(number + number // 8) % 8]
            axes.scatter(part["depth"], heights[part.index], s=sizes, color=color, marker=marker, alpha=0.85,
                         linewidths=0, label=tag)  # fmt: skip
        lowest: dict[float, str] = {0: "made again"} if rematerialized.any() else {}
        labels: dict[float, str] = {
            **lowest,
            **{bits: str(bits) for bits in (1, 2, 3, 4, 6, 8)},
            EXACT_HEIGHT: "exact",
        }
        axes.set_yticks(list(labels), list(labels.values()))
        axes.set_ylim(-0.6 if lowest else 0.3, EXACT_HEIGHT + 0.6)
        axes.set_ylabel("bits per element")
        _label_depth(axes, frame)
        _legend_beside(axes)
        return figure


def _rematerialized(frame: pd.DataFrame) -> pd.Series[Any]:
    """Return which layers save nothing of their own: backward computes it from another layer's copy."""
    return (frame["after"] == 0) & ~frame["exact"].astype(bool)


def _bits_subtitle(frame: pd.DataFrame) -> str:
    exact, again = int(frame["exact"].sum()), int(_rematerialized(frame).sum())
    layers = f"{len(frame)} layers save something, {exact} of them exactly"
    rest = f", {again} are made again in the backward" if again else ""
    return f"{layers}{rest}; a larger mark saved more bytes"


def pareto_front(frame: pd.DataFrame, budget: int | None = None, objective: str = "error") -> Figure:
    """Draw step time and gradient error against the peak: solved, uniform and marked policies.

    `objective`: what the chosen policy is best in. Without known times only the error is drawn.
    """
    plain = frame[frame["kind"] == "plain"].iloc[0]
    others = frame[frame["kind"] != "plain"]
    timed = others.assign(step=others["step_ms"] / plain["step_ms"]).dropna(subset=["step"])
    with style.styled():
        unit, name = style.byte_unit(plain["peak_bytes"])
        rows = 1 if timed.empty else 2
        figure, panels = style.sheet(
            1.4 + 3.2 * rows,
            _pareto_title(others, objective, plain["step_ms"]),
            "lower and further left is better",
            nrows=rows,
            sharex=True,
            squeeze=False,
        )
        *above, error = panels.flat
        error.set_yscale("log")
        error.set_ylabel("gradient error")
        error.set_xlabel(f"peak of the training step ({name})")
        _draw_points(error, others[others["gradient_error"] > 0], "gradient_error", unit)
        for axes in above:
            axes.set_ylabel("step time over plain's")
            _draw_points(axes, timed, "step", unit)
        for axes in panels.flat:
            label = f"plain {format_bytes(int(plain['peak_bytes']))}"
            axes.axvline(plain["peak_bytes"] / unit, color=MUTED, linewidth=1.4, linestyle=":", label=label)
            if budget:
                axes.axvline(budget / unit, **_BUDGET_LINE, label=f"budget {format_bytes(budget)}")
            axes.margins(x=0.08, y=0.12)
        style.legend_above(panels.flat[0], columns=4)
        return figure


def predicted_beside_measured(frame: pd.DataFrame) -> Figure:
    """Draw one panel per quantity: bars for plain, predicted and measured, each with its number."""
    available = frame.dropna(subset=["predicted", "measured"], how="all").reset_index(drop=True)
    with style.styled():
        columns = max(len(available), 1)
        figure, panels = style.sheet(2.75, _comparison_title(available), ncols=columns, squeeze=False)
        for axes, (_, row) in zip(panels.flat, available.iterrows(), strict=False):
            _draw_comparison(axes, row)
        if available.empty:
            panels[0, 0].set_axis_off()
        return figure


def _step_title(frame: pd.DataFrame, budget: int | None) -> str:
    before = int(frame["before"].max())
    if "after" not in frame:
        return f"The plain step peaks at {format_bytes(before)}"
    after = int(frame["after"].max())
    fits = ""
    if budget:
        fits = ", within the budget" if after <= budget else ", above the budget"
    return f"The step's peak: {style.change(before, after)}{fits}"


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
    _number_depth(axes)


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


def _label_depth(axes: Axes, frame: pd.DataFrame) -> None:
    if len(frame) <= 16:
        names = style.short_names(frame["name"], 24)
        axes.set_xticks(frame["depth"], names, rotation=35, ha="right", rotation_mode="anchor", fontsize=8)
        axes.set_xlim(frame["depth"].min() - 0.6, frame["depth"].max() + 0.6)
    else:
        _number_depth(axes)


def _number_depth(axes: Axes) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=12))
    axes.set_xlabel("layer, by its number in the layer table")
    axes.margins(x=0.01)


def _legend_beside(axes: Axes) -> None:
    legend = axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.2, title="tag")
    legend.set_alignment("left")
    for handle in legend.legend_handles:
        handle.set_sizes([46.0])  # type: ignore[union-attr]


def _pareto_title(frame: pd.DataFrame, objective: str, plain_ms: float) -> str:
    chosen = frame[frame["kind"] == "chosen"].dropna(subset=["gradient_error"])
    if chosen.empty:
        return "What each budget costs in time and gradient error"
    row = chosen.iloc[0]
    # The comparison is what a user would try first: the best uniform policy that needs no more memory.
    uniform = frame[(frame["kind"] == "uniform") & (frame["peak_bytes"] <= row["peak_bytes"] * 1.001)]
    if objective == "time" and row["step_ms"] > 0 and plain_ms > 0:
        as_exact = uniform[uniform["gradient_error"] <= row["gradient_error"] * 1.001]
        return _time_title(row, as_exact.dropna(subset=["step_ms"]), plain_ms)
    error, peak = row["gradient_error"], format_bytes(row["peak_bytes"])
    rivals = uniform.dropna(subset=["gradient_error"])
    alone = f"The chosen policy: gradient error {style.error_text(error)} at {peak}"
    if rivals.empty or not error:
        return alone
    best = rivals.loc[rivals["gradient_error"].idxmin()]
    ratio = best["gradient_error"] / error
    if ratio < 1.05:
        return alone
    return f"At {peak} the chosen policy errs {ratio:.3g} times less than {_uniform_text(best)}"


def _time_title(row: pd.Series[Any], uniform: pd.DataFrame, plain_ms: float) -> str:
    taken = f"At {format_bytes(row['peak_bytes'])} a step takes {row['step_ms'] / plain_ms:.2f} times plain's"
    if uniform.empty:
        return taken
    best = uniform.sort_values("step_ms").iloc[0]
    return f"{taken}; {_uniform_text(best)}: {best['step_ms'] / plain_ms:.2f}"


def _uniform_text(row: pd.Series[Any]) -> str:
    return f"uniform {row['label']} at {format_bytes(row['peak_bytes'])}"


_CURVES = {"time": (AFTER, "o", "least time"), "error": (style.CATEGORIES[3], "v", "least error")}
_SINGLE = {"uniform": ("s", "uniform, by bits"), "again": ("D", "all blocks run again")}


def _draw_points(axes: Axes, frame: pd.DataFrame, column: str, unit: int) -> None:
    for kind, (color, marker, title) in _CURVES.items():
        solved = frame[frame["kind"] == kind].sort_values("peak_bytes")
        if len(solved):
            axes.plot(solved["peak_bytes"] / unit, solved[column], color=color, marker=marker, markersize=5,
                      linewidth=1.6, label=title)  # fmt: skip
    for kind, (marker, title) in _SINGLE.items():
        single = frame[frame["kind"] == kind]
        if len(single):
            axes.plot(single["peak_bytes"] / unit, single[column], color=MUTED, marker=marker, markersize=5.5,
                      linewidth=0, label=title)  # fmt: skip
    for _, row in frame[frame["kind"] == "uniform"].iterrows():
        position, bits = (row["peak_bytes"] / unit, row[column]), row["label"].split()[0]
        text = axes.annotate(bits, position, xytext=(0, 10), textcoords="offset points", ha="center",
                             va="center", fontsize=8.5, color=MUTED, zorder=4.5)  # fmt: skip
        # A white outline keeps lines behind the text from touching the letters.
        text.set_path_effects([withStroke(linewidth=3, foreground=SHEET)])
    marked = frame[~frame["kind"].isin([*_CURVES, *_SINGLE])]
    for (_, row), face in zip(marked.iterrows(), (CHOSEN, "none", "none"), strict=False):
        # The measured point is a ring, because it mostly falls on the chosen one.
        axes.plot(row["peak_bytes"] / unit, row[column], marker="*" if face == CHOSEN else "o",
                  markersize=15 if face == CHOSEN else 19, markerfacecolor=face, markeredgecolor=CHOSEN,
                  markeredgewidth=0 if face == CHOSEN else 1.8, linewidth=0, label=row["label"],
                  zorder=5)  # fmt: skip


_QUANTITIES: Mapping[str, tuple[str, Any]] = {
    "saved_bytes": ("saved", format_bytes),
    "peak_bytes": ("peak", format_bytes),
    "step_ms": ("step time", lambda value: format_time(value / 1000)),
    "gradient_error": ("gradient error", style.error_text),
    "gradient_noise_ratio": ("noise ratio", style.error_text),
}


def _comparison_title(frame: pd.DataFrame) -> str:
    bytes_only = frame[frame["quantity"].isin(["saved_bytes", "peak_bytes"])].dropna(subset=["difference"])
    if bytes_only.empty:
        return "Predicted, not measured yet"
    worst = bytes_only["difference"].abs().max()
    return f"Predicted bytes are within {max(100 * worst, 0.1):.1f} % of the measured ones"


def _draw_comparison(axes: Axes, row: pd.Series[Any]) -> None:
    title, form = _QUANTITIES[str(row["quantity"])]
    bars = [("plain", BEFORE), ("predicted", style.CATEGORIES[4]), ("measured", AFTER)]
    values = [0.0 if isnan(row[label]) else float(row[label]) for label, _ in bars]
    axes.barh([label for label, _ in bars], values, color=[color for _, color in bars], height=0.62)
    axes.set_title(title, loc="left", fontsize=10, color=INK, pad=8)
    axes.invert_yaxis()
    axes.grid(visible=False)
    top = max(values) or 1.0
    axes.set_xlim(0, top * 1.6)
    for position, ((label, _), value) in enumerate(zip(bars, values, strict=True)):
        text = "not known" if isnan(row[label]) else form(value)
        axes.text(value + 0.03 * top, position, text, va="center", fontsize=8.5, color=INK)
    axes.xaxis.set_major_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: ""))
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(axis="y", length=0, labelsize=9)
