"""Budgets as typed: one, several, `auto`, or none."""

from __future__ import annotations

import re

from mesa_tune.errors import BudgetError
from mesa_tune.free_memory import AUTO, MARGIN, free_memory
from mesa_tune.units import format_bytes, parse_bytes


def split_budgets(text: str | None, device: str, smallest: bool) -> tuple[list[str | None], list[str]]:
    """Return the budgets in `text`, and lines that say how `auto` was found. None: no budget.

    Raise BudgetError for none without `smallest`, and for what is not an amount.
    """
    if text is None:
        if not smallest:
            raise BudgetError("no budget\ngive --budget 6GB (or 40%, auto, 4GB,6GB), or --smallest")
        return [None], []
    budgets: list[str | None] = []
    lines: list[str] = []
    for word in (part.strip() for part in text.split(",")):
        budget = word
        if word == AUTO:
            free, what = free_memory(device)
            lines.append(f"budget auto: {format_bytes(free)} {what}, less {MARGIN:.0%}")
            budget = str(int(free * (1 - MARGIN)))
        parse_bytes(budget)
        budgets.append(budget)
    return list(dict.fromkeys(budgets)), lines


def label_of(budget: str | None) -> str:
    """Return a budget as a part of a file name."""
    return re.sub(r"[^0-9A-Za-z.%]", "", budget or "smallest").replace("%", "percent")
