"""The state of a run folder, and the command that is named next."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mesa_tune import cli
from mesa_tune.commands.common import Run
from mesa_tune.commands.guide.state import state_of
from tests.damage import PROFILE, REPORT, SEARCH, VERIFY, Home, cut, gone, text, values

RUN = Run(Path("mesa-run"))


def test_an_empty_folder_begins_with_init(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert state_of(RUN).next == "mesa-tune init"
    text("model.py", "")()
    assert state_of(RUN).next == "mesa-tune profile model.py"


def test_each_command_leads_to_the_next(home: Home) -> None:
    gone("mesa-run")()
    for command, follows in (
        (PROFILE, "search --budget"),
        (SEARCH, "verify"),
        (VERIFY, "report"),
        ("report", "open mesa-run/report.html"),
    ):
        said = home.run(command)
        assert said.status == 0
        last = said.out.splitlines()[-1]
        assert last.startswith(f"next: {'' if follows.startswith('open') else 'mesa-tune '}{follows}")
        assert last == f"next: {state_of(RUN).next}"


def test_the_program_alone_says_what_is_next(home: Home) -> None:
    said = home.run("")
    assert said.status == 0
    assert said.out.splitlines()[-2].startswith("mesa-run: model.py was profiled, and planned for ")
    assert said.out.splitlines()[-1] == "next: mesa-tune report"


@pytest.mark.parametrize(
    ("change", "follows"),
    [
        (cut("mesa-run/profile.json"), "mesa-tune profile model.py --force"),
        (values("mesa-run/profile.json", partial=True), "mesa-tune profile model.py, which resumes it"),
        (text("model.py", "changed = 1"), "mesa-tune profile model.py --force, as the file has changed"),
        (gone("mesa-run/verify.json"), "mesa-tune verify"),
        (lambda: os.utime("mesa-run/policy.txt"), "mesa-tune verify"),
    ],
    ids=["damaged", "partial", "changed", "not verified", "edited"],
)
def test_what_is_missing_or_old_comes_next(change: object, follows: str, home: Home) -> None:
    assert callable(change)
    change()
    assert state_of(RUN).next == follows


def test_a_plan_older_than_its_profile_is_made_again(home: Home) -> None:
    os.utime("mesa-run/profile.json")
    command = state_of(RUN).next.removeprefix("mesa-tune ")
    assert command.startswith("search --budget ")
    assert home.run(f"{command} --trials 0").status == 0


def test_another_run_is_named_in_the_next_command(home: Home) -> None:
    Path("mesa-run").rename("other")
    assert state_of(Run(Path("other"))).next == "mesa-tune report --run other"
    assert cli.run([*REPORT.split(), "--run", "other"]) == 0
