"""What every test file shares: threads that do not fight, and GPU tests left out where there is none."""

from __future__ import annotations

import pytest
import torch


def pytest_configure() -> None:
    # The tests' tensors are small: threads would only wait for each other, and busily.
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
