"""The command that is named next. All states of a run folder: golden/bare-states.txt."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mesa_tune import cli
from mesa_tune.commands.common import Run
from mesa_tune.commands.guide.state import state_of
from tests.damage import PROFILE, REPORT, SEARCH, VERIFY, Home, gone

RUN = Run(Path("mesa-run"))


@pytest.mark.slow("training")
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


def test_a_policy_that_was_edited_is_verified_again(home: Home) -> None:
    os.utime("mesa-run/policy.txt")
    assert state_of(RUN).next == "mesa-tune verify"


def test_a_plan_older_than_its_profile_is_made_again(home: Home) -> None:
    os.utime("mesa-run/profile.json")
    command = state_of(RUN).next.removeprefix("mesa-tune ")
    assert command.startswith("search --budget ")
    assert home.run(f"{command} --trials 0").status == 0


def test_another_run_is_named_in_the_next_command(home: Home) -> None:
    Path("mesa-run").rename("other")
    assert state_of(Run(Path("other"))).next == "mesa-tune report --run other"
    assert cli.run([*REPORT.split(), "--run", "other"]) == 0
