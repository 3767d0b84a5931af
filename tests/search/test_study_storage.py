"""Studies on a journal and in SQLite: several processes, killed ones, full disks, files of another kind."""

from __future__ import annotations

import os
import resource
import signal
import sqlite3
from contextlib import closing
from pathlib import Path

import optuna
import pytest
from optuna.storages.journal import JournalFileBackend

from mesa_tune.errors import RunError
from mesa_tune.search.study import journal, study
from mesa_tune.search.study.journal import cut_half_line
from tests.search.meters import Stopped, Weighted
from tests.search.workers import (
    PROFILE,
    WEIGHTS,
    assert_none_is_repeated,
    child,
    done,
    ended,
    join,
    plan,
    wait_for,
)


def stored(path: Path) -> optuna.storages.BaseStorage:
    return optuna.storages.JournalStorage(JournalFileBackend(str(path)))


@pytest.fixture(name="path")
def _path(tmp_path: Path) -> Path:
    return tmp_path / "study"


@pytest.mark.slow("processes")
def test_two_processes_share_a_journal_and_one_may_be_killed(path: Path) -> None:
    begun = child(plan, 16, f"journal:{path}", Weighted(PROFILE, WEIGHTS, seconds=0.6))
    wait_for(lambda: path.is_file() and done(stored(path)))
    killed = child(join, f"journal:{path}", Stopped(PROFILE, WEIGHTS, pair=1, kills=True))
    joined = child(join, f"journal:{path}", Weighted(PROFILE, WEIGHTS, seconds=0.1))
    assert ended(killed) == -signal.SIGKILL
    assert (ended(begun), ended(joined)) == (0, 0)
    trials = done(stored(path))
    assert 16 <= len(trials) <= 18, "each worker looks at the number after a trial of its own"
    assert_none_is_repeated(trials)


@pytest.mark.slow("processes")
@pytest.mark.parametrize("kind", ["journal:", ""], ids=["journal", "sqlite"])
@pytest.mark.parametrize("pair", [1, 17])
def test_a_killed_study_goes_on(kind: str, pair: int, path: Path) -> None:
    assert ended(child(plan, 8, f"{kind}{path}", Stopped(PROFILE, WEIGHTS, pair=pair, kills=True))) == -9
    storage = stored(path) if kind else f"sqlite:///{path}"
    before = [trial.number for trial in done(storage)]
    assert plan(8, f"{kind}{path}").trials == 8
    trials = done(storage)
    assert [trial.number for trial in trials][: len(before)] == before
    assert_none_is_repeated(trials)


def test_the_length_is_the_whole_studys(path: Path) -> None:
    plan(4, f"journal:{path}")
    meter = Weighted(PROFILE, WEIGHTS)
    assert join(f"journal:{path}", meter).own == 0
    assert join(f"journal:{path}", meter, 6)[1] == 6
    assert plan(6, f"journal:{path}").trials == 6


def test_other_hardware_cannot_join(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan(1, f"journal:{path}")
    monkeypatch.setattr(study, "hardware", lambda: "another processor")
    with pytest.raises(RunError, match="this is another processor\nsteps of different hardware"):
        join(f"journal:{path}", Weighted(PROFILE, WEIGHTS))


@pytest.mark.slow("processes")
def test_a_second_worker_on_sqlite_is_refused(path: Path) -> None:
    first = child(plan, 10_000, path, Weighted(PROFILE, WEIGHTS, seconds=0.05))
    wait_for(lambda: path.is_file() and b"chosen" in path.read_bytes())
    with pytest.raises(RunError, match="another process works on this study") as caught:
        plan(4, path)
    assert "--storage journal:PATH" in str(caught.value)
    for storage in (str(path), f"sqlite:///{path}"):
        with pytest.raises(RunError, match="for one worker only"):
            join(storage, Weighted(PROFILE, WEIGHTS))
    first.kill()
    ended(first)
    plan(2, path)


def test_half_a_line_of_a_killed_process_is_cut(path: Path) -> None:
    plan(2, f"journal:{path}")
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"op_code":8,"worker')
    assert plan(3, f"journal:{path}").trials == 3
    assert path.read_bytes().startswith(whole + b'{"op_code"')
    path.write_bytes(b"x" * 1000)
    cut_half_line(path)
    assert not path.read_bytes()


@pytest.mark.slow("processes")
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


@pytest.mark.slow("processes")
@pytest.mark.parametrize("kind", ["journal:", ""], ids=["journal", "sqlite"])
def test_a_full_disk_loses_no_finished_trial(kind: str, path: Path) -> None:
    plan(3, f"{kind}{path}")
    assert ended(child(_with_full_disk, f"{kind}{path}", path.stat().st_size + 5000)) == 3
    count = len(done(stored(path) if kind else f"sqlite:///{path}"))
    assert count >= 3
    assert plan(count + 2, f"{kind}{path}").trials == count + 2


def _with_full_disk(storage: str, size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    with pytest.raises(RunError) as caught:
        plan(500, storage)
    assert len(str(caught.value).splitlines()) == 2
    assert str(caught.value).startswith(f"{storage}: the study cannot be used: ")
    raise caught.value


@pytest.mark.parametrize("content", ["text\n", "{}\n", "[1]\n"])
def test_a_file_that_is_no_journal_is_refused(content: str, path: Path) -> None:
    path.write_text(content, "utf-8")
    with pytest.raises(RunError, match="not the journal of a study"):
        plan(2, f"journal:{path}")
    assert path.read_text("utf-8") == content


def test_a_damaged_journal_is_refused(path: Path) -> None:
    path.write_text('{"op_code"\nnonsense\n', "utf-8")
    with pytest.raises(RunError, match="the study cannot be used") as caught:
        plan(2, f"journal:{path}")
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize("storage", ["journal:/dev/full", "/dev/full", "journal:", "journal:/dev/null/x"])
def test_what_is_no_file_is_refused(storage: str) -> None:
    with pytest.raises(RunError) as caught:
        plan(2, storage)
    assert len(str(caught.value).splitlines()) == 2
    assert str(caught.value).startswith(storage)


@pytest.mark.parametrize("content", [b"SQLite format 3\0" + b"\x07" * 4096, b"not a study" * 500])
def test_a_damaged_database_is_refused(content: bytes, path: Path) -> None:
    path.write_bytes(content)
    with pytest.raises(RunError, match=r"damaged, or not a study(.|\n)*--force"):
        plan(2, path)
    assert path.read_bytes() == content


def test_a_foreign_database_is_refused_and_left_alone(path: Path) -> None:
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE recipes (name TEXT)")
        database.commit()
    before = path.read_bytes()
    with pytest.raises(RunError, match="a database of something else"):
        plan(2, path)
    assert path.read_bytes() == before
