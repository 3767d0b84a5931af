"""`mesa-tune run`: a training script as it is, which says why memory ran out if it does."""

from __future__ import annotations

from typing import Annotated

import typer

from mesa_tune.commands.common import DebugOption
from mesa_tune.errors import RunError

CommandArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="-- COMMAND", help="A training script as it is.", show_default=False),
]


def run(command: CommandArgument = None, debug: DebugOption = False) -> None:
    """Run a script; if memory runs out, say what its step takes."""
    from mesa_tune.commands.script import explain

    if not command:
        raise RunError("run: needs a command\nsuch as mesa-tune run -- python train.py")

    raise typer.Exit(explain(command))
