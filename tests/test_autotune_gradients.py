"""Gradients that are alive in the forward, which `mt.auto` does not count: a warning in the first steps."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mesa_tune as mt
from mesa_tune import autotune, notice
from tests.builders import cross_entropy

BATCH = (torch.rand(512, 64), torch.zeros(512, dtype=torch.long))


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of the tests, which measure once."""
    return tmp_path_factory.mktemp("runs")


def auto(folder: Path, accumulation: int = 1) -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 10))
    run: dict[str, Any] = {"run": folder / str(accumulation), "accumulation": accumulation}
    quick: dict[str, Any] = {"optimizer": torch.optim.SGD, "fast": True, "trials": 0}
    return mt.auto(model, BATCH, cross_entropy, budget="90%", **run, **quick)


@pytest.fixture(autouse=True)
def _nothing_was_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notice, "_given", set())


def train(model: nn.Module, order: str, steps: int = 3) -> list[str]:
    """Take steps in which `zero_grad` comes at `order`; return what was warned of."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        for step in range(steps):
            if order == "before" or (order == "every second" and step % 2 == 0):
                optimizer.zero_grad()
            value = cross_entropy(model, BATCH)
            if order == "after":
                optimizer.zero_grad()
            value.backward()
            if order != "every second" or step % 2:
                optimizer.step()
            if order == "last":
                optimizer.zero_grad()
        with torch.no_grad():
            cross_entropy(model, BATCH)
    return [str(each.message) for each in given]


@pytest.mark.parametrize(
    ("order", "accumulation", "count"),
    [("before", 1, 0), ("last", 1, 0), ("after", 1, 1), ("every second", 1, 1), ("every second", 2, 0)],
)
def test_gradients_in_the_forward_are_warned_of_once(
    folder: Path, order: str, accumulation: int, count: int
) -> None:
    model = auto(folder, accumulation)
    said = train(model, order)
    assert len(said) == count
    assert all("call zero_grad() before the forward" in text for text in said)


def test_forwards_in_evaluation_and_later_ones_are_not_watched(folder: Path) -> None:
    model = auto(folder)
    cross_entropy(model, BATCH).backward()
    model.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cross_entropy(model, BATCH)
    model.train().zero_grad()
    for _ in range(autotune._WATCHED):
        cross_entropy(model, BATCH)
    assert not train(model, "after")


def test_a_policy_without_a_budget_warns_of_nothing() -> None:
    model = mt.convert(nn.Linear(64, 10), mt.Policy.uniform(level=16))
    assert not train(model, "after")
