"""What a run folder has so far, and the command that comes next."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mesa_tune.commands.common import Run, format_bytes
from mesa_tune.commands.guide.advice import UNRECORDED, find_reach, has_prices, next_command
from mesa_tune.errors import MesaTuneError

if TYPE_CHECKING:
    from mesa_tune.profiles.profile import Profile
    from mesa_tune.search.plan import Plan

_MODEL = Path("model.py")
_FIRST = """\
mesa-tune demo                        all of it on a small model
      mesa-tune init                        a model.py to put your model into
      mesa-tune profile -- python train.py  your training script as it is
      mesa-tune run -- python train.py      the same, to see why memory runs out"""
"""What comes first."""


class State(NamedTuple):
    """What the run has, in words, and what to do next."""

    text: str
    next: str


def state_of(run: Run) -> State:
    """Return the state of the run folder. A damaged file counts as missing."""
    if not run.profile.is_file():
        return _without_profile(run)
    from mesa_tune.profiles.profile import Profile

    try:
        profile = Profile.load(run.profile)
    except MesaTuneError:
        return State(f"{run.profile} is damaged", _profile(run, None, force=True))
    about = f"{run.folder}: {_profiled(profile)}"
    unfinished = _unfinished(run, profile)
    if unfinished is not None:
        return State(about, unfinished)
    plan = _plan(run, profile)
    if plan is None:
        return State(about, next_command(profile, find_reach(profile), run))
    return State(f"{about}, and planned for {_budget(plan)}", _after_search(run, profile, plan))


def next_step(run: Run) -> str:
    """Return the line that ends the output of a command."""
    return f"next: {state_of(run).next}"


def _without_profile(run: Run) -> State:
    if _MODEL.is_file():
        return State(f"{run.folder}: nothing was profiled yet", _profile(run, str(_MODEL)))
    return State(f"{run.folder}: nothing was profiled yet", _FIRST)


def _unfinished(run: Run, profile: Profile) -> str | None:
    """Return the command without which the profile is of no use to a search; None if it is complete."""
    from mesa_tune.workload.model_file import file_fingerprint

    if profile.script is not None:
        return UNRECORDED
    if profile.partial:
        return f"{_profile(run, profile.model)}, which resumes it"
    if profile.layers and not has_prices(profile):
        return f"{_profile(run, profile.model)}, for errors and times, too"
    if profile.model is not None and file_fingerprint(Path(profile.model)) != profile.fingerprint:
        return f"{_profile(run, profile.model, force=True)}, as the file has changed"
    return None


def _after_search(run: Run, profile: Profile, plan: Plan) -> str:
    verifies = bool(plan.policy.rules) and profile.model is not None
    if verifies and not _is_newer(run.verify, run.policy):
        return f"mesa-tune verify{run.option}"
    if not _is_newer(run.report, run.verify if verifies else run.plan):
        return f"mesa-tune report{run.option}"
    return f"open {run.report}, train with {run.policy} (README.md)"


def _plan(run: Run, profile: Profile) -> Plan | None:
    from mesa_tune.search.plan import Plan

    try:
        plan = Plan.load(run.plan) if run.policy.is_file() and _is_newer(run.plan, run.profile) else None
    except MesaTuneError:
        return None
    return plan if plan and plan.policy.header.is_for(profile.layers_fingerprint) else None


def _is_newer(path: Path, than: Path) -> bool:
    return path.is_file() and path.stat().st_mtime_ns >= than.stat().st_mtime_ns


def _profile(run: Run, model: str | None, *, force: bool = False) -> str:
    path = shlex.quote(_from_here(model or str(_MODEL)))
    return f"mesa-tune profile {path}{' --force' if force else ''}{run.option}"


def _profiled(profile: Profile) -> str:
    if profile.script is not None:
        return f"a step of `{profile.script}` was observed"
    name = _from_here(profile.model or "a workload")
    if profile.partial:
        return f"{name} was profiled in part"
    return f"{name} was profiled" if has_prices(profile) else f"the bytes of {name} were profiled"


def _from_here(path: str) -> str:
    """Return a path below the current folder relative to it."""
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path


def _budget(plan: Plan) -> str:
    amount = "the smallest peak" if plan.budget_bytes is None else format_bytes(plan.budget_bytes)
    return f"{amount} at batch size {plan.batch_size}"
