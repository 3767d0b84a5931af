"""Write docs/steps.md, and its plot of memory against time, from the latest results of `step.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
from common import RESULTS, json_lines

DOCS = Path(__file__).resolve().parents[1] / "docs"
HEAD = """# Steps

Time and memory of a training step, in comparison with other methods. `python benchmarks/step.py` measures
them; `python benchmarks/step.py --docs` writes this page.

* Each round runs one step of each kind. **time** is the median of the ratios to the plain step of the same
  round, with the quartiles (middle half). **saved** and **peak** are bytes of live storages, in % of the
  plain step.
* `uniform 16` stores everything in 4 bits. With `attention exact` attention saves what PyTorch saves;
otherwise
  its softmax is computed again in backward. `checkpoint per block` is `torch.utils.checkpoint` (not
  reentrant) around each block. `save_on_cpu` is that of `torch.autograd.graph`; on a CPU it copies, and frees
  nothing.
* **asked** is the largest acceptable time of `uniform 16`.

![Peak memory against time](steps.png)
"""
MARKERS = "osD^v"


def latest() -> list[dict[str, Any]]:
    """Return the last result of every subject."""
    return list({result["subject"]: result for result in json_lines(RESULTS / "step.jsonl")}.values())


def write() -> Path:
    """Write the page and the plot; return the page's path."""
    results = latest()
    plot(results, DOCS / "steps.png")
    path = DOCS / "steps.md"
    path.write_text("\n".join([HEAD, *(section(result) for result in results)]), "utf-8")
    return path


def section(result: dict[str, Any]) -> str:
    """Return one subject's table, and the operations that take the added time."""
    machine = f"{result['hardware']['cpu']}, {result['hardware']['threads']} threads"
    torch_version = result["versions"]["torch"]
    lines = [
        f"## {result['subject']}",
        "",
        f"{result['date'][:10]}, {machine}, torch {torch_version}, fp32.",
        "",
        "| kind | time | middle half | asked | saved | peak |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    plain = result["rows"]["plain"]
    for kind, row in result["rows"].items():
        ratio = row["step_ratio"]
        asked = f"{result['asked']:.2f}" if kind == "uniform 16" else ""
        saved, peak = (row[key] / plain[key] for key in ("saved_bytes", "peak_bytes"))
        lines.append(
            f"| {kind} | {ratio['median']:.2f} | {ratio['low']:.2f} to {ratio['high']:.2f} | {asked} "
            f"| {saved:.0%} | {peak:.0%} |"
        )
    if result.get("where"):
        lines += ["", "Milliseconds per step by operation, from plain to uniform 16:", "", "```"]
        lines += [result["where"], "```"]
    return "\n".join([*lines, ""])


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Plot peak bytes against time, relative to plain; the colour is the kind, the marker the subject."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for marker, result in zip(MARKERS, results, strict=False):
        plain = result["rows"]["plain"]["peak_bytes"]
        for number, (kind, row) in enumerate(result["rows"].items()):
            axes.scatter(
                row["peak_bytes"] / plain,
                row["step_ratio"]["median"],
                color=f"C{number}",
                marker=marker,
                label=kind if result is results[0] else None,
            )
        axes.scatter([], [], color="grey", marker=marker, label=result["subject"])
    axes.set(xlabel="peak of the step (plain = 1)", ylabel="time of the step (plain = 1)", xlim=(0, None))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)
