"""`mesa-tune search --join STUDY`: take part in a study that was begun elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mesa_tune.commands.common import Output, Run, counted
from mesa_tune.commands.searching.workers import Job, interruptible, join, sharing, threads_each
from mesa_tune.errors import RunError


def join_study(
    study: str,
    run: Run,
    storage: str | None,
    profile: Path | None,
    workers: int,
    length: tuple[int | None, float | None],
    fixed: Mapping[str, object],
    output: Output,
) -> None:
    """Work on `study` with `workers` processes until it has its length: trials, seconds, or its own.

    `fixed`: options that the command that began the study decides. Raise RunError if one is given.
    """
    if given := [f"--{name}" for name, value in fixed.items() if value]:
        raise RunError(
            f"join: {', '.join(given)} cannot be changed: the study has its own budget and limits\n"
            "leave them out; --trials and --timeout limit this worker"
        )
    if storage is None:
        raise RunError("join: no --storage\nname the database or journal that the study was begun in")
    path = run.require(run.profile if profile is None else profile, "mesa-tune profile model.py")
    job = Job(storage, run.folder, path, *length, threads_each(workers))
    output.line(f"joining {study}: trials until the study is complete")
    with interruptible():
        done = join(study, job, sharing(job, workers - 1, lambda _: None), output.status)
    output.status("")
    output.line(
        f"{done.study}: {counted(done.trials, 'trial')}, {done.own} of them by this process\n"
        "the command that began the study writes its plan"
    )
    output.document("join", done._asdict())
