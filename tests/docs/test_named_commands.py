"""Commands and options that README and docs name, in blocks, in text and in tables: the program has them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import typer

from mesa_tune.cli import COMMANDS, application
from tests.docs.test_readme import PAGES, ROOT, blocks

NAMES = "|".join(COMMANDS)
OF_OTHERS = {"--ms_policy", "--get_mem", "--get_speed"}
"""Options of Mesa's scripts."""

pages = pytest.mark.parametrize(
    "page",
    [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "examples" / "README.md"],
    ids=lambda page: str(page.relative_to(ROOT)),
)


def fault_of(command: str) -> str:
    """Return what the real program does not understand of the words behind `mesa-tune`. Nothing runs."""
    name, *arguments = shlex.split(command, comments=True)
    program: Any = typer.main.get_command(application())
    with program.make_context("mesa-tune", [name, *arguments]) as context:
        found = program.get_command(context, name)
        try:
            found.make_context(name, arguments, parent=context)
        except typer.TyperException as error:
            return f"{type(error).__name__} in {command}: {error}"
    return ""


def fenced(page: Path) -> list[str]:
    """Return the commands in the blocks of a page, also those behind `srun` or `next:`."""
    found = re.findall(rf"\bmesa-tune ((?:{NAMES})\b.*)", "\n".join(blocks(page, "")))
    return [command.removesuffix(" &") for command in found]


def inline_code(page: Path) -> Iterable[str]:
    """Yield the code between backticks in text and tables."""
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    return (" ".join(code.split()) for code in re.findall(r"`([^`]+)`", text))


def inline(page: Path) -> list[str]:
    """Return the commands between backticks: `mesa-tune verify`, and without its name `search --smallest`."""
    pattern = re.compile(rf"(?:mesa-tune (?=\w)|(?=(?:{NAMES}) --))(.+)")
    return [match[1] for code in inline_code(page) if (match := pattern.fullmatch(code))]


@pages
def test_commands_in_blocks_are_understood(page: Path) -> None:
    assert not [fault for command in fenced(page) if (fault := fault_of(command))]


@pages
def test_commands_in_the_text_are_understood(page: Path) -> None:
    faults = [fault_of(command) for command in inline(page)]
    # A mention such as `mesa-tune profile` leaves the file out.
    assert not [fault for fault in faults if fault and not fault.startswith("MissingParameter")]


@pages
def test_options_in_the_text_exist(page: Path) -> None:
    program: Any = typer.main.get_command(application())
    known = {option for name in COMMANDS for each in program.commands[name].params for option in each.opts}
    codes = " ".join(code for code in inline_code(page) if code.startswith("--"))
    named = set(re.findall(r"--[a-z][\w-]*", codes))
    assert named <= known | OF_OTHERS | {"--help"}


def test_commands_are_found_wherever_they_stand() -> None:
    """The three tests above look at something."""
    assert sum(len(fenced(page)) for page in PAGES) > 20
    assert "search --join mesa-tune --trials 40" in fenced(ROOT / "docs" / "fleet.md")
    assert "profile model.py --bytes-only" in inline(ROOT / "docs" / "concepts.md")
    assert "search --json" in inline(ROOT / "docs" / "reference.md")


@pytest.mark.parametrize(
    "command",
    ["search --budgets 6GB", "verify --steps few", "verify policy.txt", "diff a b c", "profile --fast"],
)
def test_what_the_program_does_not_have_is_not_understood(command: str) -> None:
    assert fault_of(command)
