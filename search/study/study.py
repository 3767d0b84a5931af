"""Begin a study, or join one that was begun elsewhere. What all workers must know is stored in the study.

The hard part: workers on several machines must search the same space around the same solution. A worker does
not solve again, because a solver that stops by the clock may end elsewhere on a slower machine. It compares
its own profile, space and hardware with those of the study, and refuses to mix two.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from mesa_tune.errors import RunError
from mesa_tune.policy.settings import LayerSettings
from mesa_tune.profiles.profile import Profile
from mesa_tune.runs.provenance import hardware
from mesa_tune.search.again.correction import with_floor
from mesa_tune.search.problem import Chosen, Limits, Space
from mesa_tune.search.restrictions import Pins, Restrictions
from mesa_tune.search.solver import Program
from mesa_tune.search.space import make_space, with_producers
from mesa_tune.search.study.address import Address
from mesa_tune.search.study.knobs import Knobs
from mesa_tune.search.study.storage import NAME, joined_study, opened_study, require_shared
from mesa_tune.search.study.trial import Goal, Meter
from mesa_tune.search.study.worker import Outcome, Worker, has_plan

Sharing = Callable[[str], AbstractContextManager[None]]
"""Called with the study's name; others may join the study in the body of the context."""

_TASK = "search"
_VERSION = 8
"""Of what a study stores: a study of another version is not continued but begun again."""
_READY_SECONDS = 600
"""How long a worker that joins waits for the solved plan's trial."""
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
            **vars(self),
            "pins": {glob: settings.to_dict() for glob, settings in self.pins.items()},
            "restrictions": self.restrictions.to_dict(),
            "limits": dict(vars(self.limits)),
            "solved": list(self.solved),
        }

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Task:
        """Return the task that `to_dict` wrote. Raise KeyError, TypeError or ValueError for anything else."""
        parts = {
            "pins": {glob: LayerSettings.from_dict(settings) for glob, settings in values["pins"].items()},
            "restrictions": Restrictions.of(**values["restrictions"]),
            "limits": Limits(**values["limits"]),
            "solved": tuple(values["solved"]),
        }
        return Task(**{**values, **parts})


TRIALS = 10
TIMEOUT = 30.0
"""Limits of a study that has none, the latter in seconds."""


@dataclass(frozen=True)
class Work:
    """How a study is worked on: where it is stored, for how long from when it `began`, with whom."""

    storage: str | Path | None
    trials: int | None
    timeout: float | None
    progress: Callable[[str], None] | None = None
    sharing: Sharing | None = None
    began: float = field(default_factory=time.monotonic)

    @staticmethod
    def limited(storage: str | Path | None, trials: int | None, timeout: float | None, *more: Any) -> Work:
        """Return the work within these limits; within the default ones if there are none."""
        if trials is None and timeout is None:
            trials, timeout = TRIALS, TIMEOUT
        return Work(storage, trials, timeout, *more)

    @property
    def end(self) -> float:
        """When the time is up, by `time.monotonic`."""
        return math.inf if self.timeout is None else self.began + self.timeout


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

    `identity`: equal for equal tasks. After Ctrl-C the same call continues the study. Raise RunError for a
    storage that cannot be used.
    """
    address, end = Address.of(work.storage), work.end
    if work.sharing is not None:
        require_shared(address)
    attributes = {
        **labels,
        "fingerprint": profile.fingerprint,
        "profile": _profile_digest(profile),
        "space": _space_digest(program.space),
        "hardware": hardware(),
        "trials": work.trials,
        "timeout": work.timeout,
    }
    parts = [attributes[name] for name in ("profile", "space", "hardware")]
    name = NAME + _digest(_VERSION, identity, *parts)
    with opened_study(address, name, attributes) as study:
        stored = study.user_attrs.get(_TASK)
        if stored is None:
            study.set_user_attr(_TASK, task.to_dict())
        task = Task.from_dict(stored) if stored else task
        worker = _worker(study, task, profile, program, measure, task.seed)
        worker.measure_solved(end)
        with work.sharing(name) if work.sharing else nullcontext():
            worker.run(work.trials, end, work.progress)
        return worker.confirmed()


def join_search(profile: Profile, study: str, work: Work, measure: Callable[[int], Meter]) -> Joined:
    """Run trials of a study that was begun elsewhere: `study` is its name, or how only its name begins.

    `measure`: makes what measures, for plans at a batch size.

    Without `work.trials` and `work.timeout`, the study's own limits hold. Raise RunError for a study of
    another profile, version or hardware, and for a storage that cannot be used.
    """
    address = Address.of(work.storage)
    with joined_study(address, study) as joined:
        task, program = _task_of(joined, profile, address)
        worker = _worker(joined, task, profile, program, measure(task.batch_size), None)
        if work.trials is None and work.timeout is None:
            limits = {name: joined.user_attrs.get(name) for name in ("trials", "timeout")}
            work = replace(work, **limits, began=time.monotonic())
        with work.sharing(joined.study_name) if work.sharing else nullcontext():
            worker.run(work.trials, work.end, work.progress)
        return Joined(joined.study_name, len(worker.plans()), worker.own)


def _worker(
    study: Any, task: Task, profile: Profile, program: Program, measure: Meter, seed: int | None
) -> Worker:
    is_known = profile.own_noise is not None and profile.own_noise.is_known
    space, plain_ms = program.space, profile.plain_ms(task.batch_size)
    goal = Goal(task.objective, space, task.limits, plain_ms, is_known)
    return Worker(
        study,
        goal,
        Knobs(program, goal),
        task.solved,
        lambda chosen: with_producers(profile, space, chosen),
        measure,
        profile.plain_ms(profile.batch_size) / 1e3,
        seed,
    )


def _task_of(study: Any, profile: Profile, address: Address) -> tuple[Task, Program]:
    """Return the task of a study and its program. Raise RunError if it is another profile's."""
    where = f"{address.shown}: {study.study_name}"
    attributes = _ready_attributes(study, where)
    if attributes.get("fingerprint") != profile.fingerprint:
        raise RunError(f"{where}: is the study of another model than the profile's\n{_STRANGER}")
    if attributes.get("profile") != _profile_digest(profile):
        raise RunError(f"{where}: is of another profile of this model, with other prices\n{_STRANGER}")
    if attributes.get("hardware") != hardware():
        raise RunError(
            f"{where}: was begun on {attributes.get('hardware')}, and this is {hardware()}\n"
            "steps of different hardware do not compare: join from machines of the same kind"
        )
    try:
        task = Task.from_dict(attributes[_TASK])
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"{where}: damaged: {error}\n{_STRANGER}") from error
    space = make_space(with_floor(profile), task.batch_size, task.pins, task.restrictions, sliced=task.sliced)
    program = Program(space)
    if attributes.get("space") != _space_digest(program.space):
        raise RunError(f"{where}: was begun by another version of mesa-tune\n{_STRANGER}")
    return task, program


def _ready_attributes(study: Any, where: str) -> Mapping[str, Any]:
    """Return the user attributes, once the worker that begins the study has measured the solved plan."""
    if not study.study_name.startswith(NAME):
        raise RunError(f"{where}: not a study of mesa-tune search\n{_STRANGER}")
    for _ in range(_READY_SECONDS):
        if any(map(has_plan, study.get_trials(deepcopy=False))):
            return study.user_attrs  # type: ignore[no-any-return]
        time.sleep(1)
    raise RunError(f"{where}: nobody has measured the solved plan yet\nrun the command that begins the study")


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
