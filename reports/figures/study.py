"""What the study did: the value of every trial, and the best so far."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd
from matplotlib.ticker import MaxNLocator

from mesa_tune.reports import style
from mesa_tune.reports.style import AFTER, BUDGET, CHOSEN, MUTED
from mesa_tune.units import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_VALUES = {
    "time": "step time over plain's",
    "error": "gradient error",
    "memory": "peak over the solved plan's",
}


def study_progress(frame: pd.DataFrame, objective: str, *, won: bool = False) -> Figure:
    """Draw the value of each trial in turn. `won`: a trial replaced the solved plan."""
    with style.styled():
        figure, axes = style.sheet(3.7, _title(frame, won), _subtitle(frame))
        axes.axhline(frame["value"].iloc[0], color=MUTED, linestyle=":", linewidth=1.4, label="solved plan")
        axes.step(
            frame["trial"], frame["best"], where="post", color=CHOSEN, linewidth=1.6, label="best so far"
        )
        for label, mask, color, marker in _kinds(frame):
            _draw(axes, frame[mask], label, color, marker)
        if objective == "error":
            axes.set_yscale("log")
        axes.set_ylabel(_VALUES[objective])
        axes.set_xlabel("trial")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=12, min_n_ticks=1))
        axes.margins(x=0.03, y=0.15)
        style.legend_above(axes, columns=5)
        return figure


def _kinds(frame: pd.DataFrame) -> list[tuple[str, pd.Series[bool], str, str]]:
    inside, whole = frame["is_within"].astype(bool), frame["is_whole"].astype(bool)
    return [
        ("within the limits", inside & whole, AFTER, "o"),
        ("above a limit", ~inside, BUDGET, "v"),
        ("ended early", inside & ~whole, MUTED, "x"),
    ]


def _draw(axes: Axes, part: pd.DataFrame, label: str, color: str, marker: str) -> None:
    if len(part):
        axes.plot(
            part["trial"], part["value"], color=color, marker=marker, linewidth=0, label=label, zorder=3
        )


def _title(frame: pd.DataFrame, won: bool) -> str:
    trials = counted(len(frame), "trial")
    if won:
        return f"{trials}: one of them is better than the solved plan, in fresh measurements"
    return f"{trials}: none is better than the solved plan in fresh measurements"


def _subtitle(frame: pd.DataFrame) -> str:
    inside = int((frame["is_within"] & frame["is_whole"]).sum())
    return (
        f"{inside} of them whole and within the limits; the first trial is the solved plan; lower is better"
    )
