"""README and docs: code blocks run, commands and their options exist, links lead somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
import typer
from torch import nn
from torch.nn import functional as F

import mesa_tune as mt
from mesa_tune.cli import application

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINES = 150
BATCH = 8


def blocks(page: Path, kind: str) -> list[str]:
    """The fenced blocks of that kind ("": of none)."""
    return re.findall(rf"^```{kind}\n(.*?)^```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE)


def commands(page: Path) -> list[str]:
    """Whatever a reader would type after a prompt: lines of `mesa-tune`, without comments."""
    lines = [line for block in blocks(page, "") for line in block.splitlines()]
    return [line.removeprefix("$ ") for line in lines if line.startswith(("mesa-tune ", "$ mesa-tune "))]


def test_the_first_block_converts() -> None:
    first, *_ = blocks(PAGES[0], "python")
    model = nn.Linear(4, 4)
    exec(first, {"model": model})
    assert mt.revert(model) is model


def test_the_model_file_is_one(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(blocks(PAGES[0], "python")[1])
    work = mt.Workload.load(path, batch_size=BATCH)
    assert torch.isfinite(work.compute_loss(work.build(), work.make_batch()))


def test_the_training_script_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mesa-run").mkdir()
    mt.Policy.uniform(level=16).save("mesa-run/policy.txt")
    script = blocks(PAGES[0], "python")[2]
    model = nn.Linear(784, 10)
    names = {"mt": mt, "F": F, "model": model, "images": torch.rand(BATCH, 784)}
    names["labels"] = torch.randint(0, 10, (BATCH,))
    exec(script, names)
    names["loss"].backward()  # type: ignore[attr-defined]
    assert model.weight.grad is not None
    assert torch.isfinite(model.weight.grad).all()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_understood(page: Path) -> None:
    program = typer.main.get_command(application())
    for line in commands(page):
        name, *arguments = shlex.split(line, comments=True)[1:]
        with program.make_context("mesa-tune", [name, *arguments]) as context:
            command = program.get_command(context, name)  # type: ignore[attr-defined]
            assert command is not None, line
            command.make_context(name, arguments, parent=context)


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=lambda page: page.name
)
def test_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)", page.read_text("utf-8"))
    assert all((page.parent / link).exists() for link in links if not link.startswith("http"))


def test_the_readme_is_short() -> None:
    assert len(PAGES[0].read_text("utf-8").splitlines()) <= LINES
