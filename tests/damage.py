"""A folder in which all commands have run, and ways to spoil it: what the tests of bad input share."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sqlite3
import warnings
from collections.abc import Callable
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
PROFILE = "profile model.py --fast"
SEARCH = f"search --budget {BUDGET} --trials 2"
VERIFY = "verify --steps 1 --seeds 1"
REPORT = "report --format json"

Change = Callable[[], None]


@dataclass(frozen=True)
class Case:
    """`command`, in the folder as `prepare` leaves it, must be refused with all of `said`."""

    command: str
    said: tuple[str, ...]
    prepare: Change = lambda: None


@dataclass(frozen=True)
class Said:
    """What a command printed, warnings included, and its exit status."""

    status: int
    out: str
    err: str


class Home:
    """The folder: `run` a command in it, or hold that one is refused."""

    def __init__(self, path: Path, capture: pytest.CaptureFixture[str]) -> None:
        self.path = path
        self.capture = capture

    def run(self, command: str) -> Said:
        """What `command` says, with everything that the process wrote to its two streams."""
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            status = cli.run(shlex.split(command))
        out, err = self.capture.readouterr()
        return Said(status, out, err + "".join(f"{warning.message}\n" for warning in given))

    def assert_refused(self, case: Case) -> Said:
        """Status 1, three lines at most, no traceback, and not a byte of the folder other than before."""
        case.prepare()
        before = snapshot(self.path)
        said = self.run(case.command)
        assert_message(said, case.said)
        assert snapshot(self.path) == before
        return said


def assert_message(said: Said, parts: tuple[str, ...]) -> None:
    assert said.status == 1
    assert said.err.startswith("error: ")
    assert len(said.err.splitlines()) <= 3
    assert "Traceback" not in said.err
    for part in parts:
        assert part in said.err


def snapshot(folder: Path) -> dict[str, bytes | None]:
    """The content of every file below `folder`, hidden ones too; None for folders."""
    return {
        str(path.relative_to(folder)): None if path.is_dir() else path.read_bytes()
        for path in folder.rglob("*")
    }


def together(*changes: Change) -> Change:
    def prepare() -> None:
        for change in changes:
            change()

    return prepare


def text(path: str, content: str | bytes) -> Change:
    """The file has another content."""

    def write() -> None:
        Path(path).write_bytes(content if isinstance(content, bytes) else content.encode())

    return write


def cut(path: str) -> Change:
    """Half of the file is lost."""

    def halve() -> None:
        content = Path(path).read_bytes()
        Path(path).write_bytes(content[: len(content) // 2])

    return halve


def gone(*paths: str) -> Change:
    def remove() -> None:
        for path in paths:
            if Path(path).is_dir():
                shutil.rmtree(path)
            else:
                Path(path).unlink()

    return remove


def folder(path: str) -> Change:
    """A folder stands where the file was."""
    return together(gone(path), lambda: Path(path).mkdir())


def values(path: str, **changed: Any) -> Change:
    """Keys of the JSON document have other values."""

    def change() -> None:
        document = json.loads(Path(path).read_text())
        Path(path).write_text(json.dumps({**document, **changed}))

    return change


def fresh(*more: Change) -> Change:
    """The run has its profile and nothing else; then `more`."""

    def forget() -> None:
        for name in ("plan.json", "policy.txt", "verify.json", "study.db"):
            Path("mesa-run", name).unlink()
        notes = Path("mesa-run/.written.json")
        notes.write_text(json.dumps({"profile.json": json.loads(notes.read_text())["profile.json"]}))

    return together(forget, *more)


def model_file(old: str, new: str) -> Change:
    """`old` in the model file is `new`."""
    assert old in MODEL
    return text("model.py", MODEL.replace(old, new))


def model_end(more: str) -> Change:
    """`more` stands behind the model file's last line, from line 23 on."""
    return text("model.py", f"{MODEL}\n{more}\n")


def loss_line(line: str) -> Change:
    """The loss, in line 18, has `line` for a body, in line 19."""
    before = MODEL.partition("def loss")[0]
    return text("model.py", f"{before}def loss(model, batch):\n    {line}\n")


def sql(path: str, *statements: str) -> Change:
    """A database with these statements carried out."""

    def execute() -> None:
        with closing(sqlite3.connect(path)) as database:
            for statement in statements:
                database.execute(statement)
            database.commit()

    return execute


def policy_of_another_model(path: str) -> Change:
    """The run's policy with another model's fingerprint."""

    def write() -> None:
        ours = Path("mesa-run/policy.txt").read_text()
        Path(path).write_text(re.sub("layers [0-9a-f]*", "layers 0123456789abcdef", ours))

    return write
