"""`mesa-tune init`: write a model file to start from, or one of the step of a training script."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Callable
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
from mesa_tune.errors import RunError, WorkloadError

PathArgument = Annotated[
    Path, typer.Argument(metavar="model.py", help="Where to write it.", show_default=False)
]
ForceOption = Annotated[bool, typer.Option("--force", help="Overwrite the file if it exists.")]
FromOption = Annotated[
    str | None,
    typer.Option(
        "--from", metavar="train.py", help="Record the step of this script, with arguments if it has any."
    ),
]


def init(
    path: PathArgument = Path("model.py"),
    script: FromOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
    force: ForceOption = False,
) -> None:
    """Write a model file: one to put your model into, or a script's."""
    if path.exists() and not force:
        raise RunError(
            f"{path}: exists already\n--force overwrites it; `mesa-tune init other.py` writes another"
        )
    output = Output(json=as_json, quiet=quiet)
    if script is None:
        write_atomically(path, files("mesa_tune").joinpath("templates/model.py").read_text("utf-8"))
        output.line(f"wrote {path}; it runs as it is")
        output.line(f"next: put your model in, then `mesa-tune profile {path}`")
    else:
        _record(path, script, output)
        output.line(f"next: mesa-tune profile {shlex.quote(str(path))}")
    output.document("init", {"path": str(path)})


def _record(path: Path, script: str, output: Output) -> None:
    """Record `script`, as typed, into the model file at `path`, and check that this runs."""
    from mesa_tune.commands.script import record

    command = shlex.split(script)
    if not command or path.suffix != ".py":
        raise RunError(
            "init --from: needs a script, and a model file that ends in .py\n"
            "such as mesa-tune init model.py --from train.py"
        )
    if command[0].endswith(".py"):
        command = [sys.executable, *command]

    record(command, script, path=path, take=taking(path, output), quiet_stdout=output.json)
    check(path)


def taking(path: Path, output: Output) -> Callable[[Path], None]:
    """Return what copies a model file, and the files beside it, from a folder to `path`."""

    def take(folder: Path) -> None:
        for file in sorted(folder.glob(f"{path.stem}*")):
            shutil.copyfile(file, path.parent / file.name)
            output.line(f"wrote {path.parent / file.name}")

    return take


def check(path: Path) -> None:
    """Run the recorded loss on a batch, and on half of it: a script may compute with its batch size."""
    from mesa_tune.workload.workload import Workload

    workload = Workload.load(path, device="cpu")
    model, size = workload.build(), workload.batch_size
    try:
        workload.compute_loss(model, workload.make_batch(size))
        size = -(-size // 2)
        workload.compute_loss(model, workload.make_batch(size))
    except WorkloadError as error:
        raise WorkloadError(
            f"{path}: was written, but loss() fails at batch size {size}\n{str(error).splitlines()[0]}\n"
            "correct it there; `mesa-tune profile -- COMMAND` takes the script as it is"
        ) from error
