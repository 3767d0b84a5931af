"""The pages of the sweeps: `docs/operators.md` and `docs/architectures.md`."""

from __future__ import annotations

from typing import Any

from benchmarks.sweeps.runner import BROKEN, RIGHT, SKIPPED, WRONG, Line
from docs import architectures, operators


def _line(name: str, variant: str, result: str, cause: str = "", **figures: Any) -> Line:
    return Line(name, variant, result, cause, 0.1, "", figures)


def test_the_page_of_operators_is_what_the_results_say() -> None:
    assert operators.page(operators.read()) == operators.PAGE.read_text("utf-8")


def test_no_operator_is_broken() -> None:
    rows = operators.read().rows
    assert len(rows) > 600
    assert not [row.name for row in rows if any(result in WRONG for result, _ in row.results.values())]


def test_the_page_of_architectures_counts_types_and_shares() -> None:
    lines = [
        _line("one", "16 plain", RIGHT, head="One", error=0.01),
        _line("one", "profile plain", RIGHT, head="One", no_formula={}, small=0.0),
        _line("two", "16 plain", BROKEN, "raises", head="Two"),
        _line("two", "profile plain", RIGHT, head="Two", no_formula={"prelu": 0.2}, small=0.0),
        _line("three", "16 plain", SKIPPED, "cannot be built"),
    ]
    text = architectures.page(lines)
    assert "2 of 3 model types build; 1 are right in every variant. On 1 of 2 at most 3%" in text
    assert "| one | One | 2 of 2 | 1.0e-02 | 0.0% | — |" in text
    assert "| two | Two | 1 of 2 | — | 20.0% `prelu` | 16 plain: raises |" in text
