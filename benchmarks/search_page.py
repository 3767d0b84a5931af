"""Write docs/rivals.md from the results of `search.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import RESULTS, json_lines

from mesa_tune.search.objectives import to_same_result

PAGE = Path(__file__).resolve().parents[1] / "docs" / "rivals.md"
OF_SUMS = 0.1
"""The limit on the noise ratio of lines without one of their own: theirs is of all parameters together."""
FITS = 1.01
"""A rival that is up to this factor above the searched plan's limit still counts as fitting."""
COLUMNS = ("way", "peak MB", "of plain", "noise ratio", "step", "over searched")

Line = Mapping[str, Any]
HEAD = """\
# Searched plans beside what users do by hand

`python benchmarks/search.py` measures it; `python benchmarks/search.py --docs` writes this page.

* Each model is trained for 60 steps on real data, then profiled. Limits on the peak, with the workspaces of
  kernels: **midway** between plain and checkpointing every block, that of **checkpointing**, and the
  **least** that a rival reaches within the predicted noise ratio. **smallest**: no limit; the plan is
  that of `--smallest`, within a slowdown of 1.5.
* **solved**: the exact solver's plan; **searched**: a study's, of 100 trials or as long as the command says
  (120 s without `--timeout`). Both ask for the least time to the same result, step × (1 + 8 × noise ratio),
  within the default limit on the ratio, 0.005.
* A rival is better if its measured step × (1 + 8 × its measured noise ratio) is lower.
* Tables marked *sums* are older: their noise ratios are of all parameters together, the sum of squared errors
  over the sum of variances, where now each parameter's own noise counts ([concepts.md](concepts.md)). Plans
  there asked for the fastest step within 0.08 of such a ratio, and a rival is better if its step is faster.
* Rivals: `torch.utils.checkpoint` around every block or as few as fit, or keeping the results of matrix
  products; uniform bits; bits by layer, reduced where an error per byte is least: measured errors, as GACT
  does, or those at 4 bits by the law of quantization noise, as ActNN does; blocks checkpointed with inputs of
  4 bits, and 4 bits elsewhere.
* **peak**: most live bytes of a step, measured. **noise ratio**: measured on unseen batches by separate
  code. **step**: time over that of plain steps taken in turn, median and quartiles; **over searched**: over
  that of the searched plan. What is above the limit or the ratio (0.005; 0.1 of sums) is in brackets: it is
  no answer.
* **activations**: what the peak, with workspaces (predicted), takes beyond weights, gradients, optimizer
  state and batch. **No policy has less**: the solver's bound without limits on noise and time.
"""


def write() -> Path:
    """Write the page from the latest results of each model and limit; return its path."""
    lines = {(line["model"], line["cell"]): line for line in json_lines(RESULTS / "search.jsonl")}
    PAGE.write_text(page(list(lines.values())), encoding="utf-8")
    return PAGE


def page(lines: Sequence[Line]) -> str:
    """Return the page of `lines`: one for each model and limit, and forwards without gradients."""
    forwards = {line["model"]: line["bytes"] for line in lines if line["cell"] == "forward"}
    lines = [line for line in lines if line["cell"] != "forward"]
    parts = [HEAD, *_summary(lines, forwards)]
    for line in lines:
        limit = "" if line["limit"] is None else f", {line['limit'] / 1e6:.1f} MB"
        marked = "" if _has_own(line) else " (*sums*)"
        parts.append(f"\n## {line['title']}, batch {line['batch size']}: {line['cell']}{limit}{marked}\n\n")
        parts.append(_table(line))
        parts.append(f"\nThe study: {line['won']}. {_bound(line)} `{line['command']}`\n")
    return "".join(parts)


def faster(line: Line) -> list[str]:
    """Return the rivals that fit and are better than the searched plan, beyond the quartiles of the step."""
    ours = _longer(line, line["rows"]["searched"])
    return [name for name, row in _answers(line).items() if row["of searched"][2] * _longer(line, row) < ours]


def _has_own(line: Line) -> bool:
    """Return whether the noise ratios of a line are the parameters' own."""
    return "max noise ratio" in line


def _longer(line: Line, row: Mapping[str, Any]) -> float:
    """Return by what factor the noise makes a step count as longer."""
    return to_same_result(1.0, row["noise ratio"]) if _has_own(line) else 1.0


def _answers(line: Line) -> dict[str, Any]:
    """Return the rows of rivals within the limit and the noise ratio."""
    return {
        name: row
        for name, row in line["rows"].items()
        if name not in ("plain", "solved", "searched") and _is_answer(line, row)
    }


def _is_answer(line: Line, row: Mapping[str, Any]) -> bool:
    highest = max(line["limit"] or 0, line["rows"]["searched"]["peak"])
    fits = line["limit"] is None or row["peak"] <= FITS * highest
    return fits and row["noise ratio"] <= line.get("max noise ratio", OF_SUMS)


def _summary(lines: Sequence[Line], forwards: Mapping[str, int]) -> list[str]:
    limited = [line for line in lines if line["limit"] is not None]
    beaten = {
        f"{line['title']}, {line['cell']}: {', '.join(names)}" for line in limited if (names := faster(line))
    }
    parts = [f"\n* In {len(limited) - len(beaten)} of {len(limited)} cells no rival that fits is better.\n"]
    parts += [f"  Better: {one}.\n" for one in sorted(beaten)]
    for line in lines:
        if line["limit"] is None and "static with gradients" in line:
            own = _activations(line, line["rows"]["searched"])
            best, name = min((_activations(line, row), name) for name, row in _answers(line).items())
            least = (line["floor"] - line["static with gradients"]) / best
            text = f"{own / best:.2f} of the best rival's activations ({name}); no policy has less than "
            text += f"{least:.2f}"
            if (forward := forwards.get(line["model"])) is not None:
                text += f", a forward without gradients {forward / best:.2f}"
            parts.append(f"* {line['title']}, batch {line['batch size']}, smallest: {text}.\n")
    return parts


def _activations(line: Line, row: Mapping[str, Any]) -> int:
    """Return what the peak, with workspaces, takes beyond weights, gradients, optimizer state and batch."""
    return int(row["with workspaces"] - line["static with gradients"])


def _table(line: Line) -> str:
    rows = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    plain = line["rows"]["plain"]["peak"]
    for name, row in line["rows"].items():
        own = name in ("plain", "solved", "searched")
        title = f"**{name}**" if own else name
        title = title if name == "plain" or _is_answer(line, row) else f"({title})"
        cells = (
            title,
            f"{row['peak'] / 1e6:.1f}",
            f"{row['peak'] / plain:.0%}",
            f"{row['noise ratio']:.1e}" if row["noise ratio"] else "0",
            _spread(row["step"]),
            _spread(row["of searched"]),
        )
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def _spread(values: Sequence[float]) -> str:
    middle, low, high = values
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def _bound(line: Line) -> str:
    """Return what was proven of the solved plan, by the profile's prices of single layers."""
    best = "peak" if line["limit"] is None else "added time, of which error is up to 2% of a step,"
    predicted = line["predicted ms"][0] / line["plain ms"]
    return (
        f"By prices of single layers, the solved plan's step takes {predicted:.3f} times plain's, "
        f"and its {best} is at most {line['gap']:.2%} above the least of any plan."
    )
