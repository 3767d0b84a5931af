"""`mesa-tune search`: from the run's profile and a budget to plan.json and policy.txt."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mesa_tune.commands.common import (
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
    format_time,
    parse_bytes,
)
from mesa_tune.commands.memory import advising
from mesa_tune.errors import RunError

if TYPE_CHECKING:
    from mesa_tune.profiler.profile import Profile
    from mesa_tune.profiler.workload import Workload
    from mesa_tune.search import Plan

_PROFILE = "mesa-tune profile model.py"

BudgetOption = Annotated[
    str, typer.Option("--budget", metavar="BYTES", help="Peak of the whole step: 6GB, 6GiB, 40% or bytes.")
]
BatchOption = Annotated[
    int | None,
    typer.Option("--batch-size", metavar="N", help="Plan for this batch size; default: the profiled one."),
]
TrialsOption = Annotated[
    int | None,
    typer.Option(
        "--trials", metavar="N", help="Trials of the study; 0 needs no model. Default: 100, or 120 s."
    ),
]
TimeoutOption = Annotated[
    float | None, typer.Option("--timeout", metavar="S", help="Seconds that the study may take.")
]
SeedOption = Annotated[int, typer.Option("--seed", metavar="N", help="Seed of the study.")]
SlowdownOption = Annotated[
    float | None,
    typer.Option("--max-slowdown", metavar="X", help="Limit on step time over the plain one's: 1.2"),
]
SavedOption = Annotated[
    str | None, typer.Option("--max-saved", metavar="BYTES", help="Limit on saved bytes as well.")
]
StorageOption = Annotated[
    str | None,
    typer.Option("--storage", metavar="URL", help="Database of the study; default: study.db of the run."),
]


def search(
    budget: BudgetOption,
    batch_size: BatchOption = None,
    trials: TrialsOption = None,
    timeout: TimeoutOption = None,
    seed: SeedOption = 0,
    max_slowdown: SlowdownOption = None,
    max_saved: SavedOption = None,
    storage: StorageOption = None,
    run_folder: RunOption = Path("mesa-run"),
    json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
    force: ForceOption = False,
) -> None:
    """Find the best policy whose training step fits a memory budget.

    Best is the least gradient error. The budget is the peak of the whole step.
    """
    from mesa_tune.profiler.profile import Profile
    from mesa_tune.search import search_policy

    parse_bytes(budget)
    output, run = Output(json=json, quiet=quiet), Run(run_folder, force=force)
    profile = Profile.load(run.require(run.profile, _PROFILE))
    inputs = digest("search", profile.to_dict(), budget, batch_size, max_slowdown, max_saved, seed)

    def plan_with(workload: Workload | None, study: str | Path | None) -> Plan:
        return search_policy(
            profile,
            budget,
            workload=workload,
            trials=trials,
            timeout=timeout,
            batch_size=batch_size,
            max_saved=max_saved,
            max_slowdown=max_slowdown,
            seed=seed,
            storage=study,
            progress=output.status,
        )

    # From the profile alone first: what cannot be planned is refused before anything is written or deleted.
    plan = plan_with(None, None)
    workload = None if trials == 0 else _workload(run, profile)
    for path in (run.plan, run.policy):
        run.check(path, inputs)
    output.device(profile.device)
    if workload is not None:
        study = _study(run, profile, storage)
        command = f"mesa-tune profile {profile.model} --force{run.option} --batch-size"
        # The study takes plain steps of the profiled batch, which fits more often than the planned one.
        with advising(profile, profile.batch_size, {}, lambda fits: f"`{command} {fits}`"):
            plan = plan_with(workload, study)
    output.status("")
    _write(run, plan, inputs)
    for line in summary(plan.at(run.policy), profile):
        output.line(line)
    output.document("search", _document(plan.at(run.policy)))


def _workload(run: Run, profile: Profile) -> Workload:
    """The workload that was profiled. RunError where its file is gone or another now."""
    from mesa_tune.profiler.workload import Workload

    if profile.model is None:
        raise RunError(
            "the profile names no model file, so nothing can be measured\n--trials 0 solves without it"
        )
    if not Path(profile.model).is_file():
        raise RunError(
            f"{profile.model}: no such file, though it was profiled\n"
            "restore it, or use --trials 0, which needs no model"
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
            f"profile it again with `mesa-tune profile {profile.model} --force{run.option}`"
        )
    return workload


def _study(run: Run, profile: Profile, storage: str | None) -> str | Path:
    """Where the study lives; the run's own file is noted as ours, and with --force begun anew."""
    if storage is not None:
        return storage
    inputs = digest("study", profile.to_dict())
    run.check(run.study, inputs)
    if run.force:
        run.study.unlink(missing_ok=True)
    run.claim(run.study, inputs)
    return run.study


def _write(run: Run, plan: Plan, inputs: str) -> None:
    for path in (run.plan, run.policy):
        run.claim(path, inputs)
    plan.policy.save(run.policy, force=True)
    run.seal(run.policy)
    run.write(run.plan, dump_json(plan.at(run.policy).to_dict()), inputs)


def _document(plan: Plan) -> dict[str, object]:
    return {key: value for key, value in plan.to_dict().items() if key != "schema"}


def summary(plan: Plan, profile: Profile) -> list[str]:
    """What was solved and won, in lines of at most 80 columns, ending with the two that train with it."""
    return [
        f"budget {format_bytes(plan.budget_bytes)} at batch size {plan.batch_size}" + _profiled(plan),
        f"  peak            {_change(plan.baseline.peak_bytes, plan.predicted.peak_bytes)}",
        f"  saved           {_change(plan.baseline.saved_bytes, plan.predicted.saved_bytes)}",
        *_errors(plan),
        *_step(plan, profile),
        f"study: {plan.won}" if plan.trials else plan.won,
        f"wrote {plan.policy_path}; in your training:",
        "",
        "    import mesa_tune as mt",
        f'    mt.convert(model, mt.Policy.load("{plan.policy_path}"))',
    ]


def _profiled(plan: Plan) -> str:
    return "" if plan.batch_size == plan.profiled_batch_size else f" (profiled at {plan.profiled_batch_size})"


def _change(before: int, after: int) -> str:
    share = f"  ({after / before:.0%})" if before else ""
    return f"{format_bytes(before)} -> {format_bytes(after)} predicted{share}"


def _errors(plan: Plan) -> list[str]:
    lines = [
        f"  gradient error  {plan.predicted.gradient_error:.2e} predicted; no plan is below {plan.bound:.2e}"
    ]
    if plan.measured is not None:
        mean, spread = plan.measured.gradient_error, plan.measured.standard_error
        lines.append(f"                  {mean:.2e} ± {spread:.1e} measured on fresh batches")
    return lines


def _step(plan: Plan, profile: Profile) -> list[str]:
    if plan.predicted.step_ms is None or not profile.step_ms:
        return []
    plain = profile.step_ms * plan.batch_size / profile.batch_size
    ratio = plan.predicted.step_ms / plain
    return [f"  step            {format_time(plain / 1000)} -> {ratio:.2f}x predicted"]
