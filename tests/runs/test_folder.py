from __future__ import annotations

import errno
import json
import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest

from mesa_tune.errors import RunError
from mesa_tune.files import locked
from mesa_tune.runs.folder import Origin, Run, digest

INPUTS = digest("model", 1)
OTHER = digest("model", 2)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "mesa-run")


def test_writing_makes_the_folder_and_notes_in_json(run: Run) -> None:
    assert run.write(run.policy, "on fc:\n", INPUTS).read_text() == "on fc:\n"
    assert sorted(path.name for path in run.folder.iterdir()) == [".written.json", "policy.txt"]
    notes = json.loads((run.folder / ".written.json").read_text())
    assert notes["policy.txt"]["inputs"] == INPUTS


def test_paths_are_the_documented_ones(run: Run) -> None:
    paths = [run.profile, run.study, run.plan, run.policy, run.verify, run.report, run.figures]
    names = "profile.json study.db plan.json policy.txt verify.json report.html figures"
    assert " ".join(path.name for path in paths) == names


def test_the_same_inputs_remake_their_file_in_folders_too(run: Run) -> None:
    for path in (run.policy, run.figures / "pareto.png"):
        run.write(path, b"\x89first", INPUTS)
        run.write(path, b"\x89second", INPUTS)
        assert path.read_bytes() == b"\x89second"


def edited(run: Run) -> None:
    run.write(run.policy, "ours", INPUTS)
    run.policy.write_text("edited by hand")


def foreign(run: Run) -> None:
    run.folder.mkdir()
    run.policy.write_text("edited by hand")


def from_other_inputs(run: Run) -> None:
    run.write(run.policy, "edited by hand", OTHER)


def with_lost_notes(run: Run) -> None:
    run.write(run.policy, "edited by hand", INPUTS)
    (run.folder / ".written.json").write_text("{ not JSON")


@pytest.mark.parametrize(
    ("prepare", "said"),
    [
        (edited, "edited after"),
        (foreign, "did not write it"),
        (from_other_inputs, "other inputs"),
        (with_lost_notes, "did not write it"),
    ],
    ids=["edited", "foreign", "other inputs", "lost notes"],
)
def test_what_users_may_own_is_kept_unless_forced(
    run: Run, prepare: Callable[[Run], None], said: str
) -> None:
    prepare(run)
    with pytest.raises(RunError, match=said) as raised:
        run.write(run.policy, "new", INPUTS)
    assert "--force" in str(raised.value)
    assert len(str(raised.value).splitlines()) <= 3
    assert run.policy.read_text() == "edited by hand"
    Run(run.folder, force=True).write(run.policy, "new", INPUTS)
    assert run.policy.read_text() == "new"


def test_a_claimed_file_may_grow_and_be_resumed(run: Run) -> None:
    run.claim(run.profile, INPUTS)
    run.profile.write_text("partial")
    run.claim(run.profile, INPUTS)
    run.profile.write_text("whole")
    run.seal(run.profile)
    run.check(run.profile, INPUTS)
    run.profile.write_text("edited")
    with pytest.raises(RunError, match="edited"):
        run.check(run.profile, INPUTS)


def test_a_claim_from_other_inputs_is_refused(run: Run) -> None:
    run.claim(run.study, INPUTS)
    run.study.write_text("a database")
    with pytest.raises(RunError, match="other inputs"):
        run.claim(run.study, OTHER)


def test_a_refusal_names_what_differs(run: Run) -> None:
    run.write(run.plan, "x", Origin(INPUTS, {"budget": "6 GB", "seed": "0"}))
    with pytest.raises(RunError) as raised:
        run.check(run.plan, Origin(OTHER, {"budget": "4 GB", "seed": "0"}, remedy="do this"))
    assert str(raised.value) == f"{run.plan}: was made from other inputs (budget 6 GB, now 4 GB)\ndo this"


def test_derived_files_are_remade_unless_edited(run: Run) -> None:
    run.write(run.report, "x", INPUTS)
    run.write(run.report, "y", Origin(OTHER, derived=True))
    run.report.write_text("edited")
    with pytest.raises(RunError, match="edited"):
        run.write(run.report, "z", Origin(OTHER, derived=True))


def test_an_adopted_file_is_ours_as_it_was(run: Run, tmp_path: Path) -> None:
    other = Run(tmp_path / "other")
    other.adopt(other.profile, run.write(run.profile, "measured", INPUTS))
    other.check(other.profile, INPUTS)
    with pytest.raises(RunError, match="other inputs"):
        other.check(other.profile, OTHER)
    other.profile.write_text("mine")
    with pytest.raises(RunError, match="--force"):
        other.adopt(other.profile, run.profile)


def test_a_missing_file_names_its_command(run: Run) -> None:
    with pytest.raises(
        RunError, match=r"profile\.json: no such file\nrun `mesa-tune profile model\.py` first"
    ):
        run.require(run.profile, "mesa-tune profile model.py")


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "mesa-run").write_text("a file")
    run = Run(tmp_path / "mesa-run")
    with pytest.raises(RunError, match=r"is a file.*\n.*--run DIR"):
        run.write(run.policy, "new", INPUTS)


def test_a_full_disk_leaves_the_old_file(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.write(run.policy, "old", INPUTS)

    full = OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", Mock(side_effect=full))
        with pytest.raises(RunError, match="No space left"):
            run.write(run.policy, "new", INPUTS)
    assert run.policy.read_text() == "old"
    assert sorted(path.name for path in run.folder.iterdir()) == [".written.json", "policy.txt"]


def test_digest_depends_on_values_alone() -> None:
    assert digest({"a": 1, "b": Path("x")}) == digest({"b": "x", "a": 1})
    assert digest(1) != digest(2)


def note_many(folder: Path, first: str, count: int) -> None:
    run = Run(folder)
    for number in range(count):
        run.write(folder / f"{first}{number}.txt", first, INPUTS)


@pytest.mark.slow("processes")
def test_two_processes_lose_no_note(run: Run) -> None:
    # Spawned: other tests have started threads, whose locks a forked child would inherit.
    context = multiprocessing.get_context("spawn")
    others = [context.Process(target=note_many, args=(run.folder, name, 40)) for name in "ab"]
    for process in others:
        process.start()
    for process in others:
        process.join(60)
        assert process.exitcode == 0
    notes = json.loads((run.folder / ".written.json").read_text())
    assert len(notes) == 80
    assert all(note["sha256"] for note in notes.values())
    assert not (run.folder / ".written.lock").exists()


def test_a_lock_is_for_one_at_a_time(tmp_path: Path) -> None:
    counts = [0, 0]  # inside, and the most that were

    def enter() -> None:
        with locked(tmp_path / "lock"):
            counts[0] += 1
            counts[1] = max(counts)
            time.sleep(0.001)
            counts[0] -= 1

    with ThreadPoolExecutor(8) as threads:
        for done in [threads.submit(enter) for _ in range(64)]:
            done.result()
    assert counts == [0, 1]
