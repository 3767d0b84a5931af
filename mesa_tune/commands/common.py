"""Options, output and loading of the workload, shared by all commands."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from mesa_tune.errors import RunError
from mesa_tune.files import dump_json, write_atomically
from mesa_tune.notice import StatusLine
from mesa_tune.runs.folder import DEFAULT_RUN, Origin, Run, digest
from mesa_tune.units import (
    Budget,
    counted,
    format_bytes,
    format_table,
    format_time,
    parse_bytes,
    wrapped,
)

if TYPE_CHECKING:
    from mesa_tune.profiles.profile import Profile
    from mesa_tune.workload.workload import Workload

__all__ = [
    "DEFAULT_RUN",
    "Budget",
    "DebugOption",
    "DeviceOption",
    "ForceOption",
    "JsonOption",
    "Origin",
    "Output",
    "QuietOption",
    "Run",
    "RunOption",
    "counted",
    "digest",
    "dump_json",
    "format_bytes",
    "format_table",
    "format_time",
    "load_workload",
    "parse_bytes",
    "reserve_stdout",
    "wrapped",
    "write_atomically",
]

RunOption = Annotated[Path, typer.Option("--run", metavar="DIR", help="Folder of the run's files.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]
QuietOption = Annotated[bool, typer.Option("--quiet", help="Print nothing but errors and warnings.")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
ForceOption = Annotated[
    bool, typer.Option("--force", help="Overwrite files edited by hand or made from other inputs.")
]
DeviceOption = Annotated[
    str | None, typer.Option("--device", metavar="cuda|cpu", help="Default: cuda if there is one, else cpu.")
]

_documents: ContextVar[TextIO | None] = ContextVar("documents", default=None)


_BELOW = 18
"""Column of the text below a figure."""


@contextmanager
def reserve_stdout() -> Iterator[None]:
    """Reserve standard output for `Output.document`: what a model file prints goes to standard error."""
    token = _documents.set(sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _documents.reset(token)


class Output:
    """Output of a command: lines for people, or one JSON document for programs.

    Lines go to standard output; with `json` to standard error, so that standard output has only the document;
    with `quiet` they are not printed. Warnings always go to standard error.
    """

    def __init__(self, *, json: bool = False, quiet: bool = False) -> None:
        self.json = json
        self.quiet = quiet
        self._status = StatusLine()

    def line(self, text: str = "") -> None:
        """Print `text` for people to read."""
        if not self.quiet:
            print(text, file=sys.stderr if self.json else sys.stdout, flush=True)

    def device(self, device: str, note: str = "") -> None:
        """Print the device of the command, the first line of its output."""
        self.line(f"device: {device}" + (f" ({note})" if note else ""))

    def status(self, text: str) -> None:
        """Replace the last status on the terminal by `text`. Without a terminal print a line each minute."""
        if not self.quiet:
            self._status.show(text)

    def warn(self, text: str) -> None:
        """Print `text` as a warning."""
        print(f"warning: {text}", file=sys.stderr, flush=True)

    def document(self, kind: str, content: Mapping[str, Any]) -> None:
        """Print `content` as the JSON document `mesa-tune.<kind>/1` if the user asked for JSON."""
        if self.json:
            document = dump_json({"schema": f"mesa-tune.{kind}/1", **content})
            print(document, end="", file=_documents.get() or sys.stdout, flush=True)


def load_workload(folder: Run, profile: Profile, without: str) -> Workload:
    """Load the workload of `profile` from its model file. Raise RunError if the file is gone or changed.

    `without`: what can be done without the file, for the message.
    """
    from mesa_tune.workload.model_file import file_fingerprint
    from mesa_tune.workload.workload import Workload

    profile.require_prices()
    if profile.model is None:
        raise RunError(f"the profile was made in Python, so it names no model file\n{without}")
    if not Path(profile.model).is_file():
        raise RunError(
            f"{profile.model}: no such file, though it was profiled\n"
            f"put it back, or `mesa-tune profile model.py --force{folder.option}` on its new path\n{without}"
        )
    # A file that has changed is not even run.
    if file_fingerprint(Path(profile.model)) != profile.fingerprint:
        raise RunError(
            f"{profile.model}: changed since it was profiled, or a local module that it imports did\n"
            f"profile it again: `mesa-tune profile {profile.model} --force{folder.option}`"
        )
    workload = Workload.load(
        profile.model,
        batch_size=profile.batch_size,
        device=profile.device,
        autocast=profile.autocast or "none",
        seed=profile.seed,
    )
    return replace(workload, random_state=profile.random_state)


def noted(notes: Iterable[str]) -> list[str]:
    """Return notes in lines of at most 80 characters."""
    return [line for note in notes for line in wrapped(note, 6, first="note: ")]


def below(text: str) -> list[str]:
    """Return `text` in lines of at most 80 characters that stand below a figure."""
    return wrapped(text, _BELOW, first=_BELOW * " ")
