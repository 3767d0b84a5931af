"""Every function traces in one graph, forward and backward, with the gradients of eager PyTorch."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.functional_cases import CASES, RAW, fresh, gradients, served

ALIKE = {"hardswish", "hardsigmoid", "logsigmoid", "softsign", "tanhshrink", "elu", "selu", "expm1", "square"}
ALIKE |= {"pow_2", "rpow", "sin", "cos", "erf"}
ALIKE |= {"clamp_min", "clamp_max", "clamp_low", "hardshrink", "softshrink", "relu6", "threshold"}
"""Rows of tables of which other rows are traced."""
TRACED = sorted(name for name in set(CASES) - ALIKE - {"softmax_method"} if not CASES[name].limited)


@pytest.mark.parametrize("name", TRACED)
def test_traces_in_one_graph(name: str) -> None:
    case = CASES[name]
    ours, plain = fresh(case, torch.float32), fresh(case, torch.float32)

    def run(args: list[Any]) -> Tensor:
        result: Tensor = served(case.function, RAW, *args, **case.kwargs)
        return result

    torch.manual_seed(3)
    y = torch.compile(run, fullgraph=True, backend="aot_eager")(ours)
    torch.manual_seed(3)
    expected = case.function(*plain, **case.kwargs)
    torch.testing.assert_close(y, expected)
    for found, wanted in zip(gradients(y, ours), gradients(expected, plain), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(ours, plain, strict=True):
        if isinstance(mine, Tensor):
            torch.testing.assert_close(mine, theirs)
