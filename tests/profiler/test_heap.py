"""A heap that keeps its memory: a step finds there what the one before has freed."""

from __future__ import annotations

import resource

import torch

from mesa_tune.profiler.timing.heap import steady_heap

BLOCK = 1 << 20
PAGE = resource.getpagesize()


def faults(blocks: int) -> int:
    """Return how many pages were fetched while so many blocks were allocated, written and freed."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = [torch.ones(BLOCK // 4) for _ in range(blocks)]
    del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_memory_comes_back_without_page_faults_but_only_inside() -> None:
    blocks = 200
    faults(blocks)  # glibc now takes blocks of this size from its heap
    with steady_heap():
        faults(blocks)
        assert faults(blocks) < BLOCK // PAGE
    assert faults(blocks) > blocks * BLOCK // PAGE // 2
