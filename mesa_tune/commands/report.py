"""`mesa-tune report`: one page with figures and tables of a run, and the figures as files."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mesa_tune.commands.common import (
    DEFAULT_RUN,
    DebugOption,
    ForceOption,
    JsonOption,
    Origin,
    Output,
    QuietOption,
    Run,
    RunOption,
    digest,
    dump_json,
)
from mesa_tune.commands.guide.state import next_step
from mesa_tune.errors import RunError

if TYPE_CHECKING:
    import pandas as pd

    from mesa_tune.reports.contents import RunResults


class Format(str, Enum):
    """What to write: the page with its figures, the figures alone, or their data."""

    html = "html"
    png = "png"
    csv = "csv"
    json = "json"


FormatOption = Annotated[Format, typer.Option("--format", help="html writes the page and the PNGs.")]


def report(
    form: FormatOption = Format.html,
    run: RunOption = DEFAULT_RUN,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
    force: ForceOption = False,
) -> None:
    """Write report.html and figures of what the run has so far."""
    folder = Run(run, force=force)
    results, notes = load_results(folder)
    output = Output(json=as_json, quiet=quiet)
    output.device(results.profile.device, "of the profile; a report computes on the cpu")
    for note in notes:
        output.warn(note)
    for note in results.missing:
        output.line(note)
    files = _files(folder, results, form)
    # The report is made from whatever files the run has now.
    origin = Origin(digest("report", results.profile.layers_fingerprint), derived=True)
    for path in files:
        folder.check(path, origin)
    for path, content in files.items():
        folder.write(path, content, origin)
        output.line(f"wrote {path}")
    output.line(next_step(folder))
    output.document("report", {"files": [str(path) for path in files], "missing": results.missing})


def load_results(folder: Run) -> tuple[RunResults, list[str]]:
    """Load the results of the run; also return notes on results left out as those of another policy."""
    from mesa_tune.profiler.profile import Profile
    from mesa_tune.profiler.verification import Verification
    from mesa_tune.reports.contents import RunResults
    from mesa_tune.search.plan import Plan

    profile = Profile.load(folder.require(folder.profile, "mesa-tune profile model.py"))
    plan = Plan.load(folder.plan) if folder.plan.is_file() else None
    check = Verification.load(folder.verify) if folder.verify.is_file() else None
    notes = []
    if plan is not None and not plan.policy.header.is_for(profile.layers_fingerprint):
        raise RunError(
            f"{folder.plan}: was made for another model than {folder.profile}\n"
            "search again: `mesa-tune search --budget 40% --force`"
        )
    if check is not None and (plan is None or check.predicted != plan.predicted):
        notes.append(f"{folder.verify} measured another policy than that of {folder.plan}: left out")
        check = None
    return RunResults(profile, plan, check), notes


def _files(folder: Run, results: RunResults, form: Format) -> dict[Path, str | bytes]:
    """Return the content of all files. None is written yet, so an error leaves the run unchanged."""
    from mesa_tune.reports.contents import make_figures, make_frames
    from mesa_tune.reports.html import png, render

    tables = make_frames(results)
    if form is Format.csv:
        return {folder.figures / f"{name}.csv": frame.to_csv(index=False) for name, frame in tables.items()}
    if form is Format.json:
        return {folder.folder / "report.json": dump_json(_document(tables))}
    figures = make_figures(results, tables)
    files: dict[Path, str | bytes] = {}
    if form is Format.html:
        files[folder.report] = render(results, tables, figures)
    return files | {folder.figures / f"{name}.png": png(figure) for name, figure in figures.items()}


def _document(tables: dict[str, pd.DataFrame]) -> dict[str, object]:
    import json

    # pandas writes NaN as null, and numpy's numbers as JSON numbers.
    plain = {name: json.loads(frame.to_json(orient="records")) for name, frame in tables.items()}
    return {"schema": "mesa-tune.report/1", **plain}
