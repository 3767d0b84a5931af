"""Bad input, end to end: three lines at most, status 1, no traceback, and the user's folder as it was.

Every case runs the real command line in a folder with a model file and a run that has been profiled, searched
and verified; `prepare` does the damage. Warnings count as lines: a person sees them too.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import shutil
import sqlite3
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mesa_tune import cli

MODEL = """
import os
import torch
import torch.nn.functional as F
from torch import nn

BATCH_SIZE = 4


def model():
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))


def batch(batch_size):
    return torch.randn(batch_size, 32, 64), torch.randint(64, (batch_size, 32))


def loss(model, batch):
    if len(batch[0]) > int(os.environ.get("FITS", "1000")):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())
"""
BUDGET = "80%"
PROFILE = "profile model.py --fast --force"
SEARCH = f"search --budget {BUDGET} --trials 2"
VERIFY = "verify --steps 1 --seeds 1"
REPORT = "report --format json"


@dataclass(frozen=True)
class Case:
    """`command` in the folder that `prepare` made bad must fail and say all of `said`."""

    command: str
    said: tuple[str, ...]
    prepare: Callable[[], object] = lambda: None


def snapshot(folder: Path) -> dict[str, bytes | None]:
    """The content of every file below `folder`, hidden ones too; None for folders."""
    return {
        str(path.relative_to(folder)): None if path.is_dir() else path.read_bytes()
        for path in folder.rglob("*")
    }


@pytest.fixture(scope="module", name="made")
def _made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """A folder in which everything has been done once, and a copy of it to start each test from."""
    home, kept = tmp_path_factory.mktemp("home") / "work", tmp_path_factory.mktemp("kept") / "work"
    home.mkdir()
    before = Path.cwd()
    os.chdir(home)
    (home / "model.py").write_text(MODEL)
    for command in (PROFILE, SEARCH, VERIFY):
        assert cli.run([*shlex.split(command), "--quiet"]) == 0
    os.chdir(before)
    shutil.copytree(home, kept)
    yield home, kept


@pytest.fixture(name="home", autouse=True)
def _home(made: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder as it was made, and the current one. Always the same path: the profile names its model by it."""
    home, kept = made
    shutil.rmtree(home)
    shutil.copytree(kept, home)
    monkeypatch.chdir(home)
    return home


def said_by(command: str, capfd: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Status, standard output and standard error of `command`, warnings included."""
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        status = cli.run(shlex.split(command))
    out, err = capfd.readouterr()
    return status, out, err + "".join(f"{warning.message}\n" for warning in given)


def assert_refused(case: Case, home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    case.prepare()
    before = snapshot(home)
    status, _, err = said_by(case.command, capfd)
    assert status == 1
    assert err.startswith("error: ")
    assert len(err.splitlines()) <= 3
    assert "Traceback" not in err
    for part in case.said:
        assert part in err
    assert snapshot(home) == before


# What prepares a case


def text(path: str, content: str | bytes) -> Callable[[], None]:
    return lambda: void(Path(path).write_bytes(content if isinstance(content, bytes) else content.encode()))


def void(_: object) -> None:
    return None


def fresh(*more: Callable[[], object]) -> Callable[[], None]:
    """The run has its profile and nothing else; then `more`."""

    def prepare() -> None:
        for name in ("plan.json", "policy.txt", "verify.json", "study.db"):
            Path("mesa-run", name).unlink()
        notes = Path("mesa-run/.written.json")
        notes.write_text(json.dumps({"profile.json": json.loads(notes.read_text())["profile.json"]}))
        for change in more:
            change()

    return prepare


def cut(path: str) -> Callable[[], None]:
    """Half of the file is lost."""
    return lambda: void(Path(path).write_bytes(Path(path).read_bytes()[: Path(path).stat().st_size // 2]))


def gone(*paths: str) -> Callable[[], None]:
    def remove() -> None:
        for path in paths:
            shutil.rmtree(path) if Path(path).is_dir() else Path(path).unlink()

    return remove


def changed(path: str, **values: Any) -> Callable[[], None]:
    """Keys of the JSON document at `path` have other values."""

    def change() -> None:
        document = json.loads(Path(path).read_text())
        Path(path).write_text(json.dumps({**document, **values}))

    return change


def model_file(old: str, new: str) -> Callable[[], None]:
    """The model file with `old` replaced."""
    assert old in MODEL
    return text("model.py", MODEL.replace(old, new))


def loss_that(line: str) -> Callable[[], None]:
    return text("model.py", MODEL.split("def loss")[0] + f"def loss(model, batch):\n    {line}\n")


MODEL_FILES = {
    "missing": Case("profile nowhere.py", ("nowhere.py: no such file", "mesa-tune init")),
    "a folder": Case("profile mesa-run", ("mesa-run: cannot be read", "mesa-tune init")),
    "syntax error": Case(
        PROFILE, ("model.py:10: SyntaxError", "def model(:"), model_file("model()", "model(:")
    ),
    "raises": Case(
        PROFILE, ("model.py:23", "ZeroDivisionError", "1 / 0"), text("model.py", MODEL + "\n1 / 0\n")
    ),
    "no model": Case(PROFILE, ("model.py", "model is missing"), model_file("def model", "def net")),
    "no batch": Case(PROFILE, ("model.py", "batch is missing"), model_file("def batch", "def data")),
    "no loss": Case(PROFILE, ("model.py", "loss is missing"), model_file("def loss", "def cost")),
    "model raises": Case(
        PROFILE, ("model.py:11: model() raised KeyError: 'x'",), model_file("nn.Seq", "{}['x']; nn.Seq")
    ),
    "batch raises": Case(
        PROFILE,
        ("model.py:15: batch() raised KeyError: 'x'",),
        model_file("torch.randn", "{}['x'], torch.randn"),
    ),
    "loss raises": Case(PROFILE, ("model.py:19: loss() raised KeyError: 'x'",), loss_that("return {}['x']")),
    "optimizer raises": Case(
        PROFILE,
        ("model.py:23: optimizer() raised KeyError: 'x'",),
        text("model.py", MODEL + "\ndef optimizer(parameters): {}['x']\n"),
    ),
    "step of the optimizer raises": Case(
        PROFILE,
        ("model.py:24: optimizer.step() raised KeyError: 'x'",),
        text(
            "model.py",
            MODEL
            + "\nclass Mine(torch.optim.SGD):\n    def step(self): return {}['x']\ndef optimizer(parameters): return Mine(parameters)\n",
        ),
    ),
    "backward raises": Case(
        PROFILE,
        ("model.py:18", "loss()", "inplace"),
        loss_that("out = model(batch[0]).sigmoid(); out.add_(1); return out.mean()"),
    ),
    "model is none": Case(PROFILE, ("model.py:10: model() returned None",), model_file("return nn", "nn")),
    "a loss of many numbers": Case(
        PROFILE,
        ("model.py:18: loss() returned a tensor of shape (4, 32, 64)", ".mean()"),
        loss_that("return model(batch[0])"),
    ),
    "a loss that is a number": Case(
        PROFILE, ("model.py:18: loss() returned a float",), loss_that("return model(batch[0]).mean().item()")
    ),
    "a loss without gradient": Case(
        PROFILE, ("model.py:18: loss()", "no gradient"), loss_that("return model(batch[0]).mean().detach()")
    ),
    "a loss without model": Case(
        PROFILE,
        (
            "model.py",
            "gives every parameter the gradient zero",
        ),
        loss_that("return (0 * model(batch[0])).mean()"),
    ),
    "a loss that is NaN": Case(
        PROFILE,
        ("model.py:18: loss() returned nan",),
        loss_that("return model(batch[0]).mean() * float('nan')"),
    ),
    "a batch on the wrong device": Case(
        PROFILE,
        ("model.py:14: batch() returned a tensor on the device meta", "CPU"),
        model_file("32, 64)", "32, 64, device='meta')"),
    ),
    "a model on the wrong device": Case(
        PROFILE,
        ("model.py:10: model()", "0.weight is on the device meta", "CPU"),
        model_file("nn.Linear(64, 64)", "nn.Linear(64, 64, device='meta')"),
    ),
    "a loss of two devices": Case(
        PROFILE,
        ("model.py:19: loss() raised", "device"),
        loss_that("return (model(batch[0]) - torch.ones(64, device='meta')).mean()"),
    ),
    "batch size of text": Case(PROFILE, ("batch size '4'", "BATCH_SIZE"), model_file("= 4", "= '4'")),
    "autocast unknown": Case(PROFILE + " --autocast int8", ("autocast 'int8'", "bfloat16")),
    "batch size 0": Case(PROFILE + " --batch-size 0", ("batch size 0", "--batch-size")),
    "batch size banana": Case(PROFILE + " --batch-size banana", ("--batch-size", "mesa-tune profile --help")),
    "device unknown": Case(PROFILE + " --device tpu", ("device 'tpu'", "--device")),
    "not even one sample fits": Case(
        PROFILE,
        ("out of memory", "batch size 1"),
        loss_that("raise torch.OutOfMemoryError('CUDA out of memory')"),
    ),
}


@pytest.mark.parametrize("case", MODEL_FILES.values(), ids=list(MODEL_FILES))
def test_a_bad_model_file(case: Case, home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert_refused(case, home, capfd)


RUNS = {
    "budget banana": Case("search --budget banana", ("budget 'banana'", "6GB")),
    "budget 0": Case("search --budget 0", ("budget '0'", "6GB")),
    "budget -1GB": Case("search --budget -1GB", ("budget '-1GB'", "6GB")),
    "budget -1GB with =": Case("search --budget=-1GB", ("budget '-1GB'", "6GB")),
    "budget nan": Case("search --budget nan%", ("budget 'nan%'", "6GB")),
    "no budget": Case("search", ("--budget", "mesa-tune search --help")),
    "budget below the reachable": Case(
        "search --budget 1kB", ("static bytes", "smallest reachable peak"), fresh()
    ),
    "budget that a smaller batch keeps": Case(
        "search --budget 64%", ("would fit", "--batch-size 1"), fresh()
    ),
    "max-saved banana": Case(SEARCH + " --max-saved banana", ("max-saved 'banana'", "6GB"), fresh()),
    "max-saved below the reachable": Case(
        SEARCH + " --max-saved 1", ("max-saved 1 B", "fewest saved bytes"), fresh()
    ),
    "max-slowdown 0": Case(SEARCH + " --max-slowdown 0", ("max-slowdown 0",), fresh()),
    "trials -1": Case(SEARCH + " --trials -1", ("trials -1", "0 solves"), fresh()),
    "timeout 0": Case(SEARCH + " --timeout 0", ("timeout 0",), fresh()),
    "batch size 0 to plan for": Case(SEARCH + " --batch-size 0", ("batch size 0",), fresh()),
    "storage of no kind": Case(SEARCH + " --storage banana://x", ("banana://x",), fresh()),
    "storage in a folder that is not there": Case(
        SEARCH + " --storage sqlite:///no/such/folder/x.db", ("study",), fresh()
    ),
    "search before profile": Case(
        SEARCH, ("profile.json: no such file", "`mesa-tune profile model.py`"), gone("mesa-run")
    ),
    "verify before profile": Case(
        VERIFY, ("profile.json: no such file", "`mesa-tune profile model.py`"), gone("mesa-run")
    ),
    "report before profile": Case(
        REPORT, ("profile.json: no such file", "`mesa-tune profile model.py`"), gone("mesa-run")
    ),
    "verify before search": Case(
        VERIFY,
        ("policy.txt: no such file", "`mesa-tune search"),
        gone("mesa-run/policy.txt", "mesa-run/plan.json"),
    ),
    "steps 0": Case("verify --steps 0", ("--steps", "mesa-tune verify --help")),
    "format pdf": Case("report --format pdf", ("pdf", "html")),
    "profile was made by another": Case(
        "profile model.py", ("profile.json", "--force"), text("mesa-run/profile.json", "mine")
    ),
    "policy.txt edited": Case(
        SEARCH, ("policy.txt: was edited", "--force"), text("mesa-run/policy.txt", "on fc:\n")
    ),
    "plan.json edited": Case(
        SEARCH, ("plan.json: was edited", "--force"), changed("mesa-run/plan.json", gap=1.0)
    ),
    "verify.json edited": Case(
        VERIFY, ("verify.json: was edited", "--force"), changed("mesa-run/verify.json", steps=7)
    ),
    "report.json foreign": Case(
        REPORT, ("report.json: was there before", "--force"), text("mesa-run/report.json", "{}")
    ),
    "study.db cut": Case(SEARCH, ("study.db: damaged", "--force"), cut("mesa-run/study.db")),
    "study.db foreign": Case(
        SEARCH, ("study.db", "--force"), text("mesa-run/study.db", "not a study\n" * 300)
    ),
    "study.db of another kind": Case(
        SEARCH, ("study.db", "--force"), lambda: another_database("mesa-run/study.db")
    ),
    "study.db a folder": Case(
        SEARCH, ("study.db",), lambda: (gone("mesa-run/study.db")(), Path("mesa-run/study.db").mkdir())
    ),
    "study.db of a newer optuna": Case(
        SEARCH, ("study.db", "--force"), lambda: newer_study("mesa-run/study.db")
    ),
    "policy.txt foreign": Case(
        VERIFY, ("policy.txt:2", "no colon"), fresh(text("mesa-run/policy.txt", MODEL))
    ),
    "policy.txt binary": Case(
        VERIFY, ("policy.txt", "mesa-tune search"), text("mesa-run/policy.txt", b"\x89PNG\r\n")
    ),
    "policy.txt misspelt": Case(
        VERIFY,
        ("policy.txt:3", "lvel", "level"),
        text("mesa-run/policy.txt", "on fc:\n    by_index: all\n    lvel: 4\n"),
    ),
    "policy that is not there": Case(
        VERIFY + " --policy other.txt", ("other.txt: no such policy file", "mesa-tune search")
    ),
    "policy of another model": Case(
        VERIFY + " --policy other.txt",
        ("another model",),
        lambda: (policy_of_another_model("other.txt"), fresh()()),
    ),
    "policy of layers that are not there": Case(
        VERIFY + " --policy other.txt",
        ("other.txt:2", "nowhere"),
        fresh(text("other.txt", "on fc:\n    by_name: nowhere\n    level: 4\n")),
    ),
    "search after the model file changed": Case(
        SEARCH,
        ("model.py: changed since it was profiled", "mesa-tune profile"),
        text("model.py", MODEL + "# more\n"),
    ),
    "verify after the model file changed": Case(
        VERIFY,
        ("model.py: changed since it was profiled", "mesa-tune profile"),
        text("model.py", MODEL + "# more\n"),
    ),
    "search after the model file went": Case(
        SEARCH, ("model.py: no such file", "--trials 0"), gone("model.py")
    ),
    "verify after the model file went": Case(
        VERIFY, ("model.py: no such file", "mesa-tune profile"), gone("model.py")
    ),
    "search without a model file": Case(
        SEARCH, ("names no model file", "--trials 0"), fresh(changed("mesa-run/profile.json", model=None))
    ),
    "verify without a model file": Case(
        VERIFY, ("made in Python",), changed("mesa-run/profile.json", model=None)
    ),
    "init over a file": Case("init model.py", ("model.py: is there already", "--force")),
    "init below a file": Case("init model.py/more.py", ("model.py/more.py",)),
}


def another_database(path: str) -> None:
    Path(path).unlink()
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE customers (name TEXT)")
        database.commit()


def newer_study(path: str) -> None:
    with closing(sqlite3.connect(path)) as database:
        database.execute("UPDATE alembic_version SET version_num = 'v9.9.9'")
        database.execute("UPDATE version_info SET schema_version = 99")
        database.commit()


def policy_of_another_model(path: str) -> None:
    text = Path("mesa-run/policy.txt").read_text()
    Path(path).write_text(re.sub("layers [0-9a-f]*", "layers 0123456789abcdef", text))


@pytest.mark.parametrize("case", RUNS.values(), ids=list(RUNS))
def test_a_bad_run(case: Case, home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert_refused(case, home, capfd)


DAMAGE: dict[str, Callable[[str], Callable[[], None]]] = {
    "empty": lambda path: text(path, ""),
    "cut": cut,
    "binary": lambda path: text(path, b"\xff\xfe\0"),
    "a list": lambda path: text(path, "[]"),
    "foreign": lambda path: text(path, '{"schema": "somebody.else/1"}'),
    "schema alone": lambda path: text(path, json.dumps({"schema": f"mesa-tune.{Path(path).stem}/1"})),
    "newer": lambda path: changed(path, schema=f"mesa-tune.{Path(path).stem}/2"),
    "nested deeply": lambda path: text(path, "[" * 100_000),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize(
    ("command", "name"),
    [
        (SEARCH, "profile.json"),
        (VERIFY, "profile.json"),
        (REPORT, "profile.json"),
        (VERIFY, "plan.json"),
        (REPORT, "plan.json"),
        (REPORT, "verify.json"),
    ],
    ids=lambda value: value.split()[0],
)
def test_a_damaged_document(
    command: str, name: str, damage: str, home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = f"mesa-run/{name}"
    assert_refused(Case(command, (name, "--force"), DAMAGE[damage](path)), home, capfd)


# The run folder cannot be written


@pytest.fixture(name="disk")
def _disk(home: Path) -> Iterator[Path]:
    """An empty file system of a few blocks, mounted in the folder; skipped where that is not allowed."""
    place = home / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", place], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("only root may mount a small disk")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


COMMANDS = {"profile": "profile model.py --fast", "search": SEARCH, "verify": VERIFY, "report": "report"}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_full_disk(command: str, disk: Path, home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    if command != "profile":
        shutil.copy("mesa-run/profile.json", disk)
    if command == "verify":
        shutil.copy("mesa-run/policy.txt", disk)
    free = shutil.disk_usage(disk).free
    (disk / "ballast").write_bytes(bytes(free))
    assert_refused(Case(COMMANDS[command] + " --run disk", ("disk", "room")), home, capfd)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_disk_that_may_only_be_read(
    command: str, disk: Path, home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree("mesa-run", disk / "run")
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    assert_refused(Case(COMMANDS[command] + " --run disk/run", ("cannot be written", "--run")), home, capfd)


def test_a_full_disk_is_told_wherever_it_is_met(
    home: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Path.open

    def full(self: Path, mode: str = "r", *rest: Any, **more: Any) -> Any:
        if "w" in mode:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))
        return opened(self, mode, *rest, **more)

    fresh()()
    Path("mesa-run/policy.txt").write_text("")
    monkeypatch.setattr(Path, "open", full)
    monkeypatch.setattr(Path, "write_bytes", lambda self, data: full(self, "wb"))
    for command in (SEARCH.replace("policy.txt", ""), VERIFY, REPORT, PROFILE, "init new.py"):
        assert_refused(
            Case(command + (" --force" if "search" in command else ""), ("No space left", "room")),
            home,
            capfd,
        )


@pytest.mark.parametrize(
    "command", ["profile model.py --fast --run model.py", "profile model.py --run model.py/below"]
)
def test_a_file_where_the_run_should_be(command: str, home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert_refused(Case(command, ("model.py: is a file", "--run DIR")), home, capfd)


# Out of memory: which batch size would fit


def test_a_batch_that_does_not_fit_is_lowered_and_said(
    home: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FITS", "5")
    status, out, err = said_by("profile model.py --fast --run new --batch-size 16", capfd)
    assert (status, err) == (0, "")
    assert "note: out of memory at batch size 16: profiled at 4 instead" in out


def test_a_study_that_runs_out_of_memory(
    home: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FITS", "2")
    advised = advice(SEARCH, home, capfd)
    assert "profile" in advised
    assert advised.endswith("--batch-size 2")


def test_a_policy_whose_batch_does_not_fit(
    home: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh()()
    assert said_by("search --budget 1MB --batch-size 16 --trials 0 --quiet", capfd) == (0, "", "")
    monkeypatch.setenv("FITS", "8")
    advised = advice(VERIFY, home, capfd)
    assert 4 < int(re.search("--batch-size ([0-9]+)", advised)[1]) <= 8
    assert said_by(VERIFY, capfd)[0] == 0


def advice(command: str, home: Path, capfd: pytest.CaptureFixture[str]) -> str:
    """What the message of `command` says to type; it is typed, too."""
    assert_refused(Case(command, ("out of memory on cpu at batch size", "would fit")), home, capfd)
    advised = re.search("would fit in .*: `mesa-tune (.*)`", said_by(command, capfd)[2])
    assert advised
    fast = "--trials 0" if advised[1].startswith("search") else "--fast"
    assert said_by(f"{advised[1]} --quiet {fast}", capfd) == (0, "", "")
    return advised[1]


def test_the_batch_size_that_a_refused_budget_names_is_planned_for(
    home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fresh()()
    _, _, err = said_by("search --budget 64% --trials 0", capfd)
    advised = re.search(r"would fit \((.*)\)", err)
    assert advised
    assert said_by(f"search {advised[1]} --trials 0 --quiet", capfd) == (0, "", "")


def test_a_policy_of_another_model_is_applied_by_force(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    policy_of_another_model("other.txt")
    assert said_by(VERIFY + " --policy other.txt --force --quiet", capfd) == (0, "", "")


# As programs


PROGRAMS = {
    "missing model file": ("profile nowhere.py", "nowhere.py: no such file"),
    "loss raises": ("profile raises.py", "raises.py:6: the model file raised"),
    "search before profile": ("search --budget 40% --run nowhere", "profile.json: no such file"),
    "budget banana": ("search --budget banana", "budget 'banana'"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("command", "said"), PROGRAMS.values(), ids=list(PROGRAMS))
def test_as_a_program(command: str, said: str, home: Path) -> None:
    Path("raises.py").write_text("\n" * 5 + "raise ValueError('no')\n")
    assert_program_refuses([sys.executable, "-m", "mesa_tune.cli", *command.split()], said, home)


EXAMPLE = Path(__file__).parents[1] / "examples" / "digits_vit.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ("broken.txt", "broken.txt:3: unknown key 'lvel'"),
        ("mesa-run/policy.txt", "another model"),
        ("no.txt", "no.txt"),
    ],
    ids=["misspelt", "another model's", "missing"],
)
def test_the_example_with_a_bad_policy(policy: str, said: str, home: Path) -> None:
    Path("broken.txt").write_text("on fc:\n    by_index: all\n    lvel: 4\n")
    assert_program_refuses([sys.executable, str(EXAMPLE), "--policy", policy], said, home)


def assert_program_refuses(command: list[str], said: str, home: Path) -> None:
    before = snapshot(home)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert said in done.stderr
    assert len(done.stderr.splitlines()) <= 3
    assert snapshot(home) == before
