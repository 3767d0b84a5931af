"""`mesa-tune search`: read the run's profile and a budget, write plan.json and policy.txt."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mesa_tune.commands.common import (
    DebugOption,
    JsonOption,
    Origin,
    Output,
    QuietOption,
    Run,
    RunOption,
    below,
    digest,
    dump_json,
    format_bytes,
    format_time,
    load_workload,
    parse_bytes,
)
from mesa_tune.commands.memory import advising
from mesa_tune.errors import RunError

if TYPE_CHECKING:
    from mesa_tune.profiler.profile import Profile
    from mesa_tune.search import Plan
    from mesa_tune.workload.workload import Workload

_PROFILE = "mesa-tune profile model.py"
_WITHOUT_MODEL = "--trials 0 plans from the profile alone, without the model"

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
    typer.Option("--max-slowdown", metavar="X", help="Limit on step time over the plain step's: 1.2"),
]
SavedOption = Annotated[
    str | None, typer.Option("--max-saved", metavar="BYTES", help="Limit on saved bytes as well.")
]
StorageOption = Annotated[
    str | None,
    typer.Option("--storage", metavar="URL", help="Database of the study; default: study.db of the run."),
]
ProfileOption = Annotated[
    Path | None,
    typer.Option(
        "--profile", metavar="FILE", help="profile.json of another run; it is copied into this run."
    ),
]
ForceOption = Annotated[
    bool,
    typer.Option("--force", help="Overwrite files edited by hand or of other inputs; start a new study."),
]


@dataclass(frozen=True)
class _Arguments:
    """Arguments of `search_policy` from the command line; None for an option that was not typed."""

    budget: str
    batch_size: int | None
    trials: int | None
    timeout: float | None
    seed: int
    max_slowdown: float | None
    max_saved: str | None

    def plan(
        self,
        profile: Profile,
        workload: Workload | None = None,
        study: str | Path | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> Plan:
        from mesa_tune.search import search_policy

        return search_policy(profile, workload=workload, storage=study, progress=progress, **vars(self))

    def origin(self, run: Run, profile: Profile, plan: Plan) -> Origin:
        """Return the origin of plan and policy: equal for equal limits, however they were typed."""
        source = _profiled_from(profile)
        limits = (plan.budget_bytes, plan.batch_size, self.max_slowdown, plan.max_saved, self.seed)
        about = {
            "budget": format_bytes(plan.budget_bytes),
            "batch size": str(plan.batch_size),
            "max-saved": "none" if plan.max_saved is None else format_bytes(plan.max_saved),
            "max-slowdown": "none" if self.max_slowdown is None else f"{self.max_slowdown:g}",
            "seed": str(self.seed),
            "workload": source[:6],
        }
        return Origin(digest("search", source, *limits), about, remedy=self._remedy(run))

    def _remedy(self, run: Run) -> str:
        options = {
            "seed": self.seed or None,
            **{name: value for name, value in vars(self).items() if name != "seed"},
        }
        typed = " ".join(
            f"--{name.replace('_', '-')} {value}" for name, value in options.items() if value is not None
        )
        folder = f"{run.folder}-{re.sub(r'[^0-9A-Za-z.]', '', self.budget)}"
        return (
            "--force overwrites it; or keep both, from the same profile:\n"
            f"mesa-tune search {typed} --profile {run.profile} --run {folder}"
        )


def search(
    budget: BudgetOption,
    batch_size: BatchOption = None,
    trials: TrialsOption = None,
    timeout: TimeoutOption = None,
    seed: SeedOption = 0,
    max_slowdown: SlowdownOption = None,
    max_saved: SavedOption = None,
    storage: StorageOption = None,
    profile_path: ProfileOption = None,
    run_folder: RunOption = Path("mesa-run"),
    json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
    force: ForceOption = False,
) -> None:
    """Find the best policy whose training step fits a memory budget.

    Best is the least gradient error. The budget is the peak of the whole step.
    """
    parse_bytes(budget)
    arguments = _Arguments(budget, batch_size, trials, timeout, seed, max_slowdown, max_saved)
    output, run = Output(json=json, quiet=quiet), Run(run_folder, force=force)
    profile = _profile(run, profile_path)
    # From the profile alone first: without a possible plan nothing must be written or deleted.
    plan = arguments.plan(profile)
    workload = None if trials == 0 else load_workload(run, profile, _WITHOUT_MODEL)
    origin = arguments.origin(run, profile, plan)
    for path in (run.plan, run.policy):
        run.check(path, origin)
    if profile_path is not None:
        run.adopt(run.profile, profile_path)
    output.device(profile.device)
    if workload is not None and plan.predicted.gradient_error:
        output.line(f"solved from the profile; a study tries plans around it: {_limits(arguments)}")
        plan = _studied(arguments, run, profile, workload, _study(run, profile, storage), output)
    plan = plan.at(run.policy)
    _write(run, plan, origin)
    for line in summary(plan, profile):
        output.line(line)
    output.document("search", _document(plan))


def _profile(run: Run, path: Path | None) -> Profile:
    from mesa_tune.profiler.profile import Profile

    if path is None:
        return Profile.load(run.require(run.profile, _PROFILE))
    if not path.is_file():
        raise RunError(f"{path}: no such file\n--profile takes the profile.json that `{_PROFILE}` wrote")
    return Profile.load(path)


def _profiled_from(profile: Profile) -> str:
    """Return a digest that all profiles of a workload share: a new profile may replace the old plan."""
    names = ("fingerprint", "layers_fingerprint", "device", "autocast", "batch_size", "seed")
    return digest({name: getattr(profile, name) for name in names})


def _limits(arguments: _Arguments) -> str:
    from mesa_tune.search.api import TIMEOUT, TRIALS

    if arguments.trials is None and arguments.timeout is None:
        return f"up to {TRIALS} in {TIMEOUT:.0f} s"
    if arguments.timeout is None:
        return f"{arguments.trials}"
    time = f"{arguments.timeout:g} s"
    return f"for {time}" if arguments.trials is None else f"up to {arguments.trials} in {time}"


def _studied(
    arguments: _Arguments, run: Run, profile: Profile, workload: Workload, study: str | Path, output: Output
) -> Plan:
    command = f"mesa-tune profile {profile.model} --force{run.option} --batch-size"
    # The study runs plain steps at the profiled batch size, which fit more often than the planned ones.
    with advising(profile, profile.batch_size, {}, lambda fits: f"`{command} {fits}`"):
        plan = arguments.plan(profile, workload, study, output.status)
    output.status("")
    return plan


def _study(run: Run, profile: Profile, storage: str | None) -> str | Path:
    """Return the storage of the study. The run's own file is noted as ours, and deleted with --force."""
    if storage is not None:
        return storage
    inputs = digest("study", _profiled_from(profile))
    run.check(run.study, inputs)
    if run.force:
        run.study.unlink(missing_ok=True)
    run.claim(run.study, inputs)
    return run.study


def _write(run: Run, plan: Plan, origin: Origin) -> None:
    for path in (run.plan, run.policy):
        run.claim(path, origin)
    plan.policy.save(run.policy, force=True)
    run.seal(run.policy)
    run.write(run.plan, dump_json(plan.to_dict()), origin)


def _document(plan: Plan) -> dict[str, object]:
    return {key: value for key, value in plan.to_dict().items() if key != "schema"}


def summary(plan: Plan, profile: Profile) -> list[str]:
    """Return the plan in lines of at most 80 characters; the last lines are code for the training script."""
    return [
        f"budget {format_bytes(plan.budget_bytes)} at batch size {plan.batch_size}" + _profiled(plan),
        f"  peak            {_change(plan.baseline.peak_bytes, plan.predicted.peak_bytes)}",
        *_peak(plan),
        f"  saved           {_change(plan.baseline.saved_bytes, plan.predicted.saved_bytes)}",
        *_errors(plan),
        *_step(plan, profile),
        *textwrap.wrap(f"study: {plan.won}" if plan.trials else plan.won, 80, subsequent_indent="       "),
        *_next(plan, profile),
    ]


def _peak(plan: Plan) -> list[str]:
    peak = plan.predicted.peak
    return [*below("" if peak is None else peak.text), *below(plan.predicted.workspaces_text)]


def _next(plan: Plan, profile: Profile) -> list[str]:
    if not plan.policy.rules:
        return [f"wrote {plan.policy_path}, which stores everything exactly: train as you are"]
    return [
        f"wrote {plan.policy_path}; in your training:",
        "",
        *(f"    {line}" for line in plan.training(profile)),
    ]


def _profiled(plan: Plan) -> str:
    return "" if plan.batch_size == plan.profiled_batch_size else f" (profiled at {plan.profiled_batch_size})"


def _change(before: int, after: int) -> str:
    share = f"  ({after / before:.0%})" if before else ""
    return f"{format_bytes(before)} -> {format_bytes(after)} predicted{share}"


def _errors(plan: Plan) -> list[str]:
    error = plan.predicted.gradient_error
    if not error:
        return ["  gradient error  0"]
    # The solver proves a minimum only up to its own tolerance.
    least = "no plan predicts less" if _nearly(error, plan.bound) else f"no plan is below {plan.bound:.2e}"
    lines = [f"  gradient error  {error:.2e} predicted; {least}"]
    ends = plan.predicted.gradient_error_interval
    if ends is not None:
        lines.append(f"                  {ends[0]:.1e} to {ends[1]:.1e} expected on unseen batches")
    if plan.measured is not None:
        mean, spread = plan.measured.gradient_error, plan.measured.standard_error
        lines.append(f"                  {mean:.2e} ± {spread:.1e} measured on fresh batches")
    ratio = plan.predicted.gradient_noise_ratio
    if ratio is not None:
        lines.append(f"  noise ratio     {ratio:.1e} of the batches' own noise")
    return lines


def _nearly(error: float, bound: float) -> bool:
    return error <= 1.001 * bound


def _step(plan: Plan, profile: Profile) -> list[str]:
    if plan.predicted.step_ms is None or not profile.step_ms:
        return []
    plain = profile.plain_ms(plan.batch_size)
    ratio = plan.predicted.step_ms / plain
    return [f"  step            {format_time(plain / 1000)} -> {ratio:.2f}x predicted"]
