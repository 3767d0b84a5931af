"""Studies on a journal and in SQLite: several processes, killed ones, full disks, files of another kind."""

from __future__ import annotations

import os
import resource
import signal
import sqlite3
import time
from pathlib import Path

import optuna
import pytest
from optuna.storages.journal import JournalFileBackend

from mesa_tune.errors import RunError
from mesa_tune.search.fleet import journal
from mesa_tune.search.fleet.journal import cut_half_line
from mesa_tune.search.fleet.trials import Trials
from mesa_tune.search.fleet.workers import is_dead, worker_name
from tests.search.fleet_cases import (
    Killed,
    Slow,
    assert_none_lost_or_double,
    child,
    ended,
    finished,
    join,
    plan,
    trials_of,
    wait_for,
)

pytestmark = pytest.mark.slow("leaving")


def stored(path: Path) -> optuna.storages.BaseStorage:
    return optuna.storages.JournalStorage(JournalFileBackend(str(path)))


@pytest.fixture(name="path")
def _path(tmp_path: Path) -> Path:
    return tmp_path / "study"


def test_two_processes_share_a_journal(path: Path) -> None:
    begun = child(plan, 14, f"journal:{path}", Slow(0.1))
    wait_for(lambda: path.is_file() and b'"search"' in path.read_bytes())
    joined = child(join, f"journal:{path}", Slow(0.1))
    assert (ended(begun), ended(joined)) == (0, 0)
    assert_none_lost_or_double(trials_of(stored(path)), 14)
    done = finished(trials_of(stored(path)))
    assert len({trial.user_attrs["worker"] for trial in done}) == 2
    # Workers have other seeds: no two trials of them have the same parameters.
    assert len({str(trial.params) for trial in done}) == 14


@pytest.mark.parametrize("kind", ["journal:", ""], ids=["journal", "sqlite"])
@pytest.mark.parametrize("call", [1, 2, 6])
def test_a_study_killed_at_any_trial_ends_as_an_uninterrupted_one(kind: str, call: int, path: Path) -> None:
    assert ended(child(plan, 5, f"{kind}{path}", Killed(call))) == -signal.SIGKILL
    assert plan(5, f"{kind}{path}").to_dict() == plan(5, None).to_dict()
    storage = stored(path) if kind else f"sqlite:///{path}"
    assert_none_lost_or_double(trials_of(storage), 5)


def test_the_length_is_the_whole_studys(path: Path) -> None:
    plan(4, f"journal:{path}")
    assert join(f"journal:{path}", Slow(0)).own == 0
    assert join(f"journal:{path}", Slow(0), 7)[1:] == (7, 3)
    assert plan(7, f"journal:{path}").trials == 7


def test_a_second_worker_on_sqlite_is_refused(path: Path) -> None:
    first = child(plan, 10_000, path, Slow(0.05))
    wait_for(lambda: path.is_file() and b"chosen" in path.read_bytes())
    with pytest.raises(RunError, match="another process works on this study") as caught:
        plan(4, path)
    assert "--storage journal:PATH" in str(caught.value)
    for storage in (str(path), f"sqlite:///{path}"):
        with pytest.raises(RunError, match="for one worker only"):
            join(storage, Slow(0))
    first.kill()
    ended(first)
    plan(2, path)


def test_what_a_killed_process_left_half_written_in_sqlite_is_undone(path: Path) -> None:
    plan(3, path)
    assert ended(child(_killed_in_a_transaction, path)) == -signal.SIGKILL
    assert path.with_name("study-journal").stat().st_size
    assert plan(4, path).to_dict() == plan(4, None).to_dict()


def _killed_in_a_transaction(path: Path) -> None:
    database = sqlite3.connect(path)
    database.execute("PRAGMA cache_size = 1")
    database.execute("UPDATE trial_values SET value = 0")
    database.execute("UPDATE trial_user_attributes SET value_json = value_json || printf('%100000s', '')")
    os.kill(os.getpid(), signal.SIGKILL)


def test_half_a_line_of_a_killed_process_is_cut(path: Path) -> None:
    plan(2, f"journal:{path}")
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"op_code":8,"worker')
    assert plan(4, f"journal:{path}").to_dict() == plan(4, None).to_dict()
    assert path.read_bytes().startswith(whole + b'{"op_code"')
    path.write_bytes(b"x" * (1 << 17))
    cut_half_line(path)
    assert not path.read_bytes()
    path.write_bytes(b"line\n" + b"x" * (1 << 17))
    cut_half_line(path)
    assert path.read_bytes() == b"line\n"


def test_the_lock_of_a_killed_process_is_broken(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "LOCK_SECONDS", 3)
    monkeypatch.chdir(path.parent.parent)
    relative = path.relative_to(Path.cwd())
    plan(1, f"journal:{relative}")
    assert ended(child(_killed_with_the_lock, relative)) == -signal.SIGKILL
    assert plan(2, f"journal:{relative}").trials == 2


def _killed_with_the_lock(path: Path) -> None:
    journal._CuttingLock(path).acquire()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("kind", ["journal:", ""], ids=["journal", "sqlite"])
def test_a_full_disk_loses_no_finished_trial(kind: str, path: Path) -> None:
    plan(3, f"{kind}{path}")
    assert ended(child(_with_full_disk, f"{kind}{path}", path.stat().st_size + 5000)) == 3
    count = len(finished(trials_of(stored(path) if kind else f"sqlite:///{path}"))) + 2
    assert plan(count, f"{kind}{path}").to_dict() == plan(count, None).to_dict()


def _with_full_disk(storage: str, size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    with pytest.raises(RunError) as caught:
        plan(500, storage)
    assert len(str(caught.value).splitlines()) == 2
    assert str(caught.value).startswith(f"{storage}: the study cannot be used: ")
    raise caught.value


@pytest.mark.parametrize("content", ["text\n", "{}\n", '{"op_code"\n', "[1]\n"])
def test_a_file_that_is_no_journal_is_refused(content: str, path: Path) -> None:
    path.write_text(content, "utf-8")
    with pytest.raises(RunError, match="not the journal of a study"):
        plan(2, f"journal:{path}")
    assert path.read_text("utf-8") == content


@pytest.mark.parametrize("storage", ["journal:/dev/full", "/dev/full", "journal:", "journal:/dev/null/x"])
def test_what_is_no_file_is_refused(storage: str) -> None:
    with pytest.raises(RunError) as caught:
        plan(2, storage)
    assert len(str(caught.value).splitlines()) == 2
    assert str(caught.value).startswith(storage)


def test_a_worker_that_is_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    study = optuna.create_study()
    all_trials = Trials(study, shared=True)
    silent, alive = study.ask(), study.ask()
    for slot, trial in enumerate((silent, alive)):
        trial.set_user_attr("slot", slot)
        trial.set_user_attr("worker", "elsewhere/another/1/1/abc")
    for second in range(0, 130, 10):
        clock[0] = float(second)
        alive.set_user_attr("beat", second)
        assert len(all_trials.standing().running) == 2
    clock[0] = 140.0
    alive.set_user_attr("beat", 140)
    assert [trial.number for trial in all_trials.standing().running] == [alive.number]
    # A long pause of the one that looks says nothing about the others.
    clock[0] = 10_000.0
    assert len(all_trials.standing().running) == 1
    # What was given up is not stored any more, and its slot is free.
    all_trials.finish(silent, 1.0, pruned=False)
    assert study.trials[silent.number].state == optuna.trial.TrialState.FAIL
    asked = all_trials.ask(None)
    assert asked is not None
    assert asked[1] == 0


def test_a_trial_that_was_stored_twice_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    study = optuna.create_study()
    all_trials, add = Trials(study, shared=True), study.add_trial
    monkeypatch.setattr(study, "add_trial", lambda trial: (add(trial), add(trial)))
    slots = [asked[1] for asked in (all_trials.ask(None),) if asked]
    assert slots == [0]
    assert [trial.state.name for trial in study.trials] == ["RUNNING", "FAIL"]


def test_two_workers_never_have_one_slot() -> None:
    study = optuna.create_study()
    killed, late, quick = (Trials(study, shared=True) for _ in range(3))
    first = killed.ask(None)
    assert first is not None
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(optuna.trial.Trial, "set_user_attr", lambda *_: None)
        unfinished = late.ask(None)  # it has slot 1, but that is not stored yet
    killed.fail(first[0].number)
    # The quick one cannot know that the late one's slot is not the one that is free again.
    second = quick.ask(None)
    assert unfinished is not None
    assert second is not None
    assert (unfinished[1], second[1]) == (1, 1)
    unfinished[0].set_user_attr("slot", 1)
    assert late._is_contested(unfinished[0].number, 1)


def test_a_slot_beyond_the_length_is_given_back() -> None:
    all_trials = Trials(optuna.create_study(), shared=True)
    other = Trials(all_trials.study, shared=True)
    assert all_trials.ask(1) is not None
    assert other.ask(1) is None
    assert len(all_trials.standing().running) == 1


def test_only_processes_of_this_machine_are_known_to_be_dead() -> None:
    name = worker_name()
    host, machine, pid, start, _ = name.split("/")
    assert not is_dead(name)
    assert is_dead(f"{host}/{machine}/{pid}/{int(start) - 1}/x")
    assert not is_dead(f"{host}/another/{pid}/{int(start) - 1}/x")
    assert not is_dead("////")
