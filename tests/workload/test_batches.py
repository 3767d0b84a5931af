"""Batches in containers of all kinds: their samples are counted, sliced, repeated and drawn."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BatchEncoding

from mesa_tune.workload.batches import batch_size, select
from mesa_tune.workload.instance.given_batches import GivenBatches

Pair = namedtuple("Pair", "x y")


@dataclass
class Sample:
    x: Tensor
    scale: float = 2.0


CONTAINERS: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda x: x,
    "list": lambda x: [x, 3],
    "tuple": lambda x: (x, torch.zeros(3)),
    "dict": lambda x: {"x": x, "n": "text"},
    "namedtuple": lambda x: Pair(x, None),
    "BatchEncoding": lambda x: BatchEncoding({"x": x}),
    "dataclass": Sample,
}


@pytest.mark.parametrize("made", CONTAINERS.values(), ids=list(CONTAINERS))
def test_containers_are_kept(made: Callable[[Tensor], Any]) -> None:
    x = torch.arange(12.0).view(6, 2)
    batch, given = made(x), GivenBatches(made(x))
    assert batch_size(batch) == given.size == 6
    found = select(batch, slice(2), 6)
    assert type(found) is type(batch)
    assert str(found) == str(given.numbered(0, 2)) == str(made(x[:2]))
    assert str(batch) == str(made(torch.arange(12.0).view(6, 2)))
    assert str(given.numbered(0, 8)) == str(made(torch.cat([x, x[:2]])))
    assert type(given.numbered(3, 6)) is type(batch)
    assert "one batch of 6 samples was given" in given.notes[0]
