"""`mesa-tune verify`: run real training steps under a policy and compare them with the prediction."""

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
    wrapped,
)
from mesa_tune.commands.guide.state import next_step
from mesa_tune.commands.memory import advising
from mesa_tune.free_memory import MMAP_THRESHOLD

if TYPE_CHECKING:
    from mesa_tune.policy import Policy
    from mesa_tune.profiles.profile import Prediction, Profile
    from mesa_tune.profiles.verification import Verification
    from mesa_tune.workload.workload import Workload

PolicyOption = Annotated[
    Path | None,
    typer.Option(
        "--policy", metavar="policy.txt", help="Default: the run's own. Of NAME.txt: verify-NAME.json."
    ),
]
StepsOption = Annotated[
    int, typer.Option("--steps", min=1, metavar="N", help="Number of steps of plain and of policy.")
]
SeedsOption = Annotated[
    int, typer.Option("--seeds", min=1, metavar="N", help="Rounding seeds on each batch.")
]
ByGroupOption = Annotated[
    bool,
    typer.Option(
        "--by-group", help="Also errors by group of parameters, and of Adam's preconditioned gradient."
    ),
]
ForceOption = Annotated[
    bool,
    typer.Option("--force", help="Overwrite an edited verify.json; apply a policy of another model."),
]

_IN_PYTHON = (
    "measure it in Python: mt.verify(workload, policy), with the mt.Workload of a model.py "
    "(`mesa-tune init --from train.py` writes one)"
)
_FOREIGN = "make one for this model with `mesa-tune search`; --force applies it anyway, where it fits"


def verify(
    policy: PolicyOption = None,
    steps: StepsOption = 5,
    seeds: SeedsOption = 3,
    by_group: ByGroupOption = False,
    run: RunOption = DEFAULT_RUN,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
    force: ForceOption = False,
) -> None:
    """Run real steps under a policy; compare with the prediction."""
    from mesa_tune.measure.verification import most_steps
    from mesa_tune.measure.verification import verify as measure
    from mesa_tune.policy import Policy
    from mesa_tune.policy.policy import Header
    from mesa_tune.profiles.profile import Profile

    folder, output = Run(run, force=force), Output(json=as_json, quiet=quiet)
    profile = Profile.load(folder.require(folder.profile, "mesa-tune profile model.py"))
    path = policy or folder.require(folder.policy, "mesa-tune search --budget 40%")
    chosen = Policy.load(path)
    workload = load_workload(folder, profile, _IN_PYTHON)
    expected, workload = _expectation(folder, profile, chosen, workload)
    origin = _origin(profile, chosen, workload.batch_size)
    written = _result_path(folder, path)
    foreign = not chosen.header.is_for(profile.layers_fingerprint)
    if foreign and force:
        # Without the header's fingerprint, every rule that fits is applied.
        chosen = replace(chosen, header=Header())
    chosen.require_model(profile.layers_fingerprint, _FOREIGN)
    folder.check(written, origin)
    output.device(workload.device)
    seconds = most_steps(steps, seeds) * profile.plain_ms(workload.batch_size) / 1000
    for line in _first_lines(path, chosen, workload.batch_size, steps, seconds, foreign):
        output.line(line)
    if expected is None:
        output.line(f"nothing is predicted: {profile.unpredictable(chosen)}")
    planned, assignment = workload.batch_size, profile.assignment(chosen)
    with advising(profile, planned, assignment, lambda fits: _advice(folder, profile, planned, fits)):
        check = measure(workload, chosen, predicted=expected, steps=steps, seeds=seeds, by_group=by_group)
    folder.write(written, dump_json(check.to_dict()), origin)
    profiled_ms = None if profile.step_ms is None else profile.plain_ms(check.batch_size)
    for line in describe(check, profiled_ms):
        output.line(line)
    output.line(f"wrote {written}")
    output.line(f"next: mesa-tune report{folder.option}" if written == folder.verify else next_step(folder))
    output.document("verify", check.to_dict())


def _result_path(folder: Run, policy: Path) -> Path:
    """Return where to write: verify.json for the run's own policy, verify-NAME.json for that of NAME.txt."""
    if policy.resolve() == folder.policy.resolve():
        return folder.verify
    return folder.folder / f"verify-{policy.stem.removeprefix('policy-')}.json"


def _origin(profile: Profile, policy: Policy, batch_size: int) -> Origin:
    """Return the origin of the results. Those of a newer policy in the same file may overwrite them."""
    text = policy.dumps()
    about = {"policy": digest(text)[:6], "batch size": str(batch_size)}
    return Origin(digest("verify", profile.fingerprint, batch_size, text), about, derived=True)


def _first_lines(
    path: Path, policy: Policy, batch_size: int, steps: int, seconds: float, foreign: bool
) -> list[str]:
    budget = f"for a budget of {policy.header.budget}, " if policy.header.budget else ""
    note = ["of another model: applied because of --force, where it fits"] if foreign else []
    return [
        f"policy {path}",
        *note,
        f"{budget}batch {batch_size}: {counted(steps, 'step')} of each, in turn",
        f"at most about {format_time(seconds)} of steps, with those for errors and noise",
    ]


def _expectation(
    folder: Run, profile: Profile, policy: Policy, workload: Workload
) -> tuple[Prediction | None, Workload]:
    """Return the prediction for `policy`, and the workload at the batch size that it was planned for.

    The prediction is None for settings that no profile measures.
    """
    from mesa_tune.search.plan import Plan

    if folder.plan.is_file():
        plan = Plan.load(folder.plan)
        if plan.policy == policy:
            return plan.predicted, workload.with_batch_size(plan.batch_size)
    if profile.unpredictable(policy) is not None:
        return None, workload
    return profile.predict(policy), workload


def _advice(folder: Run, profile: Profile, failed: int, fits: int) -> str:
    """Return the command for the batch size that fits: search for it, or profile again with less memory."""
    if failed > profile.batch_size:
        what = f"search --budget {profile.peak_bytes} --batch-size {fits}"
    else:
        what = f"profile {profile.model} --batch-size {fits}"
    return f"`mesa-tune {what} --force{folder.option}`"


def describe(check: Verification, profiled_ms: float | None = None) -> list[str]:
    """Return the verification as lines of a table of at most 80 characters each.

    `profiled_ms`: milliseconds of the plain step in the profile that the prediction was made from.
    """
    rows = [
        [label, *_cells(form, quantity, check, profiled_ms)]
        for label, quantity, form in (
            ("saved bytes", "saved_bytes", format_bytes),
            ("peak bytes", "peak_bytes", format_bytes),
            ("step time", "step_ms", _milliseconds),
            ("gradient error", "gradient_error", _error),
            ("noise ratio", "gradient_noise_ratio", _error),
            *((("worst of one", "worst_own_ratio", _error),) if check.worst_parameter else ()),
        )
    ]
    lines = [
        *format_table(["", "plain", "predicted", "measured"], rows),
        *wrapped(
            f"worst of one: {check.worst_parameter}, beside its own noise" if check.worst_parameter else "", 0
        ),
        *_at_checkpoints(check),
        *_by_group(check),
    ]
    if check.step_ratio is not None:
        ratio = check.step_ratio
        spread = f"middle half of the pairs {ratio.low:.2f} to {ratio.high:.2f}"
        lines.append(f"a step takes {ratio.median:.2f} times the plain one ({spread})")
    if check.baseline.peak_bytes is None:
        how = (
            "exact gradients were computed with checkpoints"
            if check.gradient_errors
            else "nothing to compare"
        )
        lines.append(f"the plain step does not fit in memory: {how}")
    return [*lines, *_resident_note(check.device)]


def _at_checkpoints(check: Verification) -> list[str]:
    """Return a table of the errors at the checkpoints, if there are any, and the worst noise ratio."""
    if not check.checkpoints:
        return []
    header = ["", "gradient error", "noise", "noise ratio"]
    rows = [
        [
            at.checkpoint,
            _error(at.gradient_error),
            f"{at.gradient_noise:.2f}",
            _or_dash(at.gradient_noise_ratio),
        ]
        for at in check.checkpoints
    ]
    worst = f"largest noise ratio, the model as given included: {_or_dash(check.worst_noise_ratio)}"
    return ["", *format_table(header, rows), worst, ""]


def _by_group(check: Verification) -> list[str]:
    """Return a table of the errors by group of parameters, if they were measured."""
    if not check.groups:
        return []
    rows = [
        [
            group.group,
            f"{group.elements:,}",
            _or_dash(group.gradient_error),
            _or_dash(group.preconditioned_error),
        ]
        for group in check.groups
    ]
    return ["", *format_table(["group", "elements", "gradient error", "in Adam's scale"], rows), ""]


def _resident_note(device: str) -> list[str]:
    """Return what to set so that glibc returns freed memory to the system."""
    if device != "cpu" or platform.libc_ver()[0] != "glibc" or MMAP_THRESHOLD in os.environ:
        return []
    return [
        "these are bytes of tensors: glibc hands what is freed back to the system only",
        f"with {MMAP_THRESHOLD}=65536 in the environment of your training",
    ]


def _cells(
    form: Callable[[float], str], quantity: str, check: Verification, profiled_ms: float | None
) -> list[str]:
    values, predicted = check.to_dict(), check.predicted_beside(profiled_ms)
    plain = {"gradient_error": 0.0, "gradient_noise_ratio": 0.0, "worst_own_ratio": 0.0, **values["baseline"]}
    columns = (plain, predicted.to_dict() if predicted else {}, values["policy"])
    cells = [column.get(quantity) for column in columns]
    return ["–" if value is None else form(value) for value in cells]


def _milliseconds(value: float) -> str:
    return format_time(value / 1000)


def _or_dash(value: float | None) -> str:
    return "–" if value is None else _error(value)


def _error(value: float) -> str:
    return f"{value:.1e}" if value else "0"
