"""Parts of a page: the templates, figures as SVG and PNG, and their data as links.

What is hard: matplotlib writes fixed colours and ids into its SVG. Here colours become the page's CSS
variables, and ids get a prefix, so that several figures fit on one page.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from mesa_tune.reports import style
from mesa_tune.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Colours that the page's style sheet redefines for dark screens.
_VARIABLES = {
    style.INK: "var(--ink)",
    style.MUTED: "var(--muted)",
    style.GRID: "var(--grid)",
    style.SHEET: "var(--sheet)",
    style.BEFORE: "var(--before)",
    style.AFTER: "var(--after)",
    style.BUDGET: "var(--budget)",
    style.CHOSEN: "var(--chosen)",
}


def render_page(template: str, values: Mapping[str, Any]) -> str:
    """Return the page that `template` makes of `values`; texts are escaped."""
    environment = Environment(
        loader=PackageLoader("mesa_tune.reports", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"code": _code, "bytes": format_bytes}
    return environment.get_template(template).render(values)


def figure_parts(name: str, drawing: str, frame: pd.DataFrame, caption: str = "") -> dict[str, Any]:
    """Return what the templates show of a figure: `name, title, svg, csv, caption`.

    `drawing`: the figure as an SVG file.
    """
    return {
        "name": name,
        "title": name.replace("_", " "),
        "svg": Markup(inline_svg(drawing, name)),
        "csv": csv_link(frame),
        "caption": caption,
    }


def csv_link(frame: pd.DataFrame) -> str:
    """Return the address of a link that contains the table as CSV."""
    return f"data:text/csv;base64,{base64.b64encode(frame.to_csv(index=False).encode()).decode()}"


def inline_svg(drawing: str, name: str) -> str:
    """Return an SVG file as part of a page: its ids begin with `name`, its colours are CSS variables."""
    text = drawing[drawing.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text)
    text = re.sub(r' (width|height)="[\d.]+pt"', "", text, count=2)
    for color, variable in _VARIABLES.items():
        text = text.replace(color, variable)
    label = name.replace("_", " ")
    return text.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)


def svg(figure: Figure) -> str:
    """Return the figure as an SVG file on white."""
    buffer = io.StringIO()
    with style.styled():
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None}, facecolor="white")
    return buffer.getvalue()


def png(figure: Figure) -> bytes:
    """Return the figure as a PNG file on white."""
    buffer = io.BytesIO()
    with style.styled():
        figure.savefig(buffer, format="png", facecolor="white", metadata={"Software": None})
    return buffer.getvalue()


def _code(text: str) -> Markup:
    """Escape `text`, and mark what is between backticks as code."""
    return Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", str(escape(text))))
