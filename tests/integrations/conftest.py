"""What the tests of all frameworks share."""

from __future__ import annotations

import pytest


@pytest.fixture(name="short_timing")
def _short_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of a small model are timed for 15 s otherwise."""
    monkeypatch.setattr("mesa_tune.profiler.profiling.SECONDS", 0.1)
