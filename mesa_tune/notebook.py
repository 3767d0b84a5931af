"""Small HTML tables that notebooks show for a value: escaped, and readable without a style sheet of ours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

_LEFT = 'style="text-align:left"'
_RIGHT = 'style="text-align:right"'


def shown(title: str, *parts: str) -> str:
    """Return a block with a bold title and HTML `parts` below it."""
    return f"<div><b>{escape(title)}</b>{''.join(parts)}</div>"


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> str:
    """Return a table. The first `left` columns are aligned to the left, the others to the right."""
    lines = [_line("th", header, left), *(_line("td", row, left) for row in rows)]
    return f"<table>{''.join(lines)}</table>"


def note(text: str) -> str:
    """Return a line of small text; empty for an empty one."""
    return f"<div><small>{escape(text)}</small></div>" if text else ""


def _line(tag: str, cells: Sequence[str], left: int) -> str:
    styles = (_LEFT if column < left else _RIGHT for column in range(len(cells)))
    parts = [f"<{tag} {style}>{escape(text)}</{tag}>" for style, text in zip(styles, cells, strict=True)]
    return f"<tr>{''.join(parts)}</tr>"
