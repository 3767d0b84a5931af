from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

from mesa_tune.commands.common import Run, load_workload
from mesa_tune.errors import RunError
from mesa_tune.measure.profiling import profile
from mesa_tune.workload.local_modules import find_local_modules
from mesa_tune.workload.workload import Workload

MODEL = """
import torch
from nets.blocks import Block

def model():
    from lazily import width
    return Block(width())

def batch(n):
    return torch.randn(n, 8)

def loss(model, batch):
    return model(batch).square().mean()
"""
FILES = {
    "nets/__init__.py": "",
    "nets/blocks.py": "from torch import nn\nfrom .shapes import OUT\nBlock = lambda n: nn.Linear(n, OUT)\n",
    "nets/shapes.py": "OUT = 4\n",
    "lazily.py": "import namespace.sizes\nwidth = lambda: namespace.sizes.WIDTH\n",
    "namespace/sizes.py": "WIDTH = 8\n",
    "unused.py": "1 / 0\n",
    "nets/unused.py": "1 / 0\n",
}
FOUND = ["lazily", "namespace.sizes", "nets", "nets.blocks", "nets.shapes"]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    for name, content in {"model.py": MODEL, **FILES}.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    path_before = list(sys.path)
    for module in (*FOUND, "namespace"):  # a test before may have left them
        sys.modules.pop(module, None)
    yield tmp_path
    sys.path[:] = path_before


def width(workload: Workload) -> tuple[int, ...]:
    return tuple(workload.build().get_parameter("weight").shape)


def test_modules_are_found_through_packages_functions_and_each_other(folder: Path) -> None:
    assert list(find_local_modules(folder, MODEL.encode())) == FOUND
    assert not set(FOUND) & set(sys.modules)


IMPORTS = {
    "a package": ("import nets", ["nets"]),
    "a module as another name": ("import nets.blocks as b", ["nets", "nets.blocks", "nets.shapes"]),
    "a name of a package": ("from nets import shapes, nothing", ["nets", "nets.shapes"]),
    "relative, without a package": ("from . import lazily", []),
    "installed and standard": ("import torch.nn, json, numpy as np\nfrom os import path", []),
    "no Python": ("import (", []),
}


@pytest.mark.parametrize(("source", "names"), IMPORTS.values(), ids=list(IMPORTS))
def test_what_an_import_finds(folder: Path, source: str, names: list[str]) -> None:
    assert list(find_local_modules(folder, source.encode())) == names


@pytest.mark.parametrize("changed", ["model.py", "nets/shapes.py", "lazily.py", "namespace/sizes.py"])
def test_every_used_file_is_part_of_the_fingerprint(folder: Path, changed: str) -> None:
    before = Workload.load(folder / "model.py").fingerprint
    assert Workload.load(folder / "model.py").fingerprint == before
    with (folder / changed).open("a") as file:
        file.write("# changed\n")
    assert Workload.load(folder / "model.py").fingerprint != before


def test_what_is_not_imported_is_not(folder: Path) -> None:
    before = Workload.load(folder / "model.py").fingerprint
    (folder / "nets/unused.py").write_text("# changed\n")
    assert Workload.load(folder / "model.py").fingerprint == before


def test_what_runs_is_what_was_hashed(folder: Path) -> None:
    first = Workload.load(folder / "model.py")
    (folder / "namespace/sizes.py").write_text("WIDTH = 16\n")  # imported when the model is built
    assert width(first) == (4, 8)
    second = Workload.load(folder / "model.py")
    assert second.fingerprint != first.fingerprint
    assert width(second) == (4, 16)
    (folder / "nets/shapes.py").write_text("OUT = 5\n")  # its importer is unchanged, and runs again
    assert width(Workload.load(folder / "model.py")) == (5, 16)


def test_modules_of_another_folder_have_the_same_names(folder: Path) -> None:
    assert width(Workload.load(folder / "model.py")) == (4, 8)
    other = folder / "other"
    other.mkdir()
    (other / "lazily.py").write_text("width = lambda: 3\n")
    (other / "model.py").write_text(
        textwrap.dedent(MODEL)
        .replace("from nets.blocks import Block", "")
        .replace("Block(width())", "torch.nn.Linear(width(), 2)")
    )
    assert width(Workload.load(other / "model.py")) == (2, 3)


def test_a_profile_is_of_all_these_files(folder: Path) -> None:
    made = profile(Workload.load(folder / "model.py", batch_size=2, device="cpu"), options=[])
    run = Run(folder / "mesa-run")
    assert isinstance(load_workload(run, made, "").build(), nn.Linear)
    (folder / "nets/shapes.py").write_text("OUT = 5\n")
    with pytest.raises(RunError, match="or a local module that it imports did"):
        load_workload(run, made, "")
