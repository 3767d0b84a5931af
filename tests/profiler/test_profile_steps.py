"""The steps that a profile traces: what dies in them, which way they go, how many calls they make."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mesa_tune as mt
from mesa_tune.profiler import tracing
from mesa_tune.profiler.memory.step_trace import SlotTrace, StepTrace
from mesa_tune.profiler.memory.trace import trace_step
from tests.builders import mean, workload
from tests.step_memory import FOUR_BITS, PLAIN, measured

WIDTH = 64


def tokens(kind: Callable[[], nn.Module]) -> mt.Workload:
    return workload(kind, lambda n: torch.randn(n, 20, WIDTH), mean, batch_size=16)


def assert_predicted(work: mt.Workload) -> None:
    """The saved bytes that a profile predicts are those of real steps, plain and in 4 bits."""
    profile = mt.profile(work, options=())
    for policy in (PLAIN, FOUR_BITS):
        assert profile.predict(policy).saved_bytes == measured(work, policy).saved_bytes


class _Aside(nn.Module):
    """Computes what nobody uses, in a branch whose nodes save their own outputs: that dies in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.aside, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        self.aside(h).relu_().softmax(-1).cumsum(-1).exp().cumprod(-1).sqrt()
        y: Tensor = self.last(h)
        return y


def test_what_a_branch_without_a_loss_saves_is_not_counted() -> None:
    assert_predicted(tokens(_Aside))


def test_the_peak_is_at_the_layer_before_a_dropout_that_drops_nothing() -> None:
    def model() -> nn.Module:
        wide = (nn.Linear(WIDTH, 16 * WIDTH), nn.GELU(), nn.Dropout(0.0), nn.Linear(16 * WIDTH, WIDTH))
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), *wide)

    work = tokens(model)
    profile = mt.profile(work, options=())
    for policy in (PLAIN, FOUR_BITS):
        predicted = profile.predict(policy)
        assert predicted.peak_bytes == mt.verify(work, policy, steps=1, seeds=1).policy.peak_bytes
        assert predicted.peak is not None
        assert predicted.peak.layer != "3"


class _Routed(nn.Module):
    """Goes another way when `gate`, which AdamW moves by 0.001 a step, has fallen below zero in two steps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Parameter(torch.tensor(0.0015))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        y: Tensor = self.last(h.exp() if self.gate > 0 else h)
        return y + self.gate


def test_steps_of_a_model_that_goes_by_its_weights_go_one_way() -> None:
    assert_predicted(tokens(_Routed))


class _LeftOut(nn.Module):
    """Leaves calls out at random, by the dice of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for _ in range(64):
            h = h + 1 if random.random() < 0.5 else h
        y: Tensor = self.last(h)
        return y


def test_steps_of_a_model_that_goes_by_pythons_dice_go_one_way() -> None:
    assert_predicted(tokens(_LeftOut))


class _Slots(list[SlotTrace]):
    """Slots that count how often they are gone through."""

    walks = 0

    def __iter__(self) -> Iterator[SlotTrace]:
        _Slots.walks += 1
        return super().__iter__()


class _Long(nn.Module):
    """One layer after the other, many times: as a decoder that makes word after word."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(40):
            x = self.layer(x).tanh()
        return x


def test_slots_are_not_gone_through_for_every_kept_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    def traced(*args: Any) -> StepTrace:
        trace = trace_step(*args)
        trace.slots = _Slots(trace.slots)
        return trace

    monkeypatch.setattr(tracing, "trace_step", traced)
    monkeypatch.setattr(_Slots, "walks", 0)
    profile = mt.profile(tokens(_Long), options=())
    assert len(profile.timeline.kept) > 80
    # A few times for each of six traces: steps of thousands of slots have thousands of kept tensors.
    assert 0 < _Slots.walks < 60
