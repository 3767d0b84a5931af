"""Several runs side by side: a table, and a page with their first sentences and memory figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from mesa_tune.reports import frames
from mesa_tune.reports.contents import CAPTIONS, RunResults
from mesa_tune.reports.figures import memory_through_step
from mesa_tune.reports.page import csv_link, figure_parts, render_page, svg
from mesa_tune.reports.sentence import gradient_error, noise_ratio, sentence, step_ratio
from mesa_tune.reports.tables import markdown
from mesa_tune.units import format_bytes, format_error

_HEADER = ("run", "model", "batch", "budget", "plain peak", "peak", "saved", "step time", "gradient error",
           "noise ratio", "source")  # fmt: skip
_TEXTS = {"run", "model", "source"}


def runs_frame(runs: Mapping[str, RunResults]) -> pd.DataFrame:
    """Return one row per run: `run, model, batch_size, budget_bytes, plain_peak_bytes, peak_bytes,
    saved_bytes, step_ratio, gradient_error, noise_ratio, source`.

    Numbers are measured where `source` is `measured` and the quantity is known, else predicted; `plain`: the
    run has no policy. Unknown values are NaN.
    """
    frame = pd.DataFrame([_row(name, results) for name, results in runs.items()])
    return frame.astype(dict.fromkeys(("budget_bytes", "step_ratio", "gradient_error", "noise_ratio"), float))


def _row(name: str, results: RunResults) -> dict[str, Any]:
    plan, plain, verification = results.plan, results.plain, results.verification
    policy = plan.predicted if plan else plain
    measured = verification.policy if verification else None
    baseline = verification.baseline if verification else None
    return {
        "run": name,
        "model": results.title,
        "batch_size": results.batch_size,
        "budget_bytes": results.budget,
        "plain_peak_bytes": (baseline and baseline.peak_bytes) or plain.peak_bytes,
        "peak_bytes": (measured and measured.peak_bytes) or policy.peak_bytes,
        "saved_bytes": (measured and measured.saved_bytes) or policy.saved_bytes,
        "step_ratio": step_ratio(results) if plan else 1.0,
        "gradient_error": gradient_error(results) if plan else 0.0,
        "noise_ratio": noise_ratio(results) if plan else 0.0,
        "source": "plain" if plan is None else "measured" if verification else "predicted",
    }


def runs_markdown(frame: pd.DataFrame) -> str:
    """Return the table of `runs_frame` as Markdown."""
    return markdown(_HEADER, _texts(frame), left=_TEXTS)


def render_comparison(runs: Mapping[str, RunResults], frame: pd.DataFrame) -> str:
    """Return one HTML document: the table `frame` of the runs, and each one's sentence and memory figure."""
    parts = []
    for number, (name, results) in enumerate(runs.items()):
        data = frames.timeline_frame(results.profile, results.assignment, results.batch_size)
        drawing = svg(memory_through_step(data, results.budget))
        drawn = figure_parts(f"memory_through_step_{number}", drawing, data, CAPTIONS["memory_through_step"])
        parts.append({"name": name, "sentence": sentence(results), "figure": drawn})
    return render_page(
        "comparison.html",
        {
            "title": f"{len(runs)} runs",
            "runs": parts,
            "header": _HEADER,
            "left": _TEXTS,
            "rows": _texts(frame),
            "csv": csv_link(frame),
        },
    )


def _texts(frame: pd.DataFrame) -> list[list[str]]:
    return [
        [
            row["run"],
            row["model"],
            str(row["batch_size"]),
            "none" if pd.isna(row["budget_bytes"]) else format_bytes(row["budget_bytes"]),
            format_bytes(row["plain_peak_bytes"]),
            format_bytes(row["peak_bytes"]),
            format_bytes(row["saved_bytes"]),
            "not known" if pd.isna(row["step_ratio"]) else f"{row['step_ratio']:.2f}×",
            format_error(row["gradient_error"]),
            format_error(row["noise_ratio"]),
            row["source"],
        ]
        for row in frame.to_dict("records")
    ]
