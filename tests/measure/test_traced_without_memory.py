"""Slow steps are traced from fake tensors, where these take the bytes of real ones."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any

import pytest
import torch
from torch import nn

import mesa_tune as mt
from mesa_tune.measure import fake_steps, profiling
from mesa_tune.measure.tracing import TracedWorkload
from tests.builders import MLPBlock, workload
from tests.step_memory import Composed, squares


class Locked(nn.Linear):
    """Has a lock, of which there is no copy."""

    def __init__(self) -> None:
        super().__init__(8, 512)
        self.lock = Lock()


def blocks() -> nn.Module:
    """Two layers around a block, which can run again, and whose perceptron can have slices."""
    parts = {"first": nn.Linear(16, 64), "blocks": nn.ModuleList([MLPBlock(64)]), "head": nn.Linear(64, 10)}
    return Composed(lambda m, x: m.head(m.blocks[0](m.first(x)).mean(1)), **parts)


BLOCKS = workload(blocks)
MODELS: dict[str, Callable[[], nn.Module]] = {
    "saves less on fake tensors": lambda: Composed(lambda m, x: m.lstm(x)[0], lstm=nn.LSTM(8, 32)),
    "reads values": lambda: Composed(lambda m, x: m.head(x[x.sum(-1) > 0]), head=nn.Linear(8, 4)),
    "has a lock": Locked,
}


@pytest.fixture(name="found")
def _found(monkeypatch: pytest.MonkeyPatch) -> list[TracedWorkload | None]:
    """What tracing without memory has returned; real steps count as slow."""
    found: list[TracedWorkload | None] = []

    def traced(tracer: Any, longest: Any, _: float) -> TracedWorkload | None:
        found.append(fake_steps.traced_without_memory(tracer, longest, 1e9))
        return found[-1]

    monkeypatch.setattr(profiling, "traced_without_memory", traced)
    return found


def test_a_profile_has_the_bytes_of_real_steps(
    found: list[TracedWorkload | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    without = mt.profile(BLOCKS, options=[])
    assert found[0] is not None
    monkeypatch.setattr(profiling, "traced_without_memory", lambda *_: None)
    real = mt.profile(BLOCKS, options=[])
    names = ("timeline", "layers", "tiled", "exact", "notes", "static_bytes", "saved_bytes", "peak_bytes")
    for name in names:
        assert getattr(without, name) == getattr(real, name)


@pytest.mark.parametrize("name", MODELS)
def test_where_fake_steps_differ_real_ones_are_traced(name: str, found: list[TracedWorkload | None]) -> None:
    work = workload(MODELS[name], lambda n: torch.randn(n, 16, 8), squares, batch_size=64)
    profile = mt.profile(work, options=[])
    assert found == [None]
    assert profile.saved_bytes > 0


def test_fast_steps_are_traced_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_steps, "fake_copy", None)  # it would raise
    work = workload(lambda: nn.Linear(8, 4), lambda n: torch.randn(n, 16, 8), squares, batch_size=64)
    assert mt.profile(work, options=[]).saved_bytes > 0
