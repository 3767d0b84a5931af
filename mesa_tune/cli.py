"""The command line: the list of commands, and how errors are reported.

Exit statuses: 0 success; 1 an error, the user's code's and our own faults included, or a bad value, with at
most three lines on standard error; 2 an unknown option or command; 130 Ctrl-C. `--debug` shows the traceback
instead of the lines.
"""

from __future__ import annotations

import importlib
import re
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Annotated

import typer

from mesa_tune.commands.common import DEFAULT_RUN, Run, reserve_stdout
from mesa_tune.commands.guide.state import state_of
from mesa_tune.errors import BudgetError, MesaTuneError, typed_options
from mesa_tune.runs.provenance import own_version, running

# In the order of the help. The command `x` is the function `x` of the module mesa_tune.commands.x.
COMMANDS = ("init", "run", "profile", "search", "verify", "report", "tree", "diff", "demo", "doctor")

_EPILOG = (
    "Exit statuses: 0 success, 1 an error or a bad value, 2 an unknown option or command, 130 Ctrl-C. "
    "Without a command: this help, and the next command of the run in mesa-run."
)

_SPLIT_AMOUNT = re.compile(
    r"(--budget|--max-saved|--fits)[\0=]([0-9.]+)\0(%|[kMGT]?i?B)(?:\0|$)", re.IGNORECASE
)

_BAD_VALUES = ("BadParameter", "MissingParameter", "BadOptionUsage", "BadArgumentUsage")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `mesa-tune` with `arguments` (default: the arguments of the process) and exit with its status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    sys.exit(run(arguments))


def run(arguments: Sequence[str]) -> int:
    """Run `mesa-tune` with `arguments`, print any error on standard error, and return the exit status."""
    try:
        with running(arguments), typed_options(), nullcontext() if _debug(arguments) else _no_tracebacks():
            return _dispatch(list(arguments))
    except (KeyboardInterrupt, typer.Abort):
        print("stopped", file=sys.stderr)
        return 130
    except BaseException as error:
        if _debug(arguments) or (isinstance(error, SystemExit) and not _raised_by_user(error)):
            raise
        lines = _explained(error).splitlines()[:3]
        print("error: " + "\n".join(lines), file=sys.stderr)
        return error.exit_status if isinstance(error, MesaTuneError) else 1


def application() -> typer.Typer:
    """Import the modules of all `COMMANDS` (none imports anything heavy) and return the Typer application."""
    app = typer.Typer(
        name="mesa-tune",
        help="Find out what a model's activations cost, and how to store them within a memory budget.",
        epilog=_EPILOG,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    app.callback()(_options)
    for name in COMMANDS:
        module = importlib.import_module(f"mesa_tune.commands.{name}")
        app.command(name)(getattr(module, name))
    return app


def _dispatch(arguments: list[str]) -> int:
    _require_whole_amounts(arguments)
    command = typer.main.get_command(application())
    try:
        # With standalone_mode=False Typer raises errors and Ctrl-C here and returns the status of an Exit.
        with _plain_warnings(), reserve_stdout() if "--json" in arguments else nullcontext():
            status = command.main(arguments or ["--help"], prog_name="mesa-tune", standalone_mode=False)
            if not arguments:
                _say_next()
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        path = context.command_path if context else "mesa-tune"
        message = error.format_message()
        extra = re.fullmatch(r".*extra argument.*\((.*)\)", message)
        remedy = f"a policy is an option: --policy {extra[1]}\n" if extra and path.endswith(" verify") else ""
        print(f"error: {message}\n{remedy}see {path} --help", file=sys.stderr)
        return 1 if type(error).__name__ in _BAD_VALUES else 2
    return status if isinstance(status, int) else 0


def _own(arguments: Sequence[str]) -> Sequence[str]:
    """Return the arguments before `--`, after which those of a script stand."""
    return arguments[: arguments.index("--")] if "--" in arguments else arguments


def _debug(arguments: Sequence[str]) -> bool:
    return "--debug" in _own(arguments)


def _require_whole_amounts(arguments: list[str]) -> None:
    """Raise BudgetError for an amount in two words, such as `--budget 24 MB`."""
    if split := _SPLIT_AMOUNT.search("\0".join(_own(arguments))):
        option, number, unit = split.groups()
        raise BudgetError(
            f"{option} {number} {unit}: the shell makes two words of it\n"
            f'write {option} {number}{unit}, or "{number} {unit}" in quotes'
        )


def _say_next() -> None:
    """Print what the default run folder has, and the command that comes next."""
    state = state_of(Run(DEFAULT_RUN))
    print(f"\n{state.text}\nnext: {state.next}")


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Print each warning as one line, without the source line that raised it."""

    def show(message: Warning | str, *_: object, **__: object) -> None:
        print(f"warning: {message}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


@contextmanager
def _no_tracebacks() -> Iterator[None]:
    """Print one warning in place of the traceback of an error in `__del__` or in a thread."""

    def show(error: BaseException | None, *_: object) -> None:
        if error is not None:
            print(f"warning: {_explained(error).splitlines()[0]}", file=sys.stderr)

    before = sys.unraisablehook, threading.excepthook
    sys.unraisablehook = lambda raised: show(raised.exc_value)
    threading.excepthook = lambda raised: show(raised.exc_value)
    try:
        yield
    finally:
        sys.unraisablehook, threading.excepthook = before


def _raised_by_user(error: BaseException) -> bool:
    from mesa_tune.workload.user_code import raised_by_user

    return raised_by_user(error)


def _explained(error: BaseException) -> str:
    """Return what an error says, with its remedy."""
    if isinstance(error, MesaTuneError):
        return str(error)
    from mesa_tune.workload.user_code import is_out_of_memory, unexplained

    if is_out_of_memory(error):
        return "out of memory\nfree some, or profile with a smaller --batch-size"
    if not isinstance(error, OSError):
        return unexplained(error)
    path = f"{error.filename}: " if error.filename else ""
    return (
        f"{path}{error.strerror or error}\n"
        "check that the path can be read and written and that the disk has room; --debug shows the traceback"
    )


def _print_version(wanted: bool) -> None:
    if wanted:
        print(own_version())
        raise typer.Exit


_VersionOption = Annotated[
    bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
]


def _options(show_version: _VersionOption = False) -> None:
    """Options before the command; options after it belong to the command."""
