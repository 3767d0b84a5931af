from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest

from mesa_tune import cli, notice
from mesa_tune.commands import doctor as doctor_module
from mesa_tune.commands.common import Output, format_table
from mesa_tune.errors import BudgetError, MesaTuneError
from mesa_tune.workload.workload import Workload
from tests.builders import Capture, Patch


@pytest.fixture(autouse=True)
def fresh_folder(tmp_path: Path, monkeypatch: Patch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def fails_with(error: BaseException, monkeypatch: Patch) -> None:
    """Lets every command end in `error`."""

    def fail(arguments: list[str]) -> int:
        raise error

    monkeypatch.setattr(cli, "_dispatch", fail)


# Statuses


def test_the_version_is_printed(capsys: Capture) -> None:
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize(
    "arguments", [["frobnicate"], ["--frob"], ["doctor", "--frob"], ["init", "--levle", "3"]], ids=" ".join
)
def test_unknown_options_and_commands_exit_with_2(arguments: list[str], capsys: Capture) -> None:
    assert cli.run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) <= 3
    assert "No such" in captured.err


def test_a_bad_value_exits_with_1(monkeypatch: Patch, capsys: Capture) -> None:
    import typer

    def steps(n: int = 5) -> None:
        raise AssertionError(n)

    def count(n: int) -> None:
        raise AssertionError(n)

    app = typer.Typer(rich_markup_mode=None)
    app.callback()(lambda: None)
    app.command()(count)
    app.command()(steps)
    monkeypatch.setattr(cli, "application", lambda: app)
    for arguments in (["steps", "--n", "banana"], ["steps", "--n"], ["count"]):
        assert cli.run(arguments) == 1
        captured = capsys.readouterr()
        assert captured.err.startswith("error: ")
        assert len(captured.err.splitlines()) <= 3


SYSTEM = "check that the path can be read and written and that the disk has room; --debug shows the traceback"
MEMORY = "error: out of memory\nfree some, or profile with a smaller --batch-size\n"
EXPLAINED: list[tuple[BaseException, int, str]] = [
    (BudgetError("budget 'banana': no\nwrite 6GB"), 1, "error: budget 'banana': no\nwrite 6GB\n"),
    (OSError(errno.ENOSPC, "No space left", "study.db"), 1, f"error: study.db: No space left\n{SYSTEM}\n"),
    (MemoryError(), 1, MEMORY),
    (RuntimeError("CUDA out of memory. Tried to"), 1, MEMORY),
    (KeyboardInterrupt(), 130, "stopped\n"),
]


@pytest.mark.parametrize(("error", "status", "text"), EXPLAINED, ids=repr)
def test_an_error_is_explained(
    error: BaseException,
    status: int,
    text: str,
    monkeypatch: Patch,
    capsys: Capture,
) -> None:
    fails_with(error, monkeypatch)
    assert cli.run(["search"]) == status
    assert capsys.readouterr().err == text


def test_a_policy_in_the_place_of_an_option_is_answered(capsys: Capture) -> None:
    assert cli.run(["verify", "other.txt"]) == 2
    assert "a policy is an option: --policy other.txt\n" in capsys.readouterr().err


@pytest.mark.parametrize("error", [ZeroDivisionError, MesaTuneError])
def test_with_debug_an_error_has_a_traceback(error: type[Exception], monkeypatch: Patch) -> None:
    fails_with(error("x"), monkeypatch)
    with pytest.raises(error):
        cli.run(["search", "--debug"])
    assert cli.run(["profile", "--", "train.py", "--debug"]) == 1


def test_an_error_of_our_own_is_said_to_be_a_fault_of_mesa_tune(monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.setattr(cli, "application", {}.popitem)
    assert cli.run(["search"]) == 1
    where, source, what = capsys.readouterr().err.splitlines()
    assert "cli.py:" in where
    assert "raised KeyError: 'popitem(): dictionary is empty'" in where
    assert "application()" in source
    assert "a fault of mesa-tune: please report it, with the traceback that --debug shows" in what


MODEL = """
from torch import nn
import torch
def model(): return nn.Linear(4, 4)
def batch(size): return torch.randn(size, 4)
def loss(model, batch): return model(batch).square().mean()
def fail(*_): {statement}
"""
STATEMENTS = {
    "no message": ("raise KeyError", "raised KeyError: (no message)"),
    "a long message": (r"raise ValueError('no\n' * 99 + 9999 * 'x')", "raised ValueError: no"),
    "exit": ("raise SystemExit(0)", "raised SystemExit: 0"),
    "recursion": ("fail()", "raised RecursionError: maximum recursion"),
    "no Exception": ("raise type('Stop', (BaseException,), {})", "raised Stop: (no message)"),
    "broken text": ("raise type('Mute', (ValueError,), {'__str__': None})", "raised Mute: (no message)"),
    "a missing file": ("open('nowhere')", "raised FileNotFoundError"),
}
PLACES = {
    "import": "fail()",
    "model": "def model(): fail()",
    "batch": "def batch(size): fail()",
    "loss": "def loss(model, batch): fail()",
    "optimizer": "def optimizer(parameters): fail()",
    "step": "def step(model, batch, optimizer): fail()",
    "backward": "def loss(model, batch): out = model(batch); out.register_hook(fail); return out.mean()",
    "parameters": "def model(): return type('M', (nn.Linear,), {'named_parameters': fail})(4, 4)",
}


@pytest.mark.parametrize(
    ("place", "kind"),
    [*((place, "no message") for place in PLACES), *(("loss", kind) for kind in STATEMENTS)],
)
def test_an_error_of_the_users_code_ends_in_three_lines(place: str, kind: str, capsys: Capture) -> None:
    statement, said = STATEMENTS[kind]
    Path("model.py").write_text(MODEL.format(statement=statement) + PLACES[place])
    assert cli.run(["profile", "model.py", "--fast", "--batch-size", "2", "--device", "cpu"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) <= 3
    assert lines[0].startswith("error: model.py:7: ")
    assert said in lines[0]
    assert max(map(len, lines)) < 500
    assert "fault of mesa-tune" not in lines[-1]


def test_an_error_in_del_is_one_warning(capsys: Capture) -> None:
    Path("model.py").write_text(
        MODEL.format(statement="raise KeyError") + "type('D', (), {'__del__': fail})()"
    )
    assert cli.run(["profile", "model.py", "--bytes-only", "--batch-size", "2", "--device", "cpu"]) == 0
    assert capsys.readouterr().err == "warning: model.py:7: raised KeyError: (no message)\n"


def test_ctrl_c_inside_a_command_reaches_us(monkeypatch: Patch) -> None:
    def interrupted() -> doctor_module.Finding:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor_module, "_python", interrupted)
    assert cli.run(["doctor"]) == 130


@pytest.mark.slow("processes")
def test_the_command_line_starts_without_the_heavy_packages() -> None:
    heavy = "{'optuna', 'pandas', 'matplotlib', 'scipy', 'sklearn', 'transformers', 'jinja2'}"
    code = f"import sys, mesa_tune.cli as c; c.application(); sys.exit(str({heavy} & set(sys.modules) or ''))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""


@pytest.mark.slow("processes")
def test_as_a_program_an_error_has_no_traceback() -> None:
    command = [sys.executable, "-m", "mesa_tune", "init", "model.py/below/a/file.py"]
    Path("model.py").write_text("")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: model.py/below/a/file.py: cannot be written")
    assert len(done.stderr.splitlines()) <= 3


def test_the_shell_completes_commands(monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.setenv("_MESA_TUNE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "mesa-tune ver")
    monkeypatch.setenv("COMP_CWORD", "1")
    with pytest.raises(SystemExit):
        cli.run([])
    assert capsys.readouterr().out.split() == ["verify"]


# init


def test_init_writes_a_model_file_that_works(capsys: Capture) -> None:
    assert cli.run(["init", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"schema": "mesa-tune.init/1", "path": "model.py"}
    assert "mesa-tune profile model.py" in captured.err
    loaded = Workload.load("model.py", device="cpu")
    assert loaded.batch_size == 1024
    loaded.compute_loss(loaded.build(), loaded.make_batch(4)).backward()


def test_init_keeps_what_is_there(capsys: Capture) -> None:
    Path("mine.py").write_text("mine")
    assert cli.run(["init", "mine.py"]) == 1
    assert "--force" in capsys.readouterr().err
    assert Path("mine.py").read_text() == "mine"
    assert cli.run(["init", "mine.py", "--force", "--quiet"]) == 0
    assert capsys.readouterr().out == ""
    assert "def model" in Path("mine.py").read_text()


# doctor


def test_doctor_says_how_to_build_the_cuda_kernels(monkeypatch: Patch) -> None:
    monkeypatch.setattr("torch.version.cuda", None)
    assert doctor_module._cuda_kernels().good
    monkeypatch.setattr("torch.version.cuda", "13.0")
    finding = doctor_module._cuda_kernels()
    assert not finding.good
    assert "CUDA 13.0 toolkit (nvcc) on PATH, MESA_TUNE_CUDA=1 pip install" in finding.remedy


def test_doctor_says_when_the_kernels_are_switched_off(monkeypatch: Patch) -> None:
    from mesa_tune import ops

    monkeypatch.setattr(ops, "native", lambda: False)
    monkeypatch.setenv("MESA_TUNE_REFERENCE", "1")
    assert "unset MESA_TUNE_REFERENCE" in doctor_module._kernels().remedy


# How commands speak


def test_lines_make_way_for_json(capsys: Capture) -> None:
    Output().line("for people")
    Output(json=True).line("aside")
    Output(quiet=True).line("nobody hears this")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("for people\n", "aside\n")


def test_warnings_are_never_quiet(capsys: Capture) -> None:
    Output(quiet=True).warn("look out")
    assert capsys.readouterr().err == "warning: look out\n"


def test_progress_without_a_terminal_is_a_line_each_minute(monkeypatch: Patch, capsys: Capture) -> None:
    seconds = iter([0.0, 30.0, 70.0, 70.0, 100.0, 131.0, 131.0])
    monkeypatch.setattr("time.monotonic", lambda: next(seconds))
    output = Output()
    for share in (1, 2, 3, 4):
        output.status(f"{share} of 4")
    output.status("")
    assert capsys.readouterr().err == "2 of 4\n4 of 4\n"


def test_a_document_is_whole_json(capsys: Capture) -> None:
    Output().document("plan", {"a": 1})
    assert capsys.readouterr().out == ""
    Output(json=True, quiet=True).document("plan", {"a": None})
    assert json.loads(capsys.readouterr().out) == {"schema": "mesa-tune.plan/1", "a": None}
    with pytest.raises(ValueError, match="not JSON compliant"):
        Output(json=True).document("plan", {"a": float("nan")})


def test_a_table_is_aligned() -> None:
    lines = format_table(["layer", "bytes"], [["blocks.0", "1"], ["head", "1,000"]])
    assert lines == ["layer     bytes", "blocks.0      1", "head      1,000"]


def test_a_float64_model_has_one_warning_and_nothing_to_search(capsys: Capture) -> None:
    Path("model.py").write_text(
        "from torch import float64, nn, randn\n"
        "def model(): return nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1)).double()\n"
        "def batch(size): return randn(size, 64, dtype=float64)\n"
        "def loss(model, batch): return model(batch).square().mean()\n"
    )
    notice._given.clear()
    assert cli.run(["profile", "model.py", "--fast", "--batch-size", "32", "--device", "cpu"]) == 0
    warned = capsys.readouterr().err
    assert warned.count("warning: ") == warned.count("tensors of torch.float64 stay uncompressed") == 1
    assert cli.run(["search", "--budget", "60%", "--trials", "0"]) == 1
    assert "all that its layers save is float64, which stays exact" in capsys.readouterr().err
