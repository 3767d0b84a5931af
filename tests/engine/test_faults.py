"""Faults in a step: the next step is that of a model which did not have the fault."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mesa_tune as mt
from mesa_tune.codecs import quantize
from mesa_tune.engine import function as apply
from mesa_tune.engine.routing import state, top_hooks
from tests.builders import Checkpointed, ViT, gradients
from tests.step_memory import Composed

Gradients = dict[str, Tensor]


class Interrupted(nn.Module):
    """Raises in its forward or backward, once, if told to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.faults: dict[str, type[BaseException]] = {}

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.linear(x))
        self._fail("in forward")
        if y.requires_grad:
            y.register_hook(lambda _: self._fail("in backward"))
        return y.sinh()

    def _fail(self, where: str) -> None:
        if where in self.faults:
            raise self.faults.pop(where)(where)


def network(reentrant: bool | None) -> nn.Module:
    """Blocks around a module that may raise, which is optionally checkpointed."""
    first, last, middle = ViT(depth=1), nn.Linear(64, 10), Checkpointed(Interrupted(), reentrant)
    parts = {"first": first, "last": last, "middle": middle}
    return Composed(lambda m, x: m.last(m.middle(m.first.get_features(x))), **parts)


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    yield
    assert not state.frames
    assert not state.active
    assert not state.paused
    assert state.function is None
    assert top_hooks() is None
    assert torch.overrides._get_current_function_mode() is None


def batch(turn: int) -> Tensor:
    return torch.randn(4, 24, 16, generator=torch.Generator().manual_seed(turn))


def step(model: nn.Module, turn: int) -> Gradients:
    return gradients(model, batch(turn))


def same(one: Gradients, other: Gradients) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def networks(reentrant: bool | None = None, **settings: Any) -> tuple[Any, Any]:
    """A model, and one that will not have the fault."""
    torch.manual_seed(0)
    plain, policy = network(reentrant), mt.Policy.uniform(level=16, **settings)
    one, other = (mt.convert(copy.deepcopy(plain), policy, seed=1, min_elements=0) for _ in range(2))
    return one, other


def check_next_steps(model: nn.Module, other: nn.Module) -> None:
    for turn in range(10, 13):
        assert same(step(model, turn), step(other, turn))


@pytest.mark.parametrize("where", ["in forward", "in backward"])
@pytest.mark.parametrize(
    ("fault", "steps", "reentrant"),
    [(ValueError, 0, None), (KeyboardInterrupt, 4, None), (ValueError, 4, False), (ValueError, 4, True)],
    ids=["", "interrupt-cached", "non-reentrant", "reentrant"],
)
def test_a_fault(where: str, fault: type[BaseException], steps: int, reentrant: bool | None) -> None:
    model, other = networks(reentrant)
    for turn in range(steps):
        assert same(step(model, turn), step(other, turn))
    model.middle.part.faults[where] = fault
    with pytest.raises(fault, match=where):
        step(model, 9)
    _ = other(batch(9)) if where == "in forward" else step(other, 9)  # that forward counts, with its noise
    check_next_steps(model, other)


@pytest.mark.parametrize(
    "where", [(quantize, "encode_rows"), (apply, "_gradients")], ids=["encode", "backward"]
)
@pytest.mark.parametrize(("calls", "steps"), [(1, 0), (4, 4)])
def test_an_interrupt_inside_our_own_code(
    where: tuple[Any, str], calls: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, other = networks()
    for turn in range(steps):
        assert same(step(model, turn), step(other, turn))
    right, count = getattr(*where), iter(range(calls))

    def interrupted(*given: Any) -> Any:
        if next(count, None) is None:
            raise KeyboardInterrupt
        return right(*given)

    with monkeypatch.context() as patch:
        patch.setattr(*where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            step(model, 9)
    step(other, 9)
    check_next_steps(model, other)


@pytest.mark.parametrize("settings", [{}, {"ema_decay": 0.9}, {"store": "derive"}], ids=str)
@pytest.mark.parametrize("inside", [False, True], ids=["between steps", "before the backward"])
def test_a_forward_without_gradients(inside: bool, settings: dict[str, Any]) -> None:
    model, other = networks(**settings)
    for turn in range(4):
        output = model(batch(turn)) if inside else None
        model.eval()
        with torch.no_grad():
            model(batch(20))
        with torch.inference_mode():
            model(batch(21)[:2])
        model.train()
        found = step(model, turn) if output is None else gradients(model, run=lambda output=output: output)
        assert same(found, step(other, turn))


@pytest.mark.parametrize("level", [256, 4])
def test_a_scaler_skips_the_steps_that_it_skips_of_the_plain_model(level: int) -> None:
    torch.manual_seed(0)
    plain = ViT()
    model = mt.convert(copy.deepcopy(plain), mt.Policy.uniform(level=level), seed=1, min_elements=0)
    histories = [_scaled(each) for each in (plain, model)]
    assert histories[0] == histories[1]
    assert True in [moved for moved, _ in histories[0]]
    assert False in [moved for moved, _ in histories[0]]


def _scaled(model: nn.Module) -> list[tuple[bool, float]]:
    """Whether each of some steps changed the model, and the scale after it; in float16."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=4)
    optimizer, history = torch.optim.SGD(model.parameters(), lr=1e-3), []
    weight = next(model.parameters())
    for turn in range(10):
        before = weight.detach().clone()
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model(batch(turn)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        history.append((not torch.equal(before, weight), scaler.get_scale()))
        assert all(bool(p.isfinite().all()) for p in model.parameters())
    return history


def test_the_step_after_an_overflow_is_right() -> None:
    model, other = networks()
    for each, scale in ((model, math.inf), (other, 1.0)):
        for turn in range(4):
            step(each, turn)
        with torch.autocast("cpu", torch.float16):
            (each(batch(9)).float().square().mean() * scale).backward()
    assert not all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
    check_next_steps(model, other)


@pytest.mark.parametrize("settings", [{}, {"ema_decay": 0.9}, {"store": "derive"}, {"drop": 0.5}], ids=str)
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_number_that_is_none_in_an_activation(number: float, settings: dict[str, Any]) -> None:
    model, other = networks(**settings)
    plain = mt.revert(copy.deepcopy(model))
    for turn in range(3):
        assert same(step(model, turn), step(other, turn))
    grads = []
    for each in (model, plain):
        bad = batch(9)
        bad[1, 3, 2] = number
        each.zero_grad()
        each(bad).square().mean().backward()
        grads.append([p.grad for p in each.parameters() if p.grad is not None])
    for found, right in zip(*grads, strict=True):
        assert not bool((found.isfinite() & ~right.isfinite()).any())  # no bad number is lost
    if settings.keys() != {"ema_decay"}:  # whose ranges have seen another batch
        other(batch(9))
        check_next_steps(model, other)
    for turn in range(10, 13):
        assert all(bool(grad.isfinite().all()) for grad in step(model, turn).values())


def test_a_graph_that_is_never_walked_back_leaves_nothing() -> None:
    model, other = networks()
    for turn in range(4):
        kept = [model(batch(20)) for _ in range(2)]
        del kept
        for _ in range(2):
            other(batch(21))
        assert same(step(model, turn), step(other, turn))
