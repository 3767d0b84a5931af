"""`mesa-tune init`: write a model file to start from."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from mesa_tune.commands.common import (
    DebugOption,
    JsonOption,
    Output,
    QuietOption,
    write_atomically,
)
from mesa_tune.errors import RunError

PathArgument = Annotated[
    Path, typer.Argument(metavar="model.py", help="Where to write it.", show_default=False)
]
ForceOption = Annotated[bool, typer.Option("--force", help="Overwrite the file if it exists.")]


def init(
    path: PathArgument = Path("model.py"),
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
    force: ForceOption = False,
) -> None:
    """Write a model file with comments, to put your own model into."""
    if path.exists() and not force:
        raise RunError(
            f"{path}: exists already\n--force overwrites it; `mesa-tune init other.py` writes another"
        )
    write_atomically(path, files("mesa_tune").joinpath("templates/model.py").read_text("utf-8"))
    output = Output(json=as_json, quiet=quiet)
    output.line(f"wrote {path}; it runs as it is")
    output.line(f"next: put your model in, then `mesa-tune profile {path}`")
    output.document("init", {"path": str(path)})
