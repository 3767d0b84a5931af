"""What every test file shares: threads that do not fight, and GPU tests left out where there is none."""

from __future__ import annotations

import os

import pytest
import torch


def pytest_configure() -> None:
    # Workers of pytest-xdist share the cores; more threads than cores wait for each other.
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, torch.get_num_threads() // workers))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
