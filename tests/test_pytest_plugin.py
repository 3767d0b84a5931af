"""The marker `limit_saved`, in runs of pytest of its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mesa_tune as mt
from mesa_tune.errors import BudgetError
from mesa_tune.measure.saved_limit import LimitMeter
from tests.builders import gpt2, known, own_loss, words, workload

pytest_plugins = ["pytester"]

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


@pytest.mark.parametrize(
    "policy", [mt.Policy.parse(""), mt.Policy.uniform(level=16)], ids=["plain", "4 bits"]
)
def test_saved_bytes_are_those_that_verify_measures(policy: mt.Policy) -> None:
    work = workload(lambda: gpt2(32, vocab_size=97), lambda n: words(n, 64, 97), own_loss, batch_size=4)
    expected = known(mt.verify(work, policy, steps=1, seeds=1).policy.saved_bytes)
    with LimitMeter("1B") as meter:
        model = mt.convert(gpt2(32, vocab_size=97), policy)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            with mt.compress_saved(policy):
                loss = own_loss(model, words(4, 64, 97))
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
