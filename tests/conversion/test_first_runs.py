"""The first run of a module that runs again: what its layers save there is never used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import mesa_tune as mt
from mesa_tune.policy import Policy
from tests.conversion.test_recompute import ROWS, WIDTH, Model, policy


class Encodings(TorchDispatchMode):
    """Counts the kernels that encode."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        ours = torch.ops.mesa_tune
        self.count += func in (ours.quantize.default, ours.quantize_map.default, ours.quantize_rows.default)
        return func(*args, **(kwargs or {}))


def encodings(network: Any, x: torch.Tensor) -> tuple[int, int]:
    """Return how often a forward and its backward encode."""
    forward, backward = Encodings(), Encodings()
    with forward:
        loss = network(x)
    with backward:
        loss.backward()
    return forward.count, backward.count


@pytest.mark.parametrize("names", ["none.*", "blocks.*"])
def test_layers_inside_encode_only_in_the_second_run(names: str) -> None:
    rules = policy(names).dumps() + Policy.uniform(level=16).dumps().split("\n", 1)[1]
    network: Any = mt.convert(Model(), Policy.parse(rules), seed=1, min_elements=1024)
    x = torch.randn(ROWS, WIDTH)
    counts = [encodings(network, x) for _ in range(3)]  # what calls save is known after the first ones
    inside = 3 * 3  # norm, linear and GELU of three blocks
    inputs, outside = 3, 2  # outside: the last linear layer and the square; the batch is never encoded
    if names == "none.*":
        assert counts[-1] == (inside + outside, 0)
    else:
        assert counts[-1] == (inputs + outside, inside)
