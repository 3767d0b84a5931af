"""How each layer stores what it saves, along the depth of the model."""

from __future__ import annotations

from math import isnan
from typing import TYPE_CHECKING

import pandas as pd

from mesa_tune.reports import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LABELLED_LAYERS = 16
"""The largest number of layers whose names are written below the plot."""
_WORDS = ("recompute", "derive", "tile"), ("offload", "exact")
"""Words for what is stored below the bits, and above them."""
_BITS = (1, 2, 3, 4, 6, 8)


def storage_along_depth(frame: pd.DataFrame, mean: float) -> Figure:
    """Draw how every layer is stored that saves anything, by depth; the colour is the tag.

    `mean`: bits per element of compressed tensors, NaN if none is compressed.
    """
    rows = _rows(frame)
    with style.styled():
        figure, axes = style.sheet(1.9 + 0.3 * len(rows), _title(mean), _subtitle(frame))
        _draw_layers(axes, frame, {label: height for height, label in enumerate(rows)})
        axes.set_yticks(range(len(rows)), rows)
        axes.set_ylim(-0.7, len(rows) - 0.3)
        axes.set_ylabel("stored as")
        _label_depth(axes, frame)
        _legend_beside(axes)
        return figure


def _draw_layers(axes: Axes, frame: pd.DataFrame, heights: dict[str, int]) -> None:
    largest = max(float(frame["before"].max()), 1.0)
    shrink = min(1.0, 110 / max(len(frame), 1))
    for number, tag in enumerate(dict.fromkeys(frame["tag"])):
        part = frame[frame["tag"] == tag]
        sizes = shrink * (18 + 150 * part["before"] / largest)
        color, marker = style.CATEGORIES[number % 8], style.MARKERS[(number + number // 8) % 8]
        axes.scatter(part["depth"], part["stored"].map(heights), s=sizes, color=color, marker=marker,
                     alpha=0.85, linewidths=0, label=tag)  # fmt: skip


def _rows(frame: pd.DataFrame) -> list[str]:
    """Return the labels of the rows, lowest first: words only where a layer has them."""
    present = set(frame["stored"])
    below, above = ([word for word in words if word in present] for words in _WORDS)
    widths = {int(label.split()[0]) for label in present - {*_WORDS[0], *_WORDS[1]}}
    bits = [f"{width} bit{'s' if width > 1 else ''}" for width in sorted({*_BITS, *widths})]
    return [*below, *bits, *above]


def _title(mean: float) -> str:
    if isnan(mean):
        return "No layer stores fewer bits"
    return f"Compressed layers take {mean:.2g} bits per element on average, ranges included"


def _subtitle(frame: pd.DataFrame) -> str:
    counts = frame["stored"].value_counts()
    parts = [f"{counts[word]} {text}" for word, text in _TEXTS.items() if word in counts]
    rest = f", {', '.join(parts)}" if parts else ""
    return f"{len(frame)} layers save something{rest}; a larger mark saved more bytes"


_TEXTS = {
    "exact": "of them exactly",
    "derive": "derived in the backward",
    "recompute": "run again in the backward",
    "tile": "in slices",
    "offload": "in host memory",
}


def _label_depth(axes: Axes, frame: pd.DataFrame) -> None:
    if len(frame) <= LABELLED_LAYERS:
        names = style.short_names(frame["name"], 24)
        axes.set_xticks(frame["depth"], names, rotation=35, ha="right", rotation_mode="anchor", fontsize=8)
        axes.set_xlim(frame["depth"].min() - 0.6, frame["depth"].max() + 0.6)
    else:
        style.number_depth(axes)


def _legend_beside(axes: Axes) -> None:
    legend = axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.2, title="tag")
    legend.set_alignment("left")
    for handle in legend.legend_handles:
        handle.set_sizes([46.0])  # type: ignore[union-attr]
