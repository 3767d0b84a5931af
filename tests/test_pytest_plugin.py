"""The marker `limit_saved`, in runs of pytest of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mesa_tune as mt
from mesa_tune.errors import BudgetError
from mesa_tune.profiler.saved_limit import LimitMeter
from mesa_tune.workload.workload import Workload

pytest_plugins = ["pytester"]

TOKENS = torch.arange(512).reshape(4, 128) % 97

SCALARS = 8
"""Bytes of the loss and of its gradient, which are alive where a backward begins."""

SUITE = """
import pytest, torch
from torch import nn

def step(width):
    model = nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, 8))
    model(torch.randn(256, 64)).sum().backward()  # GELU and the second layer save one tensor each

@pytest.mark.limit_saved("600kB")
def test_within():
    step(256)

@pytest.mark.limit_saved("500kB")
def test_over():
    step(8)
    step(256)

@pytest.mark.limit_saved("1B")
def test_fails_by_itself():
    assert not "its own message"

@pytest.mark.limit_saved("1B")
def test_without_backward():
    torch.randn(64)

@pytest.mark.limit_saved("40%")
def test_of_a_share():
    step(8)

@pytest.mark.limit_saved
def test_without_limit():
    step(8)

def test_unmarked():
    step(8)
"""


def test_a_marked_test_fails_over_its_limit(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(SUITE)
    result = pytester.runpytest("-p", "mesa_tune.pytest_plugin", "--strict-markers", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=3, failed=4, warnings=1)
    result.stdout.fnmatch_lines_random(
        [
            "524 kB saved for backward, more than the limit of 500 kB",
            "most by 0: 262 kB, 1: 262 kB, outside of modules: 8 B",
            "*its own message*",
            "*test_without_backward: limit_saved measured nothing, because no backward ran*",
            "*limit_saved '40%': a share of what?",
            'limit_saved takes one argument, the limit: @pytest.mark.limit_saved("6GB")',
        ]
    )


def test_the_plugin_imports_no_torch() -> None:
    code = "import sys, mesa_tune.pytest_plugin; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(vocab_size=97, n_positions=128, n_embd=32, n_layer=2, n_head=2)
    return transformers.GPT2LMHeadModel(config)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    loss: Tensor = model(tokens, labels=tokens).loss
    return loss


@pytest.mark.parametrize(
    "policy", [mt.Policy.parse(""), mt.Policy.uniform(level=16)], ids=["plain", "4 bits"]
)
def test_saved_bytes_are_those_that_verify_measures(policy: mt.Policy) -> None:
    workload = Workload(gpt2, lambda _: TOKENS.clone(), loss_of, batch_size=4)
    expected = mt.verify(workload, policy, steps=1, seeds=1).policy.saved_bytes
    assert expected is not None
    with LimitMeter("1B") as meter:
        model = mt.convert(gpt2(), policy)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            with mt.compress_saved(policy):
                loss = loss_of(model, TOKENS.clone())
            loss.backward()
            optimizer.step()
    assert (meter.backwards, meter.most) == (2, expected + SCALARS)
    assert meter.layers.total() == meter.most
    assert all(name.startswith("transformer.") for name, _ in meter.layers.most_common(2))


def checkpointed() -> tuple[Callable[[Tensor], Tensor], int]:
    part = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64))
    return lambda x: checkpoint(part, x, use_reentrant=True), 0  # its input alone


def without_modules() -> tuple[Callable[[Tensor], Tensor], int]:
    weight = torch.randn(64, 64, requires_grad=True)
    return lambda x: (x @ weight).exp(), 4 * 256 * 64


@pytest.mark.parametrize("case", [checkpointed, without_modules])
def test_what_counts_as_saved(case: Callable[[], tuple[Callable[[Tensor], Tensor], int]]) -> None:
    x = torch.randn(256, 64, requires_grad=True)
    with LimitMeter("1GB") as meter:
        function, expected = case()
        function(x).sum().backward()
        function(x).sum().backward()  # the gradients of the first are not counted
    assert (meter.backwards, meter.most) == (2, expected + SCALARS)


def test_a_forward_without_gradients_is_no_forward() -> None:
    model = nn.Linear(64, 64)
    with LimitMeter("1B") as meter, torch.no_grad():
        held = model(torch.randn(256, 64))
    assert (meter.backwards, meter.most, held.shape) == (0, 0, (256, 64))


def test_a_share_is_no_limit() -> None:
    with pytest.raises(BudgetError, match="a share of what"):
        LimitMeter("40%")
