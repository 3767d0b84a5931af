"""`mesa-tune demo`: all commands on a real model and real data, in minutes, and one table at the end."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
from mesa_tune.units import format_error

if TYPE_CHECKING:
    from mesa_tune.policy import Policy
    from mesa_tune.profiles.verification import Verification

EXAMPLE = Path("examples") / "digits_vit.py"
BUDGET = "40%"
UNIFORM_LEVEL = 16
FastOption = Annotated[bool, typer.Option("--fast", help="A fast profile, no study, and no training.")]


def demo(
    context: typer.Context,
    fast: FastOption = False,
    run: RunOption = DEFAULT_RUN,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
    force: ForceOption = False,
) -> None:
    """Run all commands on a digits ViT; ends with one table."""
    output = Output(json=as_json, quiet=quiet)
    example = find_example()
    begin = time.perf_counter()
    shared = [flag for flag, is_set in (("--debug", debug), ("--force", force)) if is_set]
    shared += ["--run", str(run), *(["--quiet"] if as_json or quiet else [])]
    quick = (["--fast"], ["--trials", "0"]) if fast else ([], [])
    commands = (["profile", str(example), *quick[0]], ["search", "--budget", BUDGET, *quick[1]], ["verify"])
    for command in commands:
        _run_command(context, output, command, shared)
    rows = _measure(output, example, Run(run), trained=not fast)
    _run_command(context, output, ["report"], shared)
    output.line()
    for line in table(rows):
        output.line(line)
    output.line(f"\nthe report: {Run(run).report}; all in {format_time(time.perf_counter() - begin)}")
    output.line("next: mesa-tune init, for a model.py of your own")
    output.document("demo", {"model": str(example), "rows": rows})


def find_example() -> Path:
    """Return the example's path: in the checkout of the current folder, or of this package."""
    for root in (Path(), Path(__file__).resolve().parents[2]):
        if (root / EXAMPLE).is_file():
            return root / EXAMPLE
    raise RunError(
        f"{EXAMPLE}: not in {Path.cwd()}, and the installed package does not contain it\n"
        "run `mesa-tune demo` in a clone of the source, or profile your own: `mesa-tune init`"
    )


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of the demo's table, of at most 80 characters each."""
    header = ["", "saved", "peak", "step time", "noise ratio"]
    trained = all(row["accuracy"] is not None for row in rows)
    return format_table([*header, *["test accuracy"] * trained], [_cells(row) for row in rows])


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        row["name"],
        format_bytes(row["saved_bytes"]),
        format_bytes(row["peak_bytes"]),
        # Steps of a policy alternate with plain ones: on a busy machine only their ratio is reliable.
        f"{row['step_ratio']:.2f} x plain" if row["step_ratio"] else format_time(row["step_ms"] / 1000),
        format_error(row["noise_ratio"]),
        *([] if row["accuracy"] is None else [f"{100 * row['accuracy']:.1f} %"]),
    ]


def _run_command(context: typer.Context, output: Output, command: list[str], shared: list[str]) -> None:
    output.line(f"\n$ mesa-tune {' '.join(command)}")
    program = context.find_root().command
    status = program.main([*command, *shared], prog_name="mesa-tune", standalone_mode=False)
    if status:
        raise typer.Exit(status)


def _measure(output: Output, example: Path, folder: Run, *, trained: bool) -> list[dict[str, Any]]:
    """Return rows for plain, uniform and searched: memory and time of real steps, accuracy if `trained`."""
    from mesa_tune.measure.verification import verify
    from mesa_tune.policy import Policy
    from mesa_tune.profiles.profile import Profile
    from mesa_tune.profiles.verification import Verification
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
        _row(
            name,
            measured.get(name),
            measured["searched"],
            _trained(output, train, name, policy) if trained else None,
        )
        for name, policy in policies.items()
    ]


def uniform_label() -> str:
    """Return the name of the uniform policy in the table: `4 bits`."""
    return f"{(UNIFORM_LEVEL - 1).bit_length()} bits"


def _trained(output: Output, train: Callable[..., float], name: str, policy: Policy | None) -> float:
    output.line(f"training: {name}")
    begin = time.perf_counter()
    accuracy = train(policy, seed=0)
    output.line(f"  test accuracy {100 * accuracy:.1f} % after {format_time(time.perf_counter() - begin)}")
    return accuracy


def _row(
    name: str, check: Verification | None, plain: Verification, accuracy: float | None
) -> dict[str, Any]:
    """Return the row of the policy that `check` measured; without one, of the plain steps in `plain`."""
    measured = check.policy if check else plain.baseline
    errors: dict[str, float | None] = {"gradient_error": 0.0, "noise_ratio": 0.0}
    if check is not None:
        errors = {"gradient_error": check.gradient_error, "noise_ratio": check.gradient_noise_ratio}
    values = {quantity: getattr(measured, quantity) for quantity in ("saved_bytes", "peak_bytes", "step_ms")}
    ratio = check.step_ratio.median if check and check.step_ratio else None
    return {"name": name, **values, "step_ratio": ratio, **errors, "accuracy": accuracy}
