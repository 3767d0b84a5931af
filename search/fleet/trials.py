"""The trials of a study, shared by its workers: who measures which, and which are lost.

The hard part: no trial may be lost or measured twice, though a worker can be killed at any time. Each trial
has a slot, the least number that no finished or running trial has. It seeds the sampler, so the trial in
place of a lost one is the same trial again. A running trial is lost if its worker's process has ended on this
machine, or if its worker has been silent for `SILENCE` seconds. A worker shows that it lives by counting the
attribute `beat` up: Optuna's heartbeats are for databases alone, stop with the server, and miss a worker that
was killed before the first one.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from threading import Event, Thread
from typing import Any, NamedTuple

from mesa_tune.runs.provenance import hardware
from mesa_tune.search.fleet.workers import is_dead, worker_name

BEAT = 15.0
"""Seconds between two signs of life."""
FINISHED = ("COMPLETE", "PRUNED")
"""States of finished trials. Pruned: measured until it was clear that the plan is no better than others."""
SILENCE = 120.0
"""Seconds without a sign of life after which a worker is given up."""


class Standing(NamedTuple):
    """Finished trials in the order of their slots, and running ones."""

    finished: list[Any]
    running: list[Any]

    @property
    def taken(self) -> int:
        return len(self.finished) + len(self.running)


@dataclass
class _Watch:
    """A running trial's last sign of life, and for how many seconds it has been looked at since."""

    beat: object
    seconds: float = 0.0


class Trials:
    """Trials of `study`. `shared`: other workers may be at work; otherwise all that run are lost."""

    def __init__(self, study: Any, *, shared: bool) -> None:
        self.study = study
        self.shared = shared
        self.worker = worker_name()
        self._watched: dict[int, _Watch] = {}
        self._looked = time.monotonic()
        if not shared:
            for trial in self._trials("RUNNING"):
                self.fail(trial.number)

    def standing(self) -> Standing:
        """Give up what is lost, and return the other trials."""
        trials = self._trials("RUNNING", *FINISHED)
        lost = self._lost([trial for trial in trials if not trial.state.is_finished()])
        for number in lost:
            self.fail(number)
        trials = [trial for trial in trials if trial.number not in lost]
        slots = slots_of(trials)
        finished = [trial for trial in trials if trial.state.is_finished()]
        finished.sort(key=lambda trial: slots[trial.number])
        return Standing(finished, [trial for trial in trials if not trial.state.is_finished()])

    def ask(self, limit: int | None) -> tuple[Any, int] | None:
        """Return a new trial and its slot; None if another worker just took it, or the last of `limit`."""
        from optuna.trial import Trial, TrialState, create_trial

        # Unlike `Study.ask`, this stores the worker together with the trial, so none is without.
        attributes = {"worker": self.worker, "hardware": hardware()}
        self.study.add_trial(create_trial(state=TrialState.RUNNING, user_attrs=attributes))
        trials = self._trials("RUNNING", *FINISHED)
        mine, *surplus = [trial for trial in trials if self._is_mine(trial)]
        for trial in surplus:  # stored twice, where the answer was lost
            self.fail(trial.number)
        slot = slots_of(trial for trial in trials if trial not in surplus)[mine.number]
        if limit is None or slot < limit:
            asked = Trial(self.study, mine._trial_id)
            asked.set_user_attr("slot", slot)
            if not self._is_contested(mine.number, slot):
                return asked, slot
        self.fail(mine.number)
        return None

    def finish(self, trial: Any, value: float, *, pruned: bool) -> None:
        """Store the value of a trial. If it was given up meanwhile, another takes its place.

        The value of a pruned trial is the one that it has reported.
        """
        from optuna.exceptions import UpdateFinishedTrialError
        from optuna.trial import TrialState

        state = TrialState.PRUNED if pruned else TrialState.COMPLETE
        with suppress(UpdateFinishedTrialError):
            self.study.tell(trial, None if pruned else value, state=state, skip_if_finished=True)

    def fail(self, number: int) -> None:
        """Give up a trial, unless it is finished: its slot is free again."""
        from optuna.exceptions import UpdateFinishedTrialError
        from optuna.trial import TrialState

        with suppress(UpdateFinishedTrialError):
            self.study.tell(number, state=TrialState.FAIL, skip_if_finished=True)

    @contextmanager
    def beating(self, trial: Any) -> Iterator[None]:
        """Show during the body that this worker lives."""
        if not self.shared:
            yield
            return
        ended = Event()
        thread = Thread(target=_beat, args=(trial, ended), daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(BEAT)

    def _trials(self, *states: str) -> list[Any]:
        from optuna.trial import TrialState

        wanted = tuple(TrialState[state] for state in states)
        return list(self.study.get_trials(deepcopy=False, states=wanted))

    def _is_contested(self, number: int, slot: int) -> bool:
        """Return True if another worker has the slot, too: one became free while both looked.

        Whoever looks last after both have stored their slot sees it. If both do, both ask again.
        """
        return self.shared and any(
            trial.number != number and trial.user_attrs.get("slot") == slot
            for trial in self._trials("RUNNING", *FINISHED)
        )

    def _is_mine(self, trial: Any) -> bool:
        return not trial.state.is_finished() and trial.user_attrs.get("worker") == self.worker

    def _lost(self, running: Iterable[Any]) -> set[int]:
        """Return the numbers of the running trials that no worker works on."""
        # After a pause of this worker or of the storage, the others are given time for a sign.
        passed = min(time.monotonic() - self._looked, 2 * BEAT)
        self._looked = time.monotonic()
        watched, self._watched = self._watched, {}
        lost = set()
        for trial in running:
            beat = trial.user_attrs.get("beat")
            watch = watched.get(trial.number)
            if watch is None or watch.beat != beat:
                watch = _Watch(beat)
            else:
                watch.seconds += passed
            self._watched[trial.number] = watch
            if watch.seconds > SILENCE or is_dead(trial.user_attrs.get("worker", "////")):
                lost.add(trial.number)
        return lost


def slots_of(trials: Iterable[Any]) -> dict[int, int]:
    """Return the slot of each trial by its number. The first without one gets the least that is free."""
    attributes: Mapping[int, Any] = {trial.number: trial.user_attrs.get("slot") for trial in trials}
    taken = set(attributes.values())
    free = (slot for slot in count() if slot not in taken)
    return {
        number: next(free) if attributes[number] is None else attributes[number]
        for number in sorted(attributes)
    }


def _beat(trial: Any, ended: Event) -> None:
    from optuna.exceptions import OptunaError
    from sqlalchemy.exc import SQLAlchemyError

    beats = count(1)
    # A storage that fails for good ends the trial itself.
    with suppress(OptunaError, SQLAlchemyError, OSError):
        while not ended.wait(BEAT):
            trial.set_user_attr("beat", next(beats))
