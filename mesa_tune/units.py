"""Text for people from and to numbers: bytes, times, budgets; layer names and sentences that fit a line."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from mesa_tune.errors import BudgetError

_DECIMAL = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_BINARY = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_UNITS = {"": 1} | _DECIMAL | _BINARY
_AMOUNT = re.compile(r"\s*([+-]?[0-9][0-9_]*(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)\s*(%|[A-Za-z]*)\s*")
_REMEDY = "write it like 6GB (6·10⁹ bytes), 6GiB (6·2³⁰), 40% (of the plain step's) or 6000000000"
_LEAST_BARE = 1000
"""No step takes fewer bytes: a smaller number without a unit has forgotten it."""


@dataclass(frozen=True, slots=True)
class Budget:
    """A memory limit: either `bytes` (int >= 1) or a `fraction` (> 0) of the baseline peak."""

    text: str
    bytes: int | None = None
    fraction: float | None = None

    def of(self, baseline_peak: int) -> int:
        """Return the limit in bytes, for a plain training step whose peak is `baseline_peak` bytes."""
        if self.bytes is not None:
            return self.bytes
        assert self.fraction is not None
        return int(self.fraction * baseline_peak)


def parse_bytes(text: str | int | float, name: str = "budget", least_bare: int = _LEAST_BARE) -> Budget:
    """Parse a budget (or another limit called `name`): `6GB`, `6GiB`, `40%` or a number of bytes.

    Raise BudgetError if it is not a number, has an unknown unit, is not above zero, or is a number below
    `least_bare` without a unit.
    """
    match = _AMOUNT.fullmatch(str(text))
    if match is None:
        raise BudgetError(f"{name} {text!r}: not an amount of memory\n{_REMEDY}")
    amount, unit = float(match[1]), match[2].lower()
    if unit == "%":
        _require_positive(name, text, amount)
        return Budget(str(text), fraction=amount / 100)
    if unit not in _UNITS:
        raise BudgetError(f"{name} {text!r}: unknown unit {match[2]!r}\n{_REMEDY}")
    _require_positive(name, text, amount * _UNITS[unit])
    if not unit and amount < least_bare:
        meant = _meant(amount, shares=name == "budget")
        raise BudgetError(f"{name} {text!r}: without a unit it is in bytes\nwrite it like {meant}")
    return Budget(str(text), bytes=max(1, round(amount * _UNITS[unit])))


def _require_positive(name: str, text: str | int | float, amount: float) -> None:
    if not (math.isfinite(amount) and amount > 0):
        raise BudgetError(f"{name} {text!r}: must be above zero\n{_REMEDY}")


def _meant(amount: float, *, shares: bool) -> str:
    """Return what a number without a unit may stand for: `6GB`; with `shares`, also `60%` for 0.6 and 60."""
    gigabytes = f"{amount:g}GB" if amount >= 1 else "6GB"
    percent = 100 * amount if amount <= 1 else amount
    return f"{gigabytes} or {percent:g}%" if shares and percent <= 100 else gigabytes


def format_bytes(count: float) -> str:
    """Return `count` bytes in decimal units with three significant digits: `5.71 GB`, `812 kB`, `17 B`."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if abs(count) >= 0.9995 * size:
            return f"{_three_digits(count / size)} {unit}"
    return f"{count:.0f} B"


def format_time(seconds: float) -> str:
    """Return a duration as text: `812 µs`, `41.2 ms`, `9.87 s`, `3 min 20 s`, `2 h 05 min`."""
    if seconds >= 3600 - 30:
        hours, minutes = divmod(round(seconds / 60), 60)
        return f"{hours} h {minutes:02d} min"
    if seconds >= 99.95:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest:02d} s"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.9995 * size:
            return f"{_three_digits(seconds / size)} {unit}"
    return f"{_three_digits(seconds * 1e6)} µs"


def format_error(error: float | None) -> str:
    """Return a gradient error or a noise ratio as text: `3.1e-04`, `0`, `not known` for None and NaN."""
    if error is None or math.isnan(error):
        return "not known"
    return f"{error:.1e}" if error else "0"


def counted(number: int, noun: str) -> str:
    """Return `1 trial`, `2 trials`, `2 batches`."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{plural}"


def shorten(name: str, longest: int, head: float = 1 / 3) -> str:
    """Cut the middle of `name` to leave `longest` characters, of which `head` is the share before the cut."""
    if len(name) <= longest:
        return name
    before = int(longest * head)
    return name[:before] + "…" + name[len(name) - (longest - before - 1) :]


def shorten_apart(names: Sequence[str], longest: int) -> list[str]:
    """Cut the middle of each name to leave `longest` characters, where that tells most names apart."""
    cuts = [[shorten(name, longest, head) for name in names] for head in (1 / 3, 1 / 2, 2 / 3)]
    return max(cuts, key=lambda cut: len(set(cut)))


def unbroken(text: str) -> str:
    """Return `text` in which no line ends between a number and its unit: the space there is no-break."""
    return re.sub(r"(?<=\d) (?=%|[kMGT]?B\b)", "\N{NO-BREAK SPACE}", text)


def wrapped(text: str, indent: int, *, first: str = "") -> list[str]:
    """Return `first` and `text` in lines of at most 80 characters; all but the first line are indented.

    Numbers and their units stay together, and so do words with hyphens.
    """
    lines = textwrap.wrap(
        unbroken(text), 80, initial_indent=first, subsequent_indent=indent * " ", break_on_hyphens=False
    )
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]], width: int = 80) -> list[str]:
    """Return the lines of a table: the first column aligned to the left, the others to the right.

    Where a line would be longer than `width` characters, the middle of the first column's text is cut.
    """
    table = [list(header), *map(list, rows)]
    others = sum(2 + max(len(row[column]) for row in table) for column in range(1, len(header)))
    names = shorten_apart([row[0] for row in table], max(width - others, 9))
    table = [[name, *row[1:]] for name, row in zip(names, table, strict=True)]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    return [_aligned(row, widths) for row in table]


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = zip(row, widths, strict=True)
    cells = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
    return "  ".join(cells).rstrip()


def _three_digits(value: float) -> str:
    return f"{value:#.3g}".rstrip(".") if abs(value) < 999.5 else f"{value:.0f}"
