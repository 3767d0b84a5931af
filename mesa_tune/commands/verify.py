"""`mesa-tune verify`: real training steps under a policy, predicted beside measured."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mesa_tune.commands.common import (
    DEFAULT_RUN,
    DebugOption,
    JsonOption,
    Origin,
    Output,
    QuietOption,
    Run,
    RunOption,
    counted,
    digest,
    dump_json,
    format_bytes,
    format_table,
    format_time,
    load_workload,
)
from mesa_tune.commands.memory import advising

if TYPE_CHECKING:
    from mesa_tune.policy import Policy
    from mesa_tune.profiler.profile import Prediction, Profile
    from mesa_tune.profiler.verification import Verification
    from mesa_tune.workload.workload import Workload

PolicyOption = Annotated[
    Path | None, typer.Option("--policy", metavar="policy.txt", help="Default: the run's own.")
]
StepsOption = Annotated[
    int, typer.Option("--steps", min=1, metavar="N", help="Steps to time, of plain and policy each.")
]
SeedsOption = Annotated[
    int, typer.Option("--seeds", min=1, metavar="N", help="Rounding seeds of the gradient error.")
]
ForceOption = Annotated[
    bool,
    typer.Option("--force", help="Overwrite verify.json whatever it is; apply a policy of another model."),
]

_FOREIGN = "make one for this model with `mesa-tune search`; --force applies it anyway, where it fits"
_THRESHOLD = "MALLOC_MMAP_THRESHOLD_"


def verify(
    policy: PolicyOption = None,
    steps: StepsOption = 5,
    seeds: SeedsOption = 3,
    run: RunOption = DEFAULT_RUN,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
    force: ForceOption = False,
) -> None:
    """Run real steps under a policy; predicted beside measured."""
    from mesa_tune.policy import Policy
    from mesa_tune.policy.policy import Header
    from mesa_tune.profiler.profile import Profile
    from mesa_tune.profiler.verification import verify as measure

    folder, output = Run(run, force=force), Output(json=as_json, quiet=quiet)
    profile = Profile.load(folder.require(folder.profile, "mesa-tune profile model.py"))
    path = policy or folder.require(folder.policy, "mesa-tune search --budget 40%")
    chosen = Policy.load(path)
    workload = load_workload(folder, profile, "mesa_tune.verify(workload, policy) does it in Python, without")
    expected, workload = _expectation(folder, profile, chosen, workload)
    origin = _origin(profile, chosen, workload.batch_size, own=policy is None)
    foreign = not chosen.header.is_for(profile.layers_fingerprint)
    if foreign and force:
        # Without its header nothing says whose it is, and what fits is applied.
        chosen = replace(chosen, header=Header())
    chosen.require_model(profile.layers_fingerprint, _FOREIGN)
    folder.check(folder.verify, origin)
    output.device(workload.device)
    for line in _first_lines(path, chosen, workload.batch_size, steps, foreign):
        output.line(line)
    if expected is None:
        again = ", ".join(chosen.reruns(layer.name for layer in profile.layers))
        output.line(f"nothing is predicted: {again} run again in backward, which no profile knows")
    planned, assignment = workload.batch_size, profile.assignment(chosen)
    with advising(profile, planned, assignment, lambda fits: _advice(folder, profile, planned, fits)):
        found = measure(workload, chosen, predicted=expected, steps=steps, seeds=seeds)
    folder.write(folder.verify, dump_json(found.to_dict()), origin)
    for line in describe(found, profile.plain_ms(found.batch_size)):
        output.line(line)
    output.line(f"written: {folder.verify}")
    output.document("verify", found.to_dict())


def _origin(profile: Profile, policy: Policy, batch_size: int, own: bool) -> Origin:
    """Of verify.json. Made of the run's own policy it follows that; another policy is another input."""
    text = policy.dumps()
    about = {"policy": digest(text)[:6], "batch size": str(batch_size)}
    return Origin(digest("verify", profile.fingerprint, batch_size, text), about, derived=own)


def _first_lines(path: Path, policy: Policy, batch_size: int, steps: int, foreign: bool) -> list[str]:
    budget = f"for a budget of {policy.header.budget}, " if policy.header.budget else ""
    note = ["of another model: applied because of --force, where it fits"] if foreign else []
    return [f"policy {path}", *note, f"{budget}batch {batch_size}: {counted(steps, 'step')} of each, in turn"]


def _expectation(
    folder: Run, profile: Profile, policy: Policy, workload: Workload
) -> tuple[Prediction | None, Workload]:
    """What is predicted for `policy`, and the workload at the batch size that it was planned for.

    Nothing, where modules run again in backward: of what these keep, a profile knows nothing.
    """
    from mesa_tune.search.plan import Plan

    if folder.plan.is_file():
        plan = Plan.load(folder.plan)
        if plan.policy == policy:
            return plan.predicted, workload.with_batch_size(plan.batch_size)
    if policy.reruns(layer.name for layer in profile.layers):
        return None, workload
    return profile.predict(policy), workload


def _advice(folder: Run, profile: Profile, failed: int, fits: int) -> str:
    """What plans for the batch that fits; less memory than when it was profiled asks for another profile."""
    if failed > profile.batch_size:
        what = f"search --budget {profile.peak_bytes} --batch-size {fits}"
    else:
        what = f"profile {profile.model} --batch-size {fits}"
    return f"`mesa-tune {what} --force{folder.option}`"


def describe(found: Verification, profiled_ms: float | None = None) -> list[str]:
    """The verification as a table of at most 80 columns.

    `profiled_ms`: the plain step in the profile that the prediction was made from.
    """
    rows = [
        [label, *_cells(form, quantity, found, profiled_ms)]
        for label, quantity, form in (
            ("saved bytes", "saved_bytes", format_bytes),
            ("peak bytes", "peak_bytes", format_bytes),
            ("step time", "step_ms", _milliseconds),
            ("gradient error", "gradient_error", _error),
        )
    ]
    lines = format_table(["", "plain", "predicted", "measured"], rows)
    if found.step_ratio is not None:
        ratio = found.step_ratio
        spread = f"middle half of the pairs {ratio.low:.2f} to {ratio.high:.2f}"
        lines.append(f"a step takes {ratio.median:.2f} times the plain one ({spread})")
    if found.baseline.peak_bytes is None:
        lines.append("the plain step does not fit in memory, so nothing stands beside it")
    return [*lines, *_resident(found.device)]


def _resident(device: str) -> list[str]:
    """What to set so that freed memory leaves the process: glibc keeps more and more of it otherwise."""
    if device != "cpu" or platform.libc_ver()[0] != "glibc" or _THRESHOLD in os.environ:
        return []
    return [
        "these are bytes of tensors: glibc hands what is freed back to the system only",
        f"with {_THRESHOLD}=65536 in the environment of your training",
    ]


def _cells(
    form: Callable[[float], str], quantity: str, found: Verification, profiled_ms: float | None
) -> list[str]:
    values, predicted = found.to_dict(), found.predicted_beside(profiled_ms)
    plain = {"gradient_error": 0.0, **values["baseline"]}
    columns = (plain, predicted.to_dict() if predicted else {}, values["policy"])
    known = [column.get(quantity) for column in columns]
    return ["–" if value is None else form(value) for value in known]


def _milliseconds(value: float) -> str:
    return format_time(value / 1000)


def _error(value: float) -> str:
    return f"{value:.1e}" if value else "0"
