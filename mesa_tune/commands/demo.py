"""`mesa-tune demo`: the whole way on a real model and real data, in minutes, ending in one table."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from mesa_tune.commands.common import (
    DEFAULT_RUN,
    DebugOption,
    ForceOption,
    JsonOption,
    Output,
    QuietOption,
    Run,
    RunOption,
    format_bytes,
    format_table,
    format_time,
)
from mesa_tune.errors import RunError

if TYPE_CHECKING:
    from mesa_tune.policy import Policy
    from mesa_tune.profiler.verification import Verification

EXAMPLE = Path("examples") / "digits_vit.py"
BUDGET = "40%"
UNIFORM_LEVEL = 16


def demo(
    context: typer.Context,
    run: RunOption = DEFAULT_RUN,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
    force: ForceOption = False,
) -> None:
    """All of it on the digits ViT and real data, ending in one table."""
    output = Output(json=as_json, quiet=quiet)
    example = find_example()
    begin = time.perf_counter()
    shared = [flag for flag, given in (("--debug", debug), ("--force", force)) if given]
    shared += ["--run", str(run), *(["--quiet"] if as_json or quiet else [])]
    _walk(context, output, str(example), shared)
    rows = _measure(output, example, Run(run))
    _walk_on(context, output, ["report"], shared)
    output.line()
    for line in table(rows):
        output.line(line)
    output.line(f"\nthe report: {Run(run).report}; all in {format_time(time.perf_counter() - begin)}")
    output.document("demo", {"model": str(example), "rows": rows})


def find_example() -> Path:
    """The example's model file: in the current folder's checkout, or in the one that runs."""
    for root in (Path(), Path(__file__).resolve().parents[2]):
        if (root / EXAMPLE).is_file():
            return root / EXAMPLE
    raise RunError(
        f"{EXAMPLE}: not in {Path.cwd()}, and the installed package does not carry it\n"
        "run `mesa-tune demo` in a clone of the source, or profile your own: `mesa-tune init`"
    )


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The demo's table, of at most 80 columns."""
    header = ["", "saved", "peak", "step time", "gradient error", "test accuracy"]
    return format_table(header, [_cells(row) for row in rows])


def _cells(row: dict[str, Any]) -> list[str]:
    error = row["gradient_error"]
    return [
        row["name"],
        format_bytes(row["saved_bytes"]),
        format_bytes(row["peak_bytes"]),
        # Each policy was timed in turn with plain steps: on a busy machine only that ratio holds.
        f"{row['step_ratio']:.2f} x plain" if row["step_ratio"] else format_time(row["step_ms"] / 1000),
        f"{error:.1e}" if error else "0",
        f"{100 * row['accuracy']:.1f} %",
    ]


def _walk(context: typer.Context, output: Output, example: str, shared: list[str]) -> None:
    """The commands that a user would type, with their own output."""
    _walk_on(context, output, ["profile", example], shared)
    _walk_on(context, output, ["search", "--budget", BUDGET], shared)
    _walk_on(context, output, ["verify"], shared)


def _walk_on(context: typer.Context, output: Output, command: list[str], shared: list[str]) -> None:
    output.line(f"\n$ mesa-tune {' '.join(command)}")
    program = context.find_root().command
    status = program.main([*command, *shared], prog_name="mesa-tune", standalone_mode=False)
    if status:
        raise typer.Exit(status)


def _measure(output: Output, example: Path, folder: Run) -> list[dict[str, Any]]:
    """A row each for plain, uniform and searched: memory and time of real steps, accuracy of a training."""
    from mesa_tune.policy import Policy
    from mesa_tune.profiler.profile import Profile
    from mesa_tune.profiler.verification import Verification, verify
    from mesa_tune.workload.model_file import read_model_file
    from mesa_tune.workload.workload import Workload

    train: Callable[..., float] = read_model_file(example)[1]["train"]
    profile = Profile.load(folder.profile)
    workload = Workload.load(example, batch_size=profile.batch_size, device=profile.device)
    uniform = Policy.uniform(level=UNIFORM_LEVEL)
    output.line(f"\nmeasuring uniform {uniform_label()} for comparison")
    measured = {
        "searched": Verification.load(folder.verify),
        f"uniform {uniform_label()}": verify(workload, uniform),
    }
    policies = {"plain": None, f"uniform {uniform_label()}": uniform, "searched": Policy.load(folder.policy)}
    return [
        _row(name, measured.get(name), measured["searched"], _trained(output, train, name, policy))
        for name, policy in policies.items()
    ]


def uniform_label() -> str:
    """`4 bits`: how the table calls the uniform policy."""
    return f"{(UNIFORM_LEVEL - 1).bit_length()} bits"


def _trained(output: Output, train: Callable[..., float], name: str, policy: Policy | None) -> float:
    output.line(f"training: {name}")
    begin = time.perf_counter()
    accuracy = train(policy, seed=0)
    output.line(f"  test accuracy {100 * accuracy:.1f} % after {format_time(time.perf_counter() - begin)}")
    return accuracy


def _row(name: str, found: Verification | None, beside: Verification, accuracy: float) -> dict[str, Any]:
    """The row of what `found` verified; of the plain steps `beside` a policy where there is nothing found."""
    measured = found.policy if found else beside.baseline
    error = found.gradient_error if found else 0.0
    values = {quantity: getattr(measured, quantity) for quantity in ("saved_bytes", "peak_bytes", "step_ms")}
    ratio = found.step_ratio.median if found and found.step_ratio else None
    return {"name": name, **values, "step_ratio": ratio, "gradient_error": error, "accuracy": accuracy}
