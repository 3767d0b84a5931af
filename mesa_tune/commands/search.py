"""`mesa-tune search`: read the run's profile and a budget, write plan.json and policy.txt."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mesa_tune.commands.budgets import label_of, split_budgets
from mesa_tune.commands.common import (
    DebugOption,
    JsonOption,
    Origin,
    Output,
    QuietOption,
    Run,
    RunOption,
    digest,
    dump_json,
    format_bytes,
    load_workload,
)
from mesa_tune.commands.memory import advising
from mesa_tune.commands.searching.fits import length_limit, require_length, show_lengths
from mesa_tune.commands.searching.join import join_study
from mesa_tune.commands.searching.options import (
    MAX_NOISE_RATIO,
    BatchOption,
    BudgetOption,
    ForbidOption,
    ForceOption,
    JoinOption,
    MaxBatchOption,
    MaxLengthOption,
    NoiseOption,
    ObjectiveOption,
    OnlyOption,
    PinOption,
    ProfileOption,
    SavedOption,
    SeedOption,
    SlowdownOption,
    SmallestOption,
    StorageOption,
    TimeoutOption,
    TrialsOption,
    WorkersOption,
)
from mesa_tune.commands.searching.plan_text import summary, table
from mesa_tune.commands.searching.workers import Job, interruptible, sharing, storage_of, threads_each
from mesa_tune.errors import RunError
from mesa_tune.free_memory import room_text
from mesa_tune.units import parse_bytes

if TYPE_CHECKING:
    from mesa_tune.profiles.profile import Profile
    from mesa_tune.search import Plan
    from mesa_tune.search.api import SolvedSearch
    from mesa_tune.search.study.study import Sharing, Work
    from mesa_tune.workload.workload import Workload

_PROFILE = "mesa-tune profile model.py"
_WITHOUT_MODEL = "--trials 0 plans from the profile alone, without the model"


@dataclass(frozen=True)
class _Arguments:
    """Arguments of `search_policy` from the command line; None for an option that was not typed."""

    budget: str | None
    batch_size: int | None
    trials: int | None
    timeout: float | None
    seed: int
    max_slowdown: float | None
    max_saved: str | None
    max_noise_ratio: float
    objective: str
    max_batch: bool = False
    pin: tuple[str, ...] = ()
    forbid: str | None = None
    only: str | None = None

    def solved(self, profile: Profile) -> SolvedSearch:
        """Solve from the profile alone."""
        from mesa_tune.policy.values import split_words
        from mesa_tune.search.api import solve
        from mesa_tune.search.request import check_length
        from mesa_tune.search.restrictions import read_pin

        check_length(self.trials, self.timeout)
        asked = {key: value for key, value in vars(self).items() if key not in ("pin", "trials", "timeout")}
        for key in ("forbid", "only"):
            asked[key] = None if asked[key] is None else split_words(asked[key])
        return solve(profile, pins=dict(map(read_pin, self.pin)), **asked)

    def origin(self, run: Run, profile: Profile, plan: Plan) -> Origin:
        """Return the origin of plan and policy: equal for equal limits, however they were typed."""
        source = _profiled_from(profile)
        limits = (plan.budget_bytes, plan.batch_size, self.max_slowdown, plan.max_saved, self.seed)
        asked = (self.objective, self.max_noise_ratio, self.pin, self.forbid, self.only)
        about = {
            "budget": "none" if plan.budget_bytes is None else format_bytes(plan.budget_bytes),
            "objective": self.objective,
            "max-noise-ratio": f"{self.max_noise_ratio:g}",
            "batch size": str(plan.batch_size),
            "max-saved": "none" if plan.max_saved is None else format_bytes(plan.max_saved),
            "max-slowdown": "none" if self.max_slowdown is None else f"{self.max_slowdown:g}",
            "seed": str(self.seed),
            "workload": source[:6],
        }
        return Origin(digest("search", source, *limits, *map(str, asked)), about, remedy=self._remedy(run))

    def _remedy(self, run: Run) -> str:
        folder = f"{run.folder}-{label_of(self.budget).removesuffix('percent')}"
        return (
            "--force overwrites it; or keep both, from the same profile:\n"
            f"mesa-tune search {' '.join(self._typed())} --profile {run.profile} --run {folder}"
        )

    def _typed(self) -> list[str]:
        """Return the options that are not the defaults, as typed."""
        values = {**vars(self), "pin": None, "max_batch": None}
        options = [
            f"--{name.replace('_', '-')} {value}"
            for name, value in values.items()
            if value is not None and value != _DEFAULTS.get(name)
        ]
        options += ["--max-batch"] if self.max_batch else []
        return [*options, *(f"--pin '{pin}'" for pin in self.pin)]


_DEFAULTS = {"seed": 0, "objective": "auto", "max_noise_ratio": MAX_NOISE_RATIO}


@dataclass(frozen=True)
class _Files:
    """Where a plan is written: plan.json and policy.txt; of several budgets plan-4GB.json and so on."""

    plan: Path
    policy: Path

    @staticmethod
    def of(run: Run, budget: str | None, several: bool) -> _Files:
        if not several:
            return _Files(run.plan, run.policy)
        label = label_of(budget)
        return _Files(run.folder / f"plan-{label}.json", run.folder / f"policy-{label}.txt")


def search(
    budget: BudgetOption = None,
    smallest: SmallestOption = False,
    max_batch: MaxBatchOption = False,
    max_length: MaxLengthOption = False,
    objective: ObjectiveOption = "auto",
    max_noise_ratio: NoiseOption = MAX_NOISE_RATIO,
    max_slowdown: SlowdownOption = None,
    max_saved: SavedOption = None,
    pin: PinOption = None,
    forbid: ForbidOption = None,
    only: OnlyOption = None,
    batch_size: BatchOption = None,
    trials: TrialsOption = None,
    timeout: TimeoutOption = None,
    seed: SeedOption = 0,
    storage: StorageOption = None,
    workers: WorkersOption = 1,
    join: JoinOption = None,
    profile_path: ProfileOption = None,
    run_folder: RunOption = Path("mesa-run"),
    json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
    force: ForceOption = False,
) -> None:
    """Find the best policy whose training step fits a memory budget.

    Best is the fastest step whose error is invisible beside the minibatch's own noise; where there is none,
    the least gradient error. The budget is the peak of the whole step. With several budgets, each gets its
    own plan-BUDGET.json and policy-BUDGET.txt. Several processes and machines can search together:
    docs/fleet.md.
    """
    end = math.inf if timeout is None else time.monotonic() + timeout
    output, run = Output(json=json, quiet=quiet), Run(run_folder, force=force)
    storage = storage_of(run, storage, workers)
    if join is not None:
        fixed: dict[str, object] = {"budget": budget, "smallest": smallest, "max-batch": max_batch}
        fixed |= {"max-length": max_length, "max-slowdown": max_slowdown, "max-saved": max_saved, "pin": pin}
        fixed |= {"forbid": forbid, "only": only, "seed": seed, "batch-size": batch_size, "force": force}
        join_study(join, run, storage, profile_path, workers, (trials, timeout), fixed, output)
        return
    limit, budget = length_limit(max_length, budget, trials)
    smallest = smallest or objective == "memory" or max_length
    # A budget that is not an amount is the first error; `auto` needs to know the device.
    split_budgets(None if budget is None else budget.replace("auto", "1GB"), "cpu", smallest)
    profile = _profile(run, profile_path)
    budgets, notes = split_budgets(budget, profile.device, smallest)
    if max_batch and any(parse_bytes(one).fraction is None for one in budgets if one):
        notes = [*notes, f"room for what no prediction has: {room_text(profile.device)}"]
    arguments = _Arguments(
        budget=None,
        batch_size=batch_size,
        trials=trials,
        timeout=timeout,
        seed=seed,
        max_slowdown=max_slowdown,
        max_saved=max_saved,
        max_noise_ratio=max_noise_ratio,
        objective="memory" if smallest else objective,
        max_batch=max_batch,
        pin=tuple(pin or ()),
        forbid=forbid,
        only=only,
    )
    searches = [
        _Search(replace(arguments, budget=one), _Files.of(run, one, len(budgets) > 1)) for one in budgets
    ]
    # From the profile alone first: without a possible plan nothing must be written or deleted.
    for each in searches:
        each.solve(run, profile)
    workload = None if trials == 0 else load_workload(run, profile, _WITHOUT_MODEL)
    require_length(limit, workload)
    for each in searches:
        each.check(run)
    if profile_path is not None:
        run.adopt(run.profile, profile_path)
    output.device(profile.device)
    for note in notes:
        output.line(note)
    job = Job(storage or "", run.folder, run.profile, trials, timeout, threads_each(workers))
    study = cache(partial(_study, run, profile, storage))
    command = _Command(run, profile, workload, study, _sharing(job, workers, output), output, end)
    plans = _finished(searches, command)
    show_lengths(workload, profile, plans[0], limit, output)
    _report(plans, command)


class _Command(NamedTuple):
    """What the searches of a command share; `study`: makes the storage of their studies ready.

    `end`: when the time of all of them is up, by `time.monotonic`.
    """

    run: Run
    profile: Profile
    workload: Workload | None
    study: Callable[[], str | Path]
    sharing: Sharing | None
    output: Output
    end: float


def _finished(searches: Sequence[_Search], command: _Command) -> list[Plan]:
    """Finish the searches. After Ctrl-C write what is solved, then raise KeyboardInterrupt."""
    try:
        with interruptible():
            return [each.finish(command, len(searches) - done) for done, each in enumerate(searches)]
    except KeyboardInterrupt:
        for each in searches:
            each.save_solved(command.run, command.output)
        raise


def _report(plans: Sequence[Plan], command: _Command) -> None:
    run, profile, output = command.run, command.profile, command.output
    for line in summary(plans[0], profile, run) if len(plans) == 1 else table(plans, profile, run):
        output.line(line)
    documents = [_document(plan) for plan in plans]
    output.document("search", documents[0] if len(plans) == 1 else {"plans": documents})


@dataclass
class _Search:
    """One of the searches of a command: its arguments, with one budget, and its files."""

    arguments: _Arguments
    files: _Files

    def solve(self, run: Run, profile: Profile) -> None:
        """Make the plan from the profile alone."""
        self.solved = self.arguments.solved(profile)
        self.plan = self.solved.plan
        self.origin = self.arguments.origin(run, profile, self.plan)

    def check(self, run: Run) -> None:
        """Raise RunError for a file that must not be overwritten."""
        for path in (self.files.plan, self.files.policy):
            run.check(path, self.origin)

    def finish(self, command: _Command, left: int) -> Plan:
        """Study plans around the solved one, if there is a workload; write the files, return the plan.

        So many searches share the time that is left.
        """
        if command.workload is not None and self.plan.predicted.gradient_error:
            if self.arguments.timeout is not None:
                seconds = max(0.0, command.end - time.monotonic()) / left
                self.arguments = replace(self.arguments, timeout=seconds)
            self.plan = _studied(self.solved, command.workload, self.arguments, command)
        plan = self.plan.at(self.files.policy)
        _write(command.run, self.files, plan, self.origin)
        return plan

    def save_solved(self, run: Run, output: Output) -> None:
        """Write the plan after Ctrl-C, unless there is one of the same bound that a study confirmed."""
        from mesa_tune.search import Plan

        if self.files.plan.exists() and not run.force:
            before = Plan.load(self.files.plan)
            if before.trials and before.bound == self.plan.bound:
                return
        _write(run, self.files, self.plan.at(self.files.policy), self.origin)
        output.status("")
        output.line(f"wrote {self.files.policy} as solved; the same command continues the study")


def _profile(run: Run, path: Path | None) -> Profile:
    from mesa_tune.profiles.profile import Profile

    if path is None:
        return Profile.load(run.require(run.profile, _PROFILE))
    if not path.is_file():
        raise RunError(f"{path}: no such file\n--profile takes the profile.json that `{_PROFILE}` wrote")
    return Profile.load(path)


def _profiled_from(profile: Profile) -> str:
    """Return a digest that all profiles of a workload share: a new profile may replace the old plan."""
    names = ("fingerprint", "layers_fingerprint", "device", "autocast", "batch_size", "seed")
    return digest({name: getattr(profile, name) for name in names})


def _limits(work: Work) -> str:
    if work.timeout is None:
        return f"{work.trials}"
    seconds = f"{work.timeout:.3g} s"
    return f"for {seconds}" if work.trials is None else f"up to {work.trials} in {seconds}"


def _studied(solved: SolvedSearch, workload: Workload, arguments: _Arguments, command: _Command) -> Plan:
    from mesa_tune.search.study.study import Work

    run, profile, output = command.run, command.profile, command.output
    again = f"mesa-tune profile {profile.model} --force{run.option} --batch-size"
    # The study runs plain steps at the profiled batch size, which fit more often than the planned ones.
    with advising(profile, profile.batch_size, {}, lambda fits: f"`{again} {fits}`"):
        limits = arguments.trials, arguments.timeout
        work = Work.limited(command.study(), *limits, output.status, command.sharing)
        output.line(f"solved from the profile; a study tries plans around it: {_limits(work)}")
        traced = solved.traced(workload)
        plan = traced.studied(work)
        plan = traced.with_frontier(plan, work.end)
    output.status("")
    return plan


def _sharing(job: Job, workers: int, output: Output) -> Sharing | None:
    """Return the context in which others work on the study, where its storage allows that."""
    from mesa_tune.search.study.address import Address

    if not Address.of(job.storage or None).is_shared:
        return None
    if workers > 1:
        import torch

        torch.set_num_threads(job.threads)

    def begun(study: str) -> None:
        output.line(f"study {study}; elsewhere: mesa-tune search --join {study} --storage …")

    return sharing(job, workers - 1, begun)


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


def _write(run: Run, files: _Files, plan: Plan, origin: Origin) -> None:
    for path in (files.plan, files.policy):
        run.claim(path, origin)
    plan.policy.save(files.policy, force=True)
    run.seal(files.policy)
    run.write(files.plan, dump_json(plan.to_dict()), origin)


def _document(plan: Plan) -> dict[str, object]:
    return {key: value for key, value in plan.to_dict().items() if key != "schema"}
