"""What modules save, as an icicle: each box lies below that of the module around it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from mesa_tune.reports import style
from mesa_tune.units import format_bytes, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TITLES = {"plain": "plain", "policy": "under the policy"}
_CHARACTERS = 128
"""So many fit into the width of the figure."""
_SHADES = (0.30, 0.42, 0.54, 0.66)


def memory_by_module(frame: pd.DataFrame) -> Figure:
    """Draw the boxes of `tree.boxes`: before, and below it on the same scale under the policy."""
    states = list(dict.fromkeys(frame["state"]))
    depth, largest = int(frame["depth"].max()) + 1, float(frame["bytes"].max())
    with style.styled():
        figure, axes = style.sheet(
            0.9 + len(states) * (0.45 + 0.24 * depth), _title(frame), nrows=len(states), squeeze=False
        )
        unit, name = style.byte_unit(largest)
        for panel, state in zip(axes[:, 0], states, strict=True):
            part = frame[frame["state"] == state]
            _draw(panel, part, largest, unit, dark=state != "plain")
            panel.set_xlim(0, largest / unit)
            panel.set_ylim(depth - 0.45, -0.55)
            panel.set_yticks([])
            panel.spines["left"].set_visible(False)
            panel.grid(visible=False)
            panel.set_title(_TITLES[state], loc="left", fontsize=9, color=style.MUTED)
        axes[-1, 0].set_xlabel(f"saved {name}")
        return figure


def _title(frame: pd.DataFrame) -> str:
    whole = frame[frame["depth"] == 0].set_index("state")["bytes"]
    text = f"The modules save {format_bytes(int(whole['plain']))}"
    return f"{text}, under the policy {format_bytes(int(whole['policy']))}" if "policy" in whole else text


def _draw(axes: Axes, frame: pd.DataFrame, largest: float, unit: int, *, dark: bool) -> None:
    color = style.AFTER if dark else style.BEFORE
    for row in frame[frame["bytes"] > 0].to_dict("records"):
        depth, start, width = row["depth"], row["start"] / unit, row["bytes"] / unit
        alpha = _SHADES[depth % len(_SHADES)]
        axes.barh(depth, width, 0.94, start, color=color, alpha=alpha, edgecolor=style.SHEET, linewidth=0.7)
        room = int(_CHARACTERS * row["bytes"] / largest)
        label = f"{row['name']} ({row['count']} ×)" if row["count"] > 1 else row["name"]
        if room >= min(len(label), 5):
            axes.text(start + width / 2, depth, shorten(label, room), ha="center", va="center", fontsize=7.5)
