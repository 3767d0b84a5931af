"""With checkpoints inside, `torch.compile(fullgraph=True)` makes one graph of a converted model, too."""

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

import mesa_tune as mt
from tests.builders import MLPBlock, conversion, gradients
from tests.conformance.running import relative_error
from tests.step_memory import Composed

WIDTH = 64


def run_twice(function: Any, x: Tensor) -> Any:
    return checkpoint(function, x, use_reentrant=False)


def teaching(m: Any, x: Tensor) -> Any:
    """A part without gradients inside."""
    with torch.no_grad():
        y = m.up(x).sum(-1, keepdim=True)
    return F.gelu(m.up(x)) * y


def model(around: str) -> nn.Module:
    """Two blocks with something `around` them that runs them again in backward."""
    blocks: list[nn.Module] = [MLPBlock(WIDTH) for _ in range(2)]
    if around == "a part without gradients":
        blocks = [Composed(teaching, up=nn.Linear(WIDTH, WIDTH)) for _ in range(2)]
    if around == "a wrapper":
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), *map(checkpoint_wrapper, blocks))
    run = {
        "a function": lambda m, x: run_twice(lambda x: m.block(F.gelu(x)), x),
        "another": lambda m, x: run_twice(lambda x: run_twice(m.block, x) + x, x),
    }.get(around, lambda m, x: run_twice(m.block, x))
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *[Composed(run, block=block) for block in blocks])


def layers(model: nn.Module) -> set[tuple[str, str]]:
    return {(tag, name) for tag, _, name in conversion(model).catalog.layers()}


OTHERS = ["a call", "a function", "a part without gradients"]
CASES = [
    ("a wrapper", True),
    ("a wrapper", False),
    ("another", False),
    *(pytest.param(around, False, marks=pytest.mark.slow("sweep")) for around in OTHERS),
]


@pytest.mark.parametrize(("around", "apart"), CASES)
def test_checkpoints_are_traced(around: str, apart: bool) -> None:
    """`apart`: the blocks are compiled one by one, as in torchtitan. Layers are those of eager code."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain, x, policy = model(around), torch.randn(256, WIDTH), mt.Policy.uniform(level=16)
    expected, eager = gradients(plain, x), mt.convert(copy.deepcopy(plain), policy)
    gradients(eager, x)
    converted = mt.convert(plain, policy, seed=1)
    for part in [*plain.children()][1:] if apart else [plain]:
        part.compile(fullgraph=True, backend="aot_eager")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "mesa-tune|.*Dynamo|.*graph break")
        first, second = (gradients(converted, x) for _ in range(2))
    assert 0 < relative_error(first, expected) < 0.05
    assert relative_error(first, second) > 0, "two steps have the same noise"
    assert layers(converted) == layers(eager)
