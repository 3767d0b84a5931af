"""Begin a study, or join one that was begun elsewhere. What all workers must know is stored in the study.

The hard part: workers on several machines must search the same space around the same solution. A worker does
not solve again, because a solver that stops by the clock may end elsewhere on a slower machine. It compares
its own profile and space with those of the study, and refuses to mix two.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mesa_tune.errors import RunError
from mesa_tune.policy import Policy
from mesa_tune.policy.settings import LayerSettings
from mesa_tune.profiler.profile import Profile
from mesa_tune.search.fleet.address import Address
from mesa_tune.search.fleet.storage import NAME, joined_study, opened_study, require_shared
from mesa_tune.search.fleet.trials import Trials
from mesa_tune.search.problem import Limits, Space
from mesa_tune.search.restrictions import Pins, Restrictions
from mesa_tune.search.solver import Program
from mesa_tune.search.space import make_space
from mesa_tune.search.study.fastest_step import FastestStep
from mesa_tune.search.study.least_error import LeastError
from mesa_tune.search.study.local_search import Chosen, Length, LocalSearch, Meter, Outcome, Scope
from mesa_tune.search.study.lowest_peak import LowestPeak

Sharing = Callable[[str], AbstractContextManager[None]]
"""Called with the study's name; others may join the study in the body of the context."""

_TASK = "search"
_VERSION = 7
"""Of what a study stores: a study of another version is not continued but begun again."""
_READY_SECONDS = 30
_STRANGER = "take a copy of the profile.json of the run that began the study, and the same mesa-tune"


@dataclass(frozen=True)
class Task:
    """What the workers of a study share: the space, the exact solution in it, limits, and the seed.

    `objective`: what the solution is for. `sliced`: the space is that of the step with losses in slices.
    """

    batch_size: int
    pins: Pins
    restrictions: Restrictions
    sliced: bool
    limits: Limits
    solved: Chosen
    seed: int
    objective: str

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "batch_size": self.batch_size,
            "pins": {glob: settings.to_dict() for glob, settings in self.pins.items()},
            **self.restrictions.to_dict(),
            "sliced": self.sliced,
            "limits": dict(vars(self.limits)),
            "solved": list(self.solved),
            "seed": self.seed,
            "objective": self.objective,
        }

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Task:
        """Return the task that `to_dict` wrote. Raise KeyError, TypeError or ValueError for anything else."""
        return Task(
            batch_size=values["batch_size"],
            pins={glob: LayerSettings.from_dict(settings) for glob, settings in values["pins"].items()},
            restrictions=Restrictions.of(values["forbid"], values["only"]),
            sliced=values["sliced"],
            limits=Limits(**values["limits"]),
            solved=tuple(values["solved"]),
            seed=values["seed"],
            objective=values["objective"],
        )

    def search(self, profile: Profile, program: Program, measure: Meter) -> LocalSearch:
        """Return the search that every worker runs."""

        def policy_of(chosen: Chosen) -> Policy:
            return policy_at(profile, program.space, chosen)

        is_known = profile.own_noise is not None and profile.own_noise.is_known
        scope = Scope(program, self.solved, self.limits, policy_of, self.seed, is_known)
        if self.objective == "error":
            return LeastError(scope, measure)
        if self.objective == "time":
            return FastestStep(scope, measure)
        return LowestPeak(scope, measure, profile.plain_ms(self.batch_size))


@dataclass(frozen=True)
class Work:
    """How a study is worked on: where it is stored, for how long, with whom."""

    storage: str | Path | None
    trials: int | None
    timeout: float | None
    progress: Callable[[str], None] | None = None
    sharing: Sharing | None = None


class Joined(NamedTuple):
    """Name of a study that was joined, and how many trials are finished: in all, and by this worker."""

    study: str
    trials: int
    own: int


def improved(
    profile: Profile,
    program: Program,
    task: Task,
    measure: Meter,
    work: Work,
    identity: str,
    labels: Mapping[str, Any],
) -> Outcome:
    """Begin or continue the study of `task`, then confirm its best trial.

    `identity`: a hash, equal for equal tasks. After Ctrl-C the same call continues the study. Raise RunError
    for a storage that cannot be used.
    """
    address, length = Address.of(work.storage), Length.of(work.trials, work.timeout)
    if work.sharing is not None:
        require_shared(address)
    attributes = {
        **labels,
        "fingerprint": profile.fingerprint,
        "profile": _profile_digest(profile),
        "space": _space_digest(program.space),
        "trials": work.trials,
        "timeout": work.timeout,
    }
    name = NAME + _digest(_VERSION, identity, attributes["profile"], attributes["space"])
    with opened_study(address, name, attributes) as study:
        stored = study.user_attrs.get(_TASK)
        if stored is None:
            study.set_user_attr(_TASK, task.to_dict())
        search = (Task.from_dict(stored) if stored else task).search(profile, program, measure)
        all_trials = Trials(study, shared=address.is_shared)
        with work.sharing(name) if work.sharing else nullcontext():
            search.explore(all_trials, length, work.progress)
        return search.confirmed(search.finished(all_trials))


def join_search(profile: Profile, study: str, work: Work, measure: Callable[[], Meter]) -> Joined:
    """Run trials of a study that was begun elsewhere: `study` is its name, or how only its name begins.

    Without `work.trials` and `work.timeout`, the study's own limits hold. Raise RunError for a study of
    another profile or of another version, and for a storage that cannot be used.
    """
    address = Address.of(work.storage)
    with joined_study(address, study) as joined:
        task, program = _task_of(joined, profile, address)
        search = task.search(profile, program, measure())
        trials, timeout = work.trials, work.timeout
        if trials is None and timeout is None:
            trials, timeout = joined.user_attrs.get("trials"), joined.user_attrs.get("timeout")
        all_trials = Trials(joined, shared=True)
        with work.sharing(joined.study_name) if work.sharing else nullcontext():
            search.explore(all_trials, Length.of(trials, timeout), work.progress)
        finished = all_trials.standing().finished
        own = [trial for trial in finished if trial.user_attrs.get("worker") == all_trials.worker]
        return Joined(joined.study_name, len(finished), len(own))


def policy_at(profile: Profile, space: Space, chosen: Chosen) -> Policy:
    """Return the policy of the choices `chosen`, without a header."""
    assignment = space.assignment(chosen)
    rules = ((layer.tag, layer.index, layer.name, assignment[layer.name]) for layer in profile.layers)
    return Policy.from_assignments(rules).rerunning(space.taken(chosen))


def _task_of(study: Any, profile: Profile, address: Address) -> tuple[Task, Program]:
    """Return the task of a study and its program. Raise RunError if it is another profile's."""
    attributes = _ready_attributes(study)
    where = f"{address.shown}: {study.study_name}"
    if not study.study_name.startswith(NAME) or _TASK not in attributes:
        raise RunError(f"{where}: not a study of mesa-tune search\n{_STRANGER}")
    if attributes.get("fingerprint") != profile.fingerprint:
        raise RunError(f"{where}: is the study of another model than the profile's\n{_STRANGER}")
    if attributes.get("profile") != _profile_digest(profile):
        raise RunError(f"{where}: is of another profile of this model, with other prices\n{_STRANGER}")
    try:
        task = Task.from_dict(attributes[_TASK])
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"{where}: damaged: {error}\n{_STRANGER}") from error
    space = make_space(profile, task.batch_size, task.pins, task.restrictions, sliced=task.sliced)
    program = Program(space)
    if attributes.get("space") != _space_digest(program.space):
        raise RunError(f"{where}: was begun by another version of mesa-tune\n{_STRANGER}")
    return task, program


def _ready_attributes(study: Any) -> Mapping[str, Any]:
    """Return the user attributes, once the worker that begins the study has written them."""
    for _ in range(_READY_SECONDS):
        attributes: Mapping[str, Any] = study.user_attrs
        if _TASK in attributes or not study.study_name.startswith(NAME):
            return attributes
        time.sleep(1)
    return study.user_attrs  # type: ignore[no-any-return]


def _profile_digest(profile: Profile) -> str:
    """Return a hash of the profile, whatever the path of its model file is on this machine."""
    return _digest({**profile.to_dict(), "model": None})


def _space_digest(space: Space) -> str:
    """Return a hash of what the numbers in a plan stand for."""
    return _digest(
        sorted(space.slices),
        [
            [unit.tag, [[choice.settings.to_dict(), choice.inside.to_dict()] for choice in unit.choices]]
            for unit in space.decisions
        ],
    )


def _digest(*parts: object) -> str:
    text = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]
