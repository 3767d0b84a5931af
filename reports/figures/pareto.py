"""The front of policies: step time and gradient error against the peak."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd
from matplotlib.patheffects import withStroke

from mesa_tune.reports import style
from mesa_tune.reports.style import AFTER, BUDGET_LINE, CHOSEN, MUTED, SHEET
from mesa_tune.units import format_bytes, format_error

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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
                axes.axvline(budget / unit, **BUDGET_LINE, label=f"budget {format_bytes(budget)}")
            axes.margins(x=0.08, y=0.12)
        style.legend_above(panels.flat[0], columns=4)
        for line in panels.flat[0].get_legend().get_lines():
            line.set_markersize(min(line.get_markersize(), 9))
        return figure


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
    alone = f"The chosen policy: gradient error {format_error(error)} at {peak}"
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
_SINGLE = {"uniform": ("s", "uniform, by bits"), "again": ("D", "checkpointing: all blocks run again")}


def _draw_points(axes: Axes, frame: pd.DataFrame, column: str, unit: int) -> None:
    for kind, (color, marker, title) in _CURVES.items():
        solved = frame[frame["kind"] == kind].sort_values("peak_bytes")
        if len(solved):
            # Hollow: the bytes are inferred.
            faces = [color if traced else SHEET for traced in solved["traced"]]
            at = solved["peak_bytes"] / unit, solved[column]
            inferred = "" if solved["traced"].all() else " (hollow: bytes inferred)"
            axes.plot(*at, color=color, linewidth=1.6)
            axes.scatter(
                *at, s=25, marker=marker, color=faces, edgecolors=color, zorder=3, label=title + inferred
            )
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
