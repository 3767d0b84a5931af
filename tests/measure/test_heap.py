"""A heap that keeps its memory: a step finds there what the one before has freed."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from mesa_tune.measure.timing.heap import steady_heap

BLOCK, COUNT = 1 << 20, 200
PAGES = BLOCK // resource.getpagesize()


def faults() -> int:
    """Return how many pages were fetched while blocks were allocated, written and freed."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = [torch.ones(BLOCK // 4) for _ in range(COUNT)]
    del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_memory_comes_back_without_page_faults_but_only_inside() -> None:
    with steady_heap():
        for _ in range(3):
            faults()
        inside = min(faults() for _ in range(3))  # the system may take back pages that lie idle
    outside = faults()
    if not outside:
        pytest.skip("this system counts no page faults")
    assert inside < COUNT * PAGES / 10
    assert outside > COUNT * PAGES / 2


def test_nothing_is_set_where_the_user_has_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    names = ("mallopt", "malloc_trim")
    libc = SimpleNamespace(**{name: lambda *_, name=name: calls.append(name) for name in names})
    monkeypatch.setattr("ctypes.CDLL", lambda _: libc)
    with steady_heap():
        assert calls == ["mallopt", "mallopt"]
    calls.clear()
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "65536")
    with steady_heap():
        pass
    assert not calls


@pytest.mark.slow("processes")
@pytest.mark.parametrize("name", ["MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"])
def test_thresholds_of_the_user_stay(name: str) -> None:
    code = "from tests.measure.test_heap import *\nwith steady_heap(): faults(); print(faults())"
    environment = {**os.environ, name: "65536"}
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert int(found.stdout) > COUNT * PAGES / 2
