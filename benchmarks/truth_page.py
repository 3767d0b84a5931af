"""Write docs/truth.md: predicted bytes beside measured ones, from the results of `truth.py`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mesa_tune.free_memory import CPU_ALLOWANCE, CPU_MARGIN

PAGE = Path(__file__).resolve().parents[1] / "docs" / "truth.md"
METERS = ("saved", "peak", "resident")
PROCESS = 4 * 10**6
"""Allowance for what grows with no tensor: objects of Python, ends of pages, buffers of libraries."""
UNDER = {"saved": -0.003, "peak": -0.003, "resident": -0.03}
"""How far under the measured bytes a prediction may be, as asked."""

HEAD = """\
# Predicted bytes beside measured ones

`python benchmarks/truth.py` measures it; `python benchmarks/truth.py --docs` writes this page.

* Each row is one kind of training step of a model, under several policies: plain, uniform 16 and 4 levels,
  and random ones. One profile of bytes predicts them all; each is measured in a process of its own, in the
  second step of a plain training loop that shares no code with mesa-tune.
* **saved**, **peak**: predicted over live storages, after the forward and at the step's peak (that of tensors
  alone: `tensor_bytes` of the estimate). **resident**: `peak_bytes` and `library_bytes` of the `Prediction`
  and 4 MB over the growth of the process. The 4 MB are an allowance for Python's objects and what libraries
  keep besides, 2 to 7 MB in every model.
  Each column shows the lowest and the highest of all policies, as deviation from what was measured.
* **MB**: the measured peak of live storages, plain and under uniform 16. **code**: a hash of the sources that
  predictions and steps depend on.
"""


def write(units: Sequence[Mapping[str, Any]], code: str) -> Path:
    """Write the page from `units`, oldest first; `code`: that of the sources now. Return its path."""
    PAGE.write_text(page(units, code), encoding="utf-8")
    return PAGE


def page(units: Sequence[Mapping[str, Any]], code: str) -> str:
    """Return the page of the latest unit of each model and variant."""
    latest = {(unit["model"], unit["variant"]): unit for unit in units}
    rows = [_measurements(unit) for unit in latest.values()]
    columns = ("model", "step", "policies", "MB", *METERS, "code")
    table = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    table += [
        "| " + " | ".join([*_row(*name, found), latest[name]["code"]]) + " |"
        for name, found in zip(latest, rows, strict=True)
    ]
    old = sum(unit["code"] != code for unit in latest.values())
    state = [f"* {old} of {len(latest)} rows are of earlier code than `{code}`."] if old else []
    every = [row for found in rows for row in found]
    return "\n".join([HEAD, *summary(every), *state, "", *table, *_errors(every), ""])


def _measurements(unit: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {"model": unit["model"], "variant": unit["variant"], "policy": policy, **values}
        for policy, values in unit["policies"].items()
    ]


def _row(model: str, variant: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    measured = {row["policy"]: row["measured"]["peak"] for row in rows if "error" not in row}
    sizes = [f"{measured[name] / 1e6:.0f}" for name in ("plain", "uniform 16") if name in measured]
    return [model, variant, str(len(measured)), " → ".join(sizes), *(_range(rows, meter) for meter in METERS)]


def _range(rows: Iterable[Mapping[str, Any]], meter: str) -> str:
    found = sorted(deviation(row, meter) for row in rows if "error" not in row)
    return f"{found[0]:+.2%} … {found[-1]:+.2%}" if found else "–"


def deviation(row: Mapping[str, Any], meter: str) -> float:
    """Return predicted over measured bytes, minus one."""
    allowance = PROCESS if meter == "resident" else 0
    deviation: float = (row["predicted"][meter] + allowance) / row["measured"][meter] - 1
    return deviation


def summary(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return lines on how many of `rows` are within the limits."""
    good = [row for row in rows if "error" not in row]
    lines: list[str] = []
    for meter, within in (("saved", 0.01), ("peak", 0.01), ("resident", 0.05)):
        found = [deviation(row, meter) for row in good]
        inside = sum(abs(value) <= within for value in found)
        low = sum(value < UNDER[meter] for value in found)
        lines.append(
            f"* {meter}: {inside} of {len(found)} predictions within {within:.0%}, {low} more than "
            f"{-UNDER[meter]:.1%} under."
        )
    over = sum(_exceeds(row) for row in good)
    lines.append(
        f"* {over} of {len(good)} steps ({over / max(1, len(good)):.1%}) would have run out of memory: their "
        f"resident growth was above that prediction with a margin of {CPU_MARGIN:.0%} and "
        f"{CPU_ALLOWANCE // 10**6} MB, as in `mt.estimate`."
    )
    return lines


def _exceeds(row: Mapping[str, Any]) -> bool:
    limit: float = row["predicted"]["resident"] * (1 + CPU_MARGIN) + CPU_ALLOWANCE
    measured: int = row["measured"]["resident"]
    return measured > limit


def _errors(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    failed = dict.fromkeys(
        f"* {row['model']}, {row['variant']}: {row['error']}" for row in rows if "error" in row
    )
    return ["", "## Not measured", "", *failed] if failed else []
