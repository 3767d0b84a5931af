"""Counting and slicing batches."""

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from mesa_tune.workload.batches import batch_size, select

Pair = namedtuple("Pair", "x y")


@dataclass
class Sample:
    x: Tensor
    scale: float = 2.0


@pytest.mark.parametrize(
    "made",
    [
        lambda x: x,
        lambda x: [x, 3],
        lambda x: (x, torch.zeros(3)),
        lambda x: {"x": x, "n": 1},
        lambda x: Pair(x, None),
        Sample,
    ],
    ids=["tensor", "list", "tuple", "dict", "namedtuple", "dataclass"],
)
def test_slices_keep_containers(made: Any) -> None:
    batch = made(torch.arange(12).view(6, 2))
    assert batch_size(batch) == 6
    found = select(batch, slice(2), 6)
    assert type(found) is type(batch)
    assert str(found) == str(made(torch.arange(4).view(2, 2)))
    assert str(batch) == str(made(torch.arange(12).view(6, 2)))
