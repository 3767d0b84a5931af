"""The steps that a profile traces: what dies in them, which way they go, how many calls they make."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mesa_tune as mt
from mesa_tune.measure import tracing
from mesa_tune.measure.memory.step_trace import SlotTrace, StepTrace
from mesa_tune.measure.memory.trace import trace_step
from tests.builders import known, mean, workload
from tests.step_memory import FOUR_BITS, PLAIN, Composed, measured, second_step

pytestmark = pytest.mark.usefixtures("without_variants")

WIDTH = 64


def tokens(kind: Callable[[], nn.Module]) -> mt.Workload:
    return workload(kind, lambda n: torch.randn(n, 20, WIDTH), mean, batch_size=16)


def assert_predicted(work: mt.Workload) -> None:
    """The saved bytes that a profile predicts are those of real steps, plain and in 4 bits."""
    profile = mt.profile(work, options=())
    for policy in (PLAIN, FOUR_BITS):
        assert profile.predict(policy).saved_bytes == measured(work, policy).saved_bytes


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def test_what_a_branch_without_a_loss_saves_is_not_counted() -> None:
    """Nodes of the branch save their own outputs, which die in the forward."""

    def forward(model: Any, x: Tensor) -> Any:
        h = model.first(x)
        model.aside(h).relu_().softmax(-1).cumsum(-1).exp().cumprod(-1).sqrt()
        return model.last(h)

    assert_predicted(tokens(lambda: Composed(forward, first=linear(), aside=linear(), last=linear())))


def test_the_peak_is_at_the_layer_before_a_dropout_that_drops_nothing() -> None:
    def model() -> nn.Module:
        wide = (nn.Linear(WIDTH, 16 * WIDTH), nn.GELU(), nn.Dropout(0.0), nn.Linear(16 * WIDTH, WIDTH))
        return nn.Sequential(linear(), *wide)

    work = tokens(model)
    profile = mt.profile(work, options=())
    for policy in (PLAIN, FOUR_BITS):
        predicted = profile.predict(policy)
        assert predicted.peak_bytes == second_step(work, policy).peak_bytes
        assert known(predicted.peak).layer != "3"


def test_steps_of_a_model_that_goes_by_its_weights_go_one_way() -> None:
    """`gate`, which AdamW moves by 0.001 a step, falls below zero in two steps."""

    def forward(model: Any, x: Tensor) -> Any:
        h = model.first(x).tanh()
        return model.last(h.exp() if model.gate > 0 else h) + model.gate

    def build() -> nn.Module:
        return Composed(forward, first=linear(), last=linear(), gate=nn.Parameter(torch.tensor(0.0015)))

    assert_predicted(tokens(build))


def test_steps_of_a_model_that_goes_by_pythons_dice_go_one_way() -> None:
    def forward(model: Any, x: Tensor) -> Any:
        h = model.first(x)
        for _ in range(64):
            h = h + 1 if random.random() < 0.5 else h
        return model.last(h)

    assert_predicted(tokens(lambda: Composed(forward, first=linear(), last=linear())))


class _Slots(list[SlotTrace]):
    """Slots that count how often they are gone through."""

    walks = 0

    def __iter__(self) -> Iterator[SlotTrace]:
        _Slots.walks += 1
        return super().__iter__()


def test_slots_are_not_gone_through_for_every_kept_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        for _ in range(40):
            x = model.layer(x).tanh()
        return x

    def traced(*args: Any) -> StepTrace:
        trace = trace_step(*args)
        trace.slots = _Slots(trace.slots)
        return trace

    monkeypatch.setattr(tracing, "trace_step", traced)
    monkeypatch.setattr(_Slots, "walks", 0)
    profile = mt.profile(tokens(lambda: Composed(forward, layer=linear())), options=())
    assert len(profile.timeline.kept) > 80
    # A few times for each of six traces: steps of thousands of slots have thousands of kept tensors.
    assert 0 < _Slots.walks < 60
