"""Disks that are full or may only be read, and memory that does not suffice, through the command line."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.damage import PROFILE, REPORT, SEARCH, VERIFY, Case, Home, Said, fresh

COMMANDS = {"profile": PROFILE, "search": SEARCH, "verify": VERIFY, "report": REPORT}


@pytest.fixture(name="disk")
def _disk(home: Home) -> Iterator[Path]:
    """A file system of 256 kB, mounted in the folder; where that is not allowed the test is skipped."""
    place = home.path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)]
    try:
        done = subprocess.run(mount, capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode:
        pytest.skip("only root may mount a small disk")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_full_disk(command: str, disk: Path, home: Home) -> None:
    shutil.copy("mesa-run/profile.json", disk)
    shutil.copy("mesa-run/policy.txt", disk)
    if command in ("profile", "search"):
        (disk / "policy.txt").unlink()
    if command == "profile":
        (disk / "profile.json").unlink()
    (disk / "ballast").write_bytes(bytes(shutil.disk_usage(disk).free))
    home.assert_refused(Case(f"{COMMANDS[command]} --run disk", ("disk/", "No space left", "room")))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_disk_that_may_only_be_read(command: str, disk: Path, home: Home) -> None:
    shutil.copytree("mesa-run", disk / "run")
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    home.assert_refused(Case(f"{COMMANDS[command]} --run disk/run", ("disk/run: cannot be written", "--run")))


@pytest.mark.parametrize("command", [*COMMANDS.values(), "init new.py"], ids=lambda text: text.split()[0])
def test_a_disk_that_fills_up(command: str, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Path.open

    def full(self: Path, mode: str = "r", *rest: Any, **more: Any) -> Any:
        if "w" in mode:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))
        return opened(self, mode, *rest, **more)

    monkeypatch.setattr(Path, "open", full)
    monkeypatch.setattr(Path, "write_bytes", lambda self, data: full(self, "wb"))
    home.assert_refused(Case(command, ("cannot be written: No space left", "room")))


def test_a_batch_that_does_not_fit_is_lowered_and_said(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FITS", "5")
    said = home.run(f"{PROFILE} --run new --batch-size 16")
    assert (said.status, said.err) == (0, "")
    assert "note: out of memory at batch size 16: profiled at 4 instead" in said.out


def test_a_batch_of_one_that_fits_alone(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FITS", "1")
    assert home.run(f"{PROFILE} --run new --quiet") == Said(0, "", "")
    search = "search --run new --budget 90% --batch-size 2 --trials 0"
    home.assert_refused(Case(search, ("batch size 2: the profile", "plan for 1")))


def test_a_study_that_runs_out_of_memory(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FITS", "2")
    advised = advice(SEARCH, home)
    assert advised.startswith("profile")
    assert advised.endswith("--batch-size 2")


def test_a_policy_whose_batch_does_not_fit(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh()()
    assert home.run("search --budget 900kB --batch-size 16 --trials 0 --quiet") == Said(0, "", "")
    monkeypatch.setenv("FITS", "8")
    advised = re.fullmatch("search .* --batch-size ([0-9]+) --force", advice(VERIFY, home))
    assert advised
    assert 4 < int(advised[1]) <= 8
    assert home.run(f"{VERIFY} --quiet") == Said(0, "", "")


def test_advice_stays_with_the_run(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("mesa-run").rename("elsewhere")
    monkeypatch.setenv("FITS", "2")
    assert "--run elsewhere" in advice(f"{VERIFY} --run elsewhere", home)


def advice(command: str, home: Home) -> str:
    """What the refusal of `command` for lack of memory says to type; it is typed, too, and works."""
    said = home.assert_refused(Case(command, ("out of memory on cpu at batch size", "would fit in")))
    advised = re.search("would fit in .*: `mesa-tune (.*)`", said.err)
    assert advised
    quick = "--trials 0" if advised[1].startswith("search") else "--fast"
    assert home.run(f"{advised[1]} --quiet {quick}") == Said(0, "", "")
    return advised[1]
