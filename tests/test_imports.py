"""Imports go one way, those for types and those inside functions too: rooms below never ask rooms above."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.synthetic import synthetic_profile

ROOT = Path(__file__).parents[1]

LEVELS = (
    ("errors", "compiling"),
    ("units", "notice", "files", "free_memory", "notebook"),
    ("runs",),
    ("ops", "policy"),
    ("codecs",),
    ("profiles",),
    ("engine",),
    ("formulas",),
    ("functional", "conversion"),
    ("nn", "workload"),
    ("measure",),
    ("search", "compat", "estimation"),
    ("retune", "reports", "autotune"),
    ("monitor",),
    ("integrations",),
    ("commands",),
    ("cli", "api", "pytest_plugin"),
    ("__main__",),
)
LEVEL = {room: number for number, rooms in enumerate(LEVELS) for room in rooms}
MOST_MODULES = {"formulas": 20}
MOST = 15
LINES = 400


def sources() -> dict[str, Path]:
    """Every module of the package by its installed name."""
    found = {}
    for top, prefix in (("mesa_tune", ""), ("search", "mesa_tune."), ("reports", "mesa_tune.")):
        for path in (ROOT / top).rglob("*.py"):
            inside = path.relative_to(ROOT)
            if inside.parts[:2] not in {("mesa_tune", "search"), ("mesa_tune", "reports")}:
                name = prefix + ".".join(inside.with_suffix("").parts)
                found[name.removesuffix(".__init__")] = path
    return found


MODULES = sources()


def imported(path: Path) -> Iterator[str]:
    """The modules of ours that the file asks for, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES else node.module for name in inside]
        yield from (name for name in names if name in MODULES)


def room(module: str) -> str:
    """The room of a module: the folder or file right below the package; empty for the package itself."""
    return module.partition(".")[2].partition(".")[0]


GRAPH = {name: sorted(set(imported(path)) - {name}) for name, path in MODULES.items()}


def test_rooms_ask_only_rooms_below() -> None:
    wrong = [
        f"{name} imports {other}"
        for name, others in GRAPH.items()
        for other in others
        if room(name) and room(name) != room(other) and not LEVEL[room(other)] < LEVEL[room(name)]
    ]
    assert not wrong


def test_no_module_leads_back_to_itself() -> None:
    left = {name: set(others) for name, others in GRAPH.items()}
    while free := [name for name, others in left.items() if not others & left.keys()]:
        for name in free:
            del left[name]
    on_cycles = [name for name in left if any(name in left[other] for other in left)]
    assert not on_cycles


def test_every_room_is_listed() -> None:
    rooms = {room(name) for name in MODULES} - {"", "templates"}
    assert rooms == LEVEL.keys()


def test_folders_and_files_stay_small() -> None:
    folders: dict[Path, int] = {}
    for path in MODULES.values():
        if not path.name.startswith("__"):
            folders[path.parent] = folders.get(path.parent, 0) + 1
    crowded = {
        str(folder.relative_to(ROOT)): count
        for folder, count in folders.items()
        if count > MOST_MODULES.get(folder.name, MOST)
    }
    long = {name: lines for name, path in MODULES.items() if (lines := path.read_text().count("\n")) > LINES}
    assert not crowded
    assert not long


FRAMEWORKS = {"transformers", "lightning", "accelerate"}
LIGHT = {
    "import mesa_tune.pytest_plugin": {"torch"},
    "import mesa_tune as mt; mt.Policy.uniform()._repr_html_()": {"pandas", "matplotlib", "jinja2"},
    # The compiler would more than double the time that every command needs to start.
    "import mesa_tune.search.api, mesa_tune.cli, mesa_tune.api": {"torch._dynamo"},
    "import mesa_tune.integrations": FRAMEWORKS,
}
"""Statements, in this order, and what they do not import."""


@pytest.mark.slow("processes")
def test_nothing_heavy_is_imported_before_it_is_needed() -> None:
    code = "".join(f"{line}; print({names} & sys.modules.keys())\n" for line, names in LIGHT.items())
    result = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}"], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == ["set()"] * len(LIGHT)


MEASURING = {"conversion", "engine", "formulas", "functional", "measure", "nn"}
MOST_TO_READ_A_PROFILE = 50


@pytest.mark.slow("processes")
def test_values_are_read_without_what_measures_them(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    synthetic_profile().save(path)
    read = f"from mesa_tune.profiles.profile import Profile; Profile.load({str(path)!r})"
    assert len(loaded(read)) <= MOST_TO_READ_A_PROFILE
    commands = [
        f"{command} --run {tmp_path}" for command in ("search --budget 80% --trials 0", "report", "tree")
    ]
    for command in (*commands, f"diff {tmp_path} {tmp_path}"):
        call = "from mesa_tune.cli import main\ntry: main()\nexcept SystemExit as end: assert not end.code"
        found = loaded(f"sys.argv[1:] = {command.split()}\n{call}")
        assert "mesa_tune.profiles.profile" in found
        assert not MEASURING & set(map(room, found)), command


def loaded(code: str) -> list[str]:
    """Return our modules that are loaded in a process that runs `code`."""
    names = "print('\\n', *(name for name in sys.modules if name.startswith('mesa_tune')))"
    result = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}\n{names}"], capture_output=True, text=True, check=True
    )
    return result.stdout.splitlines()[-1].split()
