"""Style of every figure: a palette that colour-blind readers can tell apart, the size, the title, texts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from mesa_tune.units import format_bytes, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colours of Okabe and Ito wherever colour has a meaning. On dark screens the page replaces them (html.py).
INK = "#16202c"
MUTED = "#5b6776"
GRID = "#dfe4ea"
SHEET = "#ffffff"
BEFORE = "#a3adba"
AFTER = "#0072b2"
BUDGET = "#d55e00"
CHOSEN = "#009e73"
CATEGORIES = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8a6d3b", "#7f7f7f")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")

BUDGET_LINE: Any = {"color": BUDGET, "linestyle": (0, (5, 3)), "linewidth": 1.6, "zorder": 4}
WIDTH = 9.6
_RC: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "figure.dpi": 100,
    "savefig.dpi": 160,
    "svg.fonttype": "path",
    "svg.hashsalt": "mesa-tune",
}
_UNITS = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"), (1, "bytes"))


@contextmanager
def styled() -> Iterator[None]:
    """Use these settings in matplotlib inside the context."""
    with mpl.rc_context(_RC):
        yield


def sheet(height: float, title: str, subtitle: str = "", **options: Any) -> tuple[Figure, Any]:
    """Return a figure `height` inches high, with `title` and `subtitle`, and its axes."""
    figure = Figure(figsize=(WIDTH, height), layout=ConstrainedLayoutEngine(h_pad=0.08, w_pad=0.08))
    axes = figure.subplots(**options)
    # Constrained layout reserves space for the figure's title only, so an empty second line makes room.
    figure.suptitle(
        title + ("\n" if subtitle else ""), x=0.01, ha="left", fontsize=12.5, fontweight="bold", wrap=True
    )
    if subtitle:
        figure.text(0.01, 1 - 0.38 / height, subtitle, color=MUTED, fontsize=9.5, va="top")
    return figure, axes


def byte_unit(largest: float) -> tuple[int, str]:
    """Return size and name of the unit in which to write `largest` bytes."""
    return next((size, name) for size, name in _UNITS if largest >= size or size == 1)


def legend_above(axes: Axes, columns: int = 4) -> None:
    """Draw the legend above the plot, where it covers no data."""
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, borderaxespad=0.3, handletextpad=0.5)


def number_depth(axes: Axes) -> None:
    """Number the layers on the horizontal axis."""
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=12))
    axes.set_xlabel("layer, by its number in the layer table")
    axes.margins(x=0.01)


def short_names(names: Iterable[str], longest: int) -> list[str]:
    """Shorten layer names to `longest` characters, first by the module prefix that they have in common."""
    names = list(names)
    prefix = _common_modules([name for name in names if not name.startswith(("loss.", "("))])
    return [escaped(shorten(name.removeprefix(prefix), longest)) for name in names]


def escaped(text: str) -> str:
    """Return `text` as matplotlib draws it literally: a dollar sign would begin a formula."""
    return text.replace("$", r"\$")


def _common_modules(names: list[str]) -> str:
    parts = [name.split(".")[:-1] for name in names]
    shared = [level[0] for level in takewhile(lambda level: len(set(level)) == 1, zip(*parts, strict=False))]
    return ".".join([*shared, ""]) if shared and len(names) > 1 else ""


def change(before: float, after: float) -> str:
    """Return text such as `5.71 GB → 2.10 GB (−63 %)`; one number if nothing changes."""
    if before == after:
        return format_bytes(before)
    share = f" ({100 * (after / before - 1):+.0f} %)".replace("-", "−") if before else ""
    return f"{format_bytes(before)} → {format_bytes(after)}{share}"
