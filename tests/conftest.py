"""What every test file shares: threads that do not fight, GPU tests left out where there is none, a run."""

from __future__ import annotations

import gc
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mesa_tune import cli
from mesa_tune.measure.timing import step_time
from tests.builders import Capture, Patch
from tests.damage import MODEL, PROFILE, SEARCH, VERIFY, Home
from tests.step_memory import without_variants

SLOW = {
    "training": "trains for many steps, or profiles, searches and verifies",
    "processes": "starts other Python processes, or a compiler",
    "server": "starts a server",
    "browser": "opens pages in a browser",
    "sweep": "a share of many operators or architectures, of which the fast tests have one",
    "compile": "compiles what the fast tests trace",
    "leaving": "its subject will be replaced",
}
MOST_SLOW = 0.15
SPARED, FEW = {"modules": 0}, 20
"""How many modules the garbage collector has been spared; so many more are spared with the next ones."""


def pytest_configure() -> None:
    gc.set_threshold(50_000, 20, 20)  # measurements collect by themselves: seldom is enough in between
    # The tests' tensors are small: threads would only wait for each other, and busily.
    torch.set_num_threads(1)
    step_time.TURNS = 1  # no test asserts times


def pytest_collection_finish() -> None:
    spare_garbage_collector()


def pytest_runtest_setup() -> None:
    if len(sys.modules) > SPARED["modules"] + FEW:
        spare_garbage_collector()


def spare_garbage_collector() -> None:
    """Spare the garbage collector, which many measurements run, all that exists: modules first of all."""
    gc.collect()
    gc.freeze()
    SPARED["modules"] = len(sys.modules)


@pytest.hookimpl(tryfirst=True)  # before `-m` leaves tests out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    slow = [(item, marker.args) for item in items if (marker := item.get_closest_marker("slow"))]
    for item, kind in slow:
        if len(kind) != 1 or kind[0] not in SLOW:
            raise pytest.UsageError(f"{item.nodeid}: `slow` needs one kind of {', '.join(SLOW)}, got {kind}")
    if not config.option.file_or_dir and len(slow) > MOST_SLOW * len(items):
        raise pytest.UsageError(f"{len(slow)} of {len(items)} tests are slow, more than {MOST_SLOW:.0%}")
    # Files with slow tests first: at the end the workers then wait for no long file.
    paths = {item.path for item, _ in slow}
    items.sort(key=lambda item: item.path not in paths)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(autouse=True)
def _random_numbers_are_the_same_in_every_run() -> None:
    torch.manual_seed(1234)  # not one of those that tests name


@pytest.fixture(autouse=True)
def _compiled_code_is_forgotten() -> Iterator[None]:
    """Cases of one test are recompilations of one function, which are limited."""
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture(autouse=True)
def _out_of_memory_is_explained_no_more() -> Iterator[None]:
    """Callbacks ask for it, and it is asked for once in a process."""
    yield
    oom: Any = sys.modules.get("mesa_tune.estimation.oom")
    if oom is not None and oom._installed:
        oom._installed.pop().stop()


@pytest.fixture(autouse=True, scope="module")
def _accelerators_are_forgotten() -> Iterator[None]:
    """Accelerators of one process share their precision, which the next file may want to choose."""
    yield
    if "accelerate" in sys.modules:
        forget_accelerators()


def forget_accelerators() -> None:
    """Forget what all Accelerators of a process share, those inside of Trainers included."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(scope="module", name="without_variants")
def _without_variants() -> Iterator[None]:
    """The profiles of a file trace the step as it is; see `without_variants`."""
    with without_variants():
        yield


@pytest.fixture
def threads() -> Iterator[None]:
    """The test may set the number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", name="made")
def _made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder in which a model was profiled, searched and verified, and a copy of it to start from."""
    home, kept = (tmp_path_factory.mktemp(name) / "work" for name in ("home", "kept"))
    home.mkdir()
    (home / "model.py").write_text(MODEL)
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(home)
        for command in (PROFILE, SEARCH, VERIFY):
            assert cli.run([*command.split(), "--quiet"]) == 0
    shutil.copytree(home, kept)
    return home, kept


@pytest.fixture(name="home")
def _home(made: tuple[Path, Path], monkeypatch: Patch, capfd: Capture) -> Home:
    """The folder as it was made, and the current one; always at the same path, which the profile holds."""
    path, kept = made
    shutil.rmtree(path)
    shutil.copytree(kept, path)
    monkeypatch.chdir(path)
    return Home(path, capfd)
