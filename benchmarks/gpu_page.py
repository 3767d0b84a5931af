"""Write docs/gpu.md from the results of `gpu.py`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[1] / "docs" / "gpu.md"
HEAD = """# On a GPU

`make gpu` measures it on one GPU, in 25 minutes and without a network, and goes on where it was ended;
`python benchmarks/gpu.py --docs` writes this page.
"""
NOTHING = "Nothing has run on a GPU yet.\n"


def write(lines: Sequence[Mapping[str, Any]]) -> Path:
    """Write the page from the latest result of each unit on a GPU; return its path."""
    PAGE.write_text(page(lines), "utf-8")
    return PAGE


def page(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the page's text."""
    latest = {line["unit"]: line for line in lines if line["device"] != "cpu" and not line["small"]}
    if not latest:
        return f"{HEAD}\n{NOTHING}"
    return "\n".join([HEAD, *(text for line in latest.values() for text in section(line))])


def section(line: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of text about one unit."""
    yield f"## {line['unit']}\n"
    if "error" in line:
        yield f"{line['error']}\n"
        return
    commit = f"commit {line['commit']}" if line.get("commit") else "commit not noted"
    yield f"{line['date'][:10]}, {line['hardware']['gpu']}, torch {line['versions']['torch']}, {commit}.\n"
    if "note" in line:
        yield f"{line['note']}\n"
    if "summary" in line:
        yield "\n".join([line["summary"], *line["failed"], ""])
    yield from table(line.get("rows", {}))


def table(rows: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of a table with a row for each of `rows`."""
    columns = list(dict.fromkeys(key for row in rows.values() for key in row))
    if columns:
        yield "| | " + " | ".join(column.replace("_", " ") for column in columns) + " |"
        yield "|---|" + "---|" * len(columns)
        for name, row in rows.items():
            yield f"| {name} | " + " | ".join(cell(column, row.get(column)) for column in columns) + " |"
        yield ""


def cell(column: str, value: Any) -> str:
    """Return a value as text: bytes in MB."""
    if value is None:
        return "–"
    if column.endswith(("allocated", "reserved", "peak", "saved")):
        return f"{value / 1e6:,.0f} MB"
    return f"{value:,.3g}" if isinstance(value, float) else str(value)
