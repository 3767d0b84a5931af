"""Provenance of written files: what it names, and what it must not."""

from __future__ import annotations

import json
import platform
from datetime import datetime, timezone
from pathlib import Path

import pytest
import torch

from mesa_tune.runs.folder import Run
from mesa_tune.runs.provenance import Made, running
from tests.builders import known


def test_names_the_command_the_date_and_the_versions() -> None:
    with running(["profile", "my model.py", "--fast"]):
        made = Made.now()
    assert made.command == "mesa-tune profile 'my model.py' --fast"
    age = datetime.now(timezone.utc) - datetime.fromisoformat(made.date)
    assert 0 <= age.total_seconds() < 120
    assert torch.__version__ in made.versions
    assert platform.python_version() in made.versions
    assert "thread" in made.hardware or torch.cuda.is_available()


def test_outside_a_command_names_none() -> None:
    assert Made.now().command == ""


@pytest.mark.parametrize(
    "url",
    [
        "postgresql+psycopg://ann:s3cret@host/db",
        "postgresql+psycopg://ann:s3c/r@et?s3cret@host/db",
        "postgresql+psycopg://host/db?password=s3cret",
    ],
)
def test_passwords_are_not_written(tmp_path: Path, url: str) -> None:
    run = Run(tmp_path)
    with running(["search", "--storage", url, f"--storage={url}"]):
        run.write(run.plan, "{}", "inputs")
    notes = (tmp_path / ".written.json").read_text("utf-8")
    assert "s3c" not in notes
    assert notes.count("host/db") == 2


def test_a_copied_file_has_the_provenance_of_its_source(tmp_path: Path) -> None:
    first, second = Run(tmp_path / "first"), Run(tmp_path / "second")
    with running(["profile", "model.py"]):
        first.write(first.profile, "{}", "inputs")
    with running(["search"]):
        second.adopt(second.profile, first.profile)
    assert known(second.made(second.profile)).command == "mesa-tune profile model.py"


@pytest.mark.parametrize("values", [None, "text", {"command": 1}, {"command": "", "date": ""}])
def test_damaged_notes_are_unknown(tmp_path: Path, values: object) -> None:
    run = Run(tmp_path)
    run.write(run.plan, "{}", "inputs")
    path = tmp_path / ".written.json"
    notes = json.loads(path.read_text("utf-8"))
    notes["plan.json"]["made"] = values
    path.write_text(json.dumps(notes))
    assert run.made(run.plan) is None
