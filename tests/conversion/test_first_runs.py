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
        self.count += func in (torch.ops.mesa_tune.quantize.default, torch.ops.mesa_tune.quantize_map.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("names", ["none.*", "blocks.*"])
def test_layers_inside_encode_only_in_the_second_run(names: str) -> None:
    rules = policy(names).dumps() + Policy.uniform(level=16).dumps().split("\n", 1)[1]
    network: Any = mt.convert(Model(), Policy.parse(rules), seed=1, min_elements=1024)
    x = torch.randn(ROWS, WIDTH)
    for _ in range(2):  # after these it is known what calls save
        network(x).backward()
    with Encodings() as forward:
        loss = network(x)
    with Encodings() as backward:
        loss.backward()
    inside = 3 * 3  # norm, linear and GELU of three blocks
    inputs, outside = 3, 2  # outside: the last linear layer and the square; the batch is never encoded
    if names == "none.*":
        assert (forward.count, backward.count) == (inside + outside, 0)
    else:
        assert (forward.count, backward.count) == (inputs + outside, inside)
