"""Modules that may choose differently when they run again from rounded inputs are detected by their calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mesa_tune.conversion.choices import ChoiceDetector

EDGES = torch.linspace(-1, 1, 5)
"""A tensor that is equal in both runs."""

CASES: dict[str, tuple[Callable[[Tensor], Any], bool]] = {
    "a product": (lambda x: x * EDGES, False),
    "a mask of ones": (lambda x: torch.ones_like(x, dtype=torch.bool), False),
    "new integers": (lambda x: x.new_zeros(3, dtype=torch.int64), False),
    "integers of exact values": (lambda x: (EDGES.argmax(), x.exp()), False),
    "a position": (lambda x: x.argmax(), True),
    "positions of values among exact ones": (lambda x: torch.bucketize(x, EDGES), True),
    "positions of values after exact ones": (lambda x: torch.searchsorted(EDGES, x), True),
    "a comparison with what was computed": (lambda x: x.exp() > EDGES, True),
    "a number": (lambda x: x.sum().item(), True),
}


@pytest.mark.parametrize("name", CASES)
def test_what_depends_on_rounded_values_is_a_choice(name: str) -> None:
    (run, chooses), x = CASES[name], torch.randn(3, 5)
    with ChoiceDetector([EDGES]) as detector:
        run(x)
    assert detector.detected is chooses
