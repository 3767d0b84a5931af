"""`mesa-tune verify`: real training steps under a policy, predicted beside measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mesa_tune.commands.common import (
    DEFAULT_RUN,
    DebugOption,
    ForceOption,
    JsonOption,
    Output,
    QuietOption,
    Run,
    RunOption,
    digest,
    dump_json,
    format_bytes,
    format_table,
    format_time,
)
from mesa_tune.commands.memory import advising
from mesa_tune.errors import RunError

if TYPE_CHECKING:
    from mesa_tune.policy import Policy
    from mesa_tune.profiler.profile import Prediction, Profile
    from mesa_tune.profiler.verification import Verification
    from mesa_tune.profiler.workload import Workload

PolicyOption = Annotated[
    Path | None, typer.Option("--policy", metavar="policy.txt", help="Default: the run's own.")
]
StepsOption = Annotated[
    int, typer.Option("--steps", min=1, metavar="N", help="Steps to time, of plain and policy each.")
]
SeedsOption = Annotated[
    int, typer.Option("--seeds", min=1, metavar="N", help="Rounding seeds of the gradient error.")
]


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
    from mesa_tune.policy import Header, Policy
    from mesa_tune.profiler.profile import Profile
    from mesa_tune.profiler.verification import verify as measure

    folder = Run(run, force=force)
    profile = Profile.load(folder.require(folder.profile, "mesa-tune profile model.py"))
    chosen = Policy.load(policy or folder.require(folder.policy, "mesa-tune search --budget 40%"))
    if force:
        # Of another model: without its header nothing says so, and what fits is applied.
        chosen = replace(chosen, header=Header())
    workload = load_workload(folder, profile)
    expected, workload = _expectation(folder, profile, chosen, workload)
    inputs = digest("verify", profile.fingerprint, workload.batch_size, chosen.dumps())
    folder.check(folder.verify, inputs)
    output = Output(json=as_json, quiet=quiet)
    output.device(workload.device)
    output.line(f"policy {policy or folder.policy}, batch {workload.batch_size}: {steps} steps each, in turn")
    planned, assignment = workload.batch_size, profile.assignment(chosen)
    with advising(profile, planned, assignment, lambda fits: _advice(folder, profile, planned, fits)):
        found = measure(workload, chosen, predicted=expected, steps=steps, seeds=seeds)
    folder.write(folder.verify, dump_json(found.to_dict()), inputs)
    for line in describe(found):
        output.line(line)
    output.line(f"written: {folder.verify}")
    output.document("verify", found.to_dict())


def load_workload(folder: Run, profile: Profile) -> Workload:
    """The workload that `profile` was made of, from its model file; RunError if that is gone or changed."""
    from mesa_tune.profiler.workload import Workload

    if profile.model is None:
        raise RunError(
            "the profile was made in Python, so no file names its model\n"
            "call mesa_tune.verify(workload, policy) there, or profile a model file"
        )
    if not Path(profile.model).is_file():
        raise RunError(
            f"{profile.model}: no such file, and the profile was made of it\n"
            "put it back, or profile the model where it is now: "
            f"`mesa-tune profile model.py --force{folder.option}`"
        )
    workload = Workload.load(
        profile.model,
        batch_size=profile.batch_size,
        device=profile.device,
        autocast=profile.autocast or "none",
        seed=profile.seed,
    )
    if workload.fingerprint != profile.fingerprint:
        raise RunError(
            f"{profile.model}: changed since it was profiled\n"
            f"profile it again: `mesa-tune profile {profile.model} --force{folder.option}`"
        )
    return workload


def _expectation(
    folder: Run, profile: Profile, policy: Policy, workload: Workload
) -> tuple[Prediction, Workload]:
    """What is predicted for `policy`, and the workload at the batch size that it was planned for."""
    from mesa_tune.search.plan import Plan

    if folder.plan.is_file():
        plan = Plan.load(folder.plan)
        if plan.policy == policy:
            return plan.predicted, workload.with_batch_size(plan.batch_size)
    return profile.predict(policy), workload


def _advice(folder: Run, profile: Profile, failed: int, fits: int) -> str:
    """What plans for the batch that fits; less memory than when it was profiled asks for another profile."""
    if failed > profile.batch_size:
        what = f"search --budget {profile.peak_bytes} --batch-size {fits}"
    else:
        what = f"profile {profile.model} --batch-size {fits}"
    return f"`mesa-tune {what} --force{folder.option}`"


def describe(found: Verification) -> list[str]:
    """The verification as a table of at most 80 columns."""
    rows = [
        [label, *_cells(form, quantity, found)]
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
    return lines


def _cells(form: Callable[[float], str], quantity: str, found: Verification) -> list[str]:
    values = found.to_dict()
    plain = {"gradient_error": 0.0, **values["baseline"]}
    columns = (plain, values["predicted"] or {}, values["policy"])
    known = [column.get(quantity) for column in columns]
    return ["–" if value is None else form(value) for value in known]


def _milliseconds(value: float) -> str:
    return format_time(value / 1000)


def _error(value: float) -> str:
    return f"{value:.1e}" if value else "0"
