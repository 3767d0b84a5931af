"""Generator of docs/operators.md: results of the sweep over PyTorch's operators and modules.

    make sweep                      # results of every case in build/sweeps/operators.jsonl
    python -m docs.operators        # in the project's root: condenses them, and writes the page

The condensed results, one line of JSON per operator, are part of the repository (`operators.jsonl`). The page
is made from them alone, and the tests choose their cases from them.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.sweeps.runner import BROKEN, ILL_POSED, RIGHT, ROOT, SKIPPED, Line, Results

PAGE = Path(__file__).with_name("operators.md")
CONDENSED = Path(__file__).with_name("operators.jsonl")
VARIANTS = ("sampled", "scaled", "masked", "compiled")
HEAD = """\
# PyTorch's operators and modules

Every operator and module of PyTorch's own test databases that has a gradient, with its sample inputs, plain
beside converted at levels 256 and 16, however small the tensors are. Right means: the forward is bitwise
plain's, no error is raised, gradients are finite wherever plain's are, unbiased, and near plain's: within a
bound that follows from the level, or as near as the plain operator's with its inputs rounded to as many bits.

* sampled: as PyTorch's own tests call it
* scaled: the rows of every input scaled from 0.001 to 1000
* masked: some elements of every input at -Inf
* compiled: the largest sample under `torch.compile`
* ill-posed: the error is large for a reason that the case brings along; the reasons are below
* skipped: PyTorch itself raises there, has no finite gradient, or another result in each run

Made by `make sweep` and `python -m docs.operators` with torch {torch}.
"""
FEWER = """
## Stored in fewer bits

Bytes saved for backward at level 16 in percent of PyTorch's, on the small samples of the database, where
scales weigh much; the largest gradient error of a sample (‖ĝ − g‖² / ‖g‖²) at levels 256 and 16; the tags in
policies of the calls inside.

"""
LOSSLESS = "Fewer bytes, nothing lossy"
EXACT = "Exact, because no formula is known"
NOTHING = "PyTorch saves nothing of its own"


@dataclass(frozen=True)
class OperatorRow:
    """One operator or module: by variant the result, and the cause if the result is not right."""

    name: str
    results: dict[str, tuple[str, str]]
    samples: int = 0
    plain_bytes: int = 0
    bytes: int = 0
    error_256: float | None = None
    error_16: float | None = None
    tags: Sequence[str] = ()

    @property
    def is_lossy(self) -> bool:
        return bool(self.error_256 or self.error_16)


@dataclass(frozen=True)
class Content:
    """Content of the page."""

    torch: str
    not_differentiable: list[str]
    rows: list[OperatorRow]


def condensed(lines: Iterable[Line], torch: str, not_differentiable: Iterable[str]) -> Content:
    """Return the page's content from the results of a sweep."""
    by_name: dict[str, dict[str, Line]] = {}
    for line in lines:
        by_name.setdefault(line.name, {})[line.variant] = line
    rows = [_row(name, results) for name, results in sorted(by_name.items()) if len(results) == len(VARIANTS)]
    return Content(torch, sorted(not_differentiable), rows)


def _row(name: str, lines: dict[str, Line]) -> OperatorRow:
    figures = dict(lines["sampled"].figures)
    results = {variant: (lines[variant].result, lines[variant].cause) for variant in VARIANTS}
    figures.pop("faults", None)
    for error in ("error_256", "error_16"):
        if error in figures:
            figures[error] = float(f"{figures[error]:.1e}")
    return OperatorRow(name, results, **figures)


def write(content: Content) -> None:
    """Write the condensed results."""
    head = {"torch": content.torch, "not_differentiable": content.not_differentiable}
    rows = [asdict(row) for row in content.rows]
    CONDENSED.write_text("".join(json.dumps(line) + "\n" for line in [head, *rows]), "utf-8")


def read() -> Content:
    """Read the condensed results of the repository."""
    head, *rows = map(json.loads, CONDENSED.read_text("utf-8").splitlines())
    return Content(**head, rows=[_read(row) for row in rows])


def _read(row: dict[str, Any]) -> OperatorRow:
    row["results"] = {variant: (result, cause) for variant, (result, cause) in row["results"].items()}
    return OperatorRow(**row)


def page(content: Content) -> str:
    """Return the whole page."""
    rows = [row for row in content.rows if row.results["sampled"][0] != SKIPPED]
    lossy = [row for row in rows if row.is_lossy]
    exact = [row for row in rows if not row.is_lossy]
    parts = [
        HEAD.format(torch=content.torch),
        _counts(content.rows),
        _listed("Broken", content.rows, BROKEN),
        _listed("Ill-posed", content.rows, ILL_POSED),
        FEWER + _table(("", "bytes, %", "error, 256", "error, 16", "tags"), map(_cells, lossy)),
        _section(LOSSLESS, exact, lambda row: row.bytes < row.plain_bytes),
        _section(EXACT, exact, lambda row: 0 < row.plain_bytes <= row.bytes),
        _section(NOTHING, exact, lambda row: row.plain_bytes == 0),
        _skipped(content.rows),
        f"\n## Not differentiable\n\n{_names(content.not_differentiable)}\n",
    ]
    return "".join(parts)


def _counts(rows: Sequence[OperatorRow]) -> str:
    kinds = (RIGHT, BROKEN, ILL_POSED, SKIPPED)
    counts = Counter((variant, _kind(row, variant)) for row in rows for variant in VARIANTS)
    cells = ([variant, *(str(counts[variant, kind]) for kind in kinds)] for variant in VARIANTS)
    return "\n" + _table(("", *kinds), cells)


def _kind(row: OperatorRow, variant: str) -> str:
    result, _ = row.results[variant]
    return result if result in (RIGHT, ILL_POSED, SKIPPED) else BROKEN


def _listed(title: str, rows: Sequence[OperatorRow], kind: str) -> str:
    cells = [
        [f"`{row.name}`", variant, cause or result]
        for row in rows
        for variant, (result, cause) in row.results.items()
        if _kind(row, variant) == kind
    ]
    table = _table(("", "variant", "cause"), cells) if cells else "nothing\n"
    return f"\n## {title}\n\n{table}"


def _cells(row: OperatorRow) -> list[str]:
    share = f"{100 * row.bytes / row.plain_bytes:.0f}" if row.plain_bytes else ""
    return [f"`{row.name}`", share, _error(row.error_256), _error(row.error_16), ", ".join(row.tags)]


def _error(error: float | None) -> str:
    return "" if error is None else f"{error:.1g}"


def _section(title: str, rows: Sequence[OperatorRow], wanted: Callable[[OperatorRow], bool]) -> str:
    return f"\n## {title}\n\n{_names(row.name for row in rows if wanted(row))}\n"


def _skipped(rows: Sequence[OperatorRow]) -> str:
    causes: dict[str, list[str]] = {}
    for row in rows:
        result, cause = row.results["sampled"]
        if result == SKIPPED:
            causes.setdefault(cause, []).append(row.name)
    lines = [f"* {cause}: {_names(names)}\n" for cause, names in causes.items()]
    return "\n## Nothing to compare with\n\n" + "".join(lines)


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "none"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    """Condense the last sweep, and write the page."""
    import torch

    from benchmarks.sweeps.databases import without_gradient

    results = Results(ROOT / "build" / "sweeps" / "operators.jsonl")
    version = str(torch.__version__).partition("+")[0]
    write(condensed(results.lines(), version, without_gradient()))
    PAGE.write_text(page(read()), encoding="utf-8")


if __name__ == "__main__":
    main()
