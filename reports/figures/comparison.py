"""Predictions beside measurements."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan, nan
from typing import TYPE_CHECKING, Any

import pandas as pd
from matplotlib.ticker import FuncFormatter, NullLocator

from mesa_tune.profiles.shown import TITLES, quantity_text
from mesa_tune.reports import style
from mesa_tune.reports.style import AFTER, BEFORE, INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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


def _comparison_title(frame: pd.DataFrame) -> str:
    bytes_only = frame[frame["quantity"].isin(["saved_bytes", "peak_bytes"])].dropna(subset=["difference"])
    if bytes_only.empty:
        return "Predicted, not measured yet"
    worst = bytes_only["difference"].abs().max()
    return f"Predicted bytes are within {max(100 * worst, 0.1):.1f} % of the measured ones"


def _interval(row: pd.Series[Any], label: str) -> tuple[float, float]:
    return float(row.get(f"{label}_low", nan)), float(row.get(f"{label}_high", nan))


def _draw_intervals(axes: Axes, ends: Sequence[tuple[float, float]]) -> None:
    """Draw a line between the ends of each interval, over its bar."""
    for position, (low, high) in enumerate(ends):
        if not isnan(low):
            axes.plot([low, high], [position, position], color=INK, linewidth=1.3, marker="|", markersize=7)


def _draw_comparison(axes: Axes, row: pd.Series[Any]) -> None:
    quantity = str(row["quantity"])
    labels = ("plain", "predicted", "measured")
    values = [0.0 if isnan(row[label]) else float(row[label]) for label in labels]
    ends = [_interval(row, label) for label in labels]
    bars = axes.barh(labels, values, color=[BEFORE, AFTER, AFTER], height=0.62)
    bars.patches[1].set_alpha(0.5)
    _draw_intervals(axes, ends)
    edges = [
        value if isnan(high) else max(value, high) for value, (_, high) in zip(values, ends, strict=True)
    ]
    top = max(edges) or 1.0
    for position, (label, value) in enumerate(zip(labels, values, strict=True)):
        text = "not known" if isnan(row[label]) else quantity_text(quantity, value)
        axes.annotate(text, (edges[position], position), xytext=(6, 0), textcoords="offset points",
                      va="center", fontsize=8.5, color=INK)  # fmt: skip
    axes.set_title(TITLES[quantity], loc="left", fontsize=10, color=INK, pad=8)
    axes.set_xlim(0, top * 1.7)
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.xaxis.set_major_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: ""))
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(axis="y", length=0, labelsize=9)
