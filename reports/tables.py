"""Tables as texts for people: the rows of the layer table, and tables as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mesa_tune.units import format_bytes, format_error

if TYPE_CHECKING:
    import pandas as pd

_WORDS = ("recompute", "tile")
"""Ways to store that the settings of the layer itself do not tell."""

SHARED = "shares a tensor with"
LEGEND = (
    "Stored as: bits per element / elements that share one range. A tensor that several layers save counts "
    "for the first of them."
)


def layer_rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the texts and sort values of the layer table, one dict per layer."""
    rows = []
    for number, layer in enumerate(frame.to_dict("records")):
        cells = {str(column): value for column, value in layer.items()}
        row: dict[str, Any] = {"number": number, **cells, "before_text": format_bytes(layer["before"])}
        row["layer"] = (
            layer["name"] if layer["runs"] == 1 else f"{layer['name']} ({layer['runs']:.0%} of steps)"
        )
        if "after" in layer:
            row["after_text"] = format_bytes(layer["after"])
            row["stored_text"] = layer["stored"] if layer["stored"] in _WORDS else layer["settings"]
            row["error_text"] = format_error(layer["gradient_error"])
            row["share"] = round(100 * layer["after"] / layer["before"]) if layer["before"] else 0
        rows.append(row)
    return rows


def layers_markdown(frame: pd.DataFrame) -> str:
    """Return the layer table (a `layers_frame`) as Markdown."""
    columns = {"number": "#", "layer": "layer", "tag": "tag", "shape": "shape", "before_text": "saved before"}
    if "after" in frame:
        columns |= {"after_text": "saved after", "stored_text": "stored as", "error_text": "gradient error"}
    columns["shared_with"] = SHARED
    rows = [[str(row[column]) for column in columns] for row in layer_rows(frame)]
    left = {"layer", "tag", "shape", "stored as", SHARED}
    return f"{markdown(list(columns.values()), rows, left)}\n{LEGEND}\n"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]], left: set[str]) -> str:
    """Return a table in Markdown; columns are aligned to the right, those of `left` to the left."""
    rules = [":--" if title in left else "--:" for title in header]
    lines = [header, rules, *([_escaped(text) for text in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _escaped(text: str) -> str:
    """Return `text` without meaning in Markdown and HTML."""
    for character in "\\`*_[]|<>":
        text = text.replace(character, f"\\{character}")
    return text
