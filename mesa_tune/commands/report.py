"""`mesa-tune report`: one page with figures and tables of a run or several, and the same as files."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
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
from mesa_tune.files import schema

if TYPE_CHECKING:
    import pandas as pd

    from mesa_tune.reports.contents import RunResults


class Format(str, Enum):
    """What to write: the page with its figures, the figures alone, tables, or all data."""

    html = "html"
    png = "png"
    svg = "svg"
    csv = "csv"
    md = "md"
    json = "json"
    snapshot = "snapshot"


_FORMATS = (
    "html: the page, and the figures as PNG and SVG. csv: all tables. md: the layer table. "
    "snapshot: the step for PyTorch's memory viewer."
)
FormatOption = Annotated[Format, typer.Option("--format", help=_FORMATS)]
RunsArgument = Annotated[
    list[Path] | None, typer.Argument(metavar="RUN", help="Run folders; several make one page.")
]


def report(
    runs: RunsArgument = None,
    form: FormatOption = Format.html,
    run: RunOption = DEFAULT_RUN,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
    force: ForceOption = False,
) -> None:
    """Write a page and figures of a run, or one page of several runs."""
    folders = [Run(path, force=force) for path in dict.fromkeys(runs or [run])]
    output = Output(json=as_json, quiet=quiet)
    loaded = [load_results(folder) for folder in folders]
    output.device(loaded[0][0].profile.device, "of the profile; a report computes on the cpu")
    found = {str(folder.folder): results for folder, (results, _) in zip(folders, loaded, strict=True)}
    for name, (results, notes) in zip(found, loaded, strict=True):
        for note in notes:
            output.warn(note)
        for note in results.missing:
            output.line(note if len(found) == 1 else f"{name}: {note}")
    files = _files(folders[0], loaded[0][0], form) if len(found) == 1 else _compared(folders[0], found, form)
    # The report is made from whatever files the runs have now.
    origin = Origin(digest("report", loaded[0][0].profile.layers_fingerprint), derived=True)
    for path in files:
        folders[0].check(path, origin)
    for path, content in files.items():
        folders[0].write(path, content, origin)
        output.line(f"wrote {path}")
    output.line(next_step(folders[0]))
    missing = [note for results in found.values() for note in results.missing]
    output.document("report", {"files": [str(path) for path in files], "missing": missing})


def load_results(folder: Run) -> tuple[RunResults, list[str]]:
    """Load the results of the run; also return notes on results left out as those of another policy."""
    from mesa_tune.profiles.profile import Profile
    from mesa_tune.profiles.verification import Verification
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
    made = {
        path.name: made
        for path in (folder.profile, folder.plan, folder.verify)
        if (made := folder.made(path))
    }
    return RunResults(profile, plan, check, made), notes


def _files(folder: Run, results: RunResults, form: Format) -> dict[Path, str | bytes]:
    """Return the content of all files. None is written yet, so an error leaves the run unchanged."""
    from mesa_tune.reports.contents import make_figures, make_frames
    from mesa_tune.reports.html import render
    from mesa_tune.reports.page import png, svg
    from mesa_tune.reports.tables import layers_markdown

    if form is Format.snapshot:
        return _snapshots(folder, results)
    tables = make_frames(results)
    if form is Format.json:
        return {folder.folder / "report.json": _json(tables)}
    if form is Format.md:
        return {folder.folder / "layers.md": layers_markdown(tables["layers"])}
    if form is Format.csv:
        return {folder.figures / f"{name}.csv": frame.to_csv(index=False) for name, frame in tables.items()}
    figures = make_figures(results, tables)
    files: dict[Path, str | bytes] = {}
    if form is not Format.svg:
        files |= {folder.figures / f"{name}.png": png(figure) for name, figure in figures.items()}
    drawn = {} if form is Format.png else {name: svg(figure) for name, figure in figures.items()}
    files |= {folder.figures / f"{name}.svg": drawing for name, drawing in drawn.items()}
    if form is Format.html:
        files[folder.report] = render(results, tables, drawn)
    return files


def _snapshots(folder: Run, results: RunResults) -> dict[Path, str | bytes]:
    """Return the steps, plain and under the policy if there is one, as pickles for the memory viewer."""
    from mesa_tune.reports.frames import sized_step
    from mesa_tune.reports.snapshot import snapshot

    steps = {"plain": {}, **({} if results.assignment is None else {"policy": results.assignment})}
    return {
        folder.folder / f"snapshot-{name}.pickle": pickle.dumps(
            snapshot(*sized_step(results.profile, assignment, results.batch_size))
        )
        for name, assignment in steps.items()
    }


def _compared(folder: Run, runs: Mapping[str, RunResults], form: Format) -> dict[Path, str | bytes]:
    """Return the content of the file that puts `runs` side by side, in the folder of the first."""
    from mesa_tune.reports.compare import render_comparison, runs_frame, runs_markdown

    frame, path = runs_frame(runs), folder.comparison.with_suffix(f".{form.value}")
    if form is Format.html:
        return {path: render_comparison(runs, frame)}
    if form is Format.md:
        return {path: runs_markdown(frame)}
    if form is Format.csv:
        return {path: frame.to_csv(index=False)}
    if form is Format.json:
        return {path: _json({"runs": frame})}
    raise RunError(
        f"--format {form.value} of several runs: they make one page or one table\n"
        "use --format html, csv, md or json, or name one run"
    )


def _json(tables: Mapping[str, pd.DataFrame]) -> str:
    # Not by to_json of pandas, which writes an error of 1e-12 as 0.
    plain = {
        name: frame.astype(object).where(frame.notna(), None).to_dict("records")
        for name, frame in tables.items()
    }
    return dump_json({"schema": schema("tables"), **plain})
