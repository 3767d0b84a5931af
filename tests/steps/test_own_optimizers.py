"""Steps of the user's own whose backwards depend on each other, or that make other calls in each batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adam, Optimizer

import mesa_tune as mt
from mesa_tune import notice
from mesa_tune.integrations.compression import Compression, Training
from mesa_tune.profiles.profile import Profile
from tests.builders import known

OPTIONS = [mt.LayerSettings(level=16), mt.LayerSettings()]
Batch = tuple[Tensor, Tensor]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 10))


def batch(n: int) -> Batch:
    return torch.randn(n, 64), torch.randint(0, 10, (n,))


def loss(trained: nn.Module, given: Batch) -> Tensor:
    return F.cross_entropy(trained(given[0]), given[1])


def by_closure(trained: nn.Module, given: Batch, optimizer: Optimizer) -> None:
    def closure() -> float:
        optimizer.zero_grad()
        value = loss(trained, given)
        value.backward()
        return value.item()

    optimizer.step(closure)


def with_step(step: Callable[..., object], optimizer: Callable[..., Optimizer]) -> mt.Workload:
    return mt.Workload(model, batch, optimizer=optimizer, step=step, batch_size=128)


def lbfgs(parameters: Any) -> Optimizer:
    return LBFGS(parameters, lr=0.5, max_iter=4)


@pytest.mark.parametrize("optimizer", [lbfgs, Adam])
def test_a_closure_is_profiled_however_often_it_runs(optimizer: Callable[..., Optimizer]) -> None:
    work = with_step(by_closure, optimizer)
    profile = mt.profile(work, options=OPTIONS, seeds=1)
    plain = mt.profile(mt.Workload(model, batch, loss, batch_size=128), options=OPTIONS, seeds=1)
    assert profile.saved_bytes == plain.saved_bytes
    four, same = (each.predict(mt.Policy.uniform(level=16)) for each in (profile, plain))
    assert four.saved_bytes == same.saved_bytes
    assert four.gradient_error == pytest.approx(same.gradient_error, rel=0.05)
    check = mt.verify(work, mt.Policy.uniform(level=16), steps=1, seeds=1)
    # LBFGS also leaves one of its own flat gradients from the step before.
    flat = 4 * sum(parameter.numel() for parameter in model().parameters())
    allowed = (0,) if optimizer is Adam else (0, flat + 4)
    assert known(check.policy.saved_bytes) - four.saved_bytes in allowed
    assert check.baseline.saved_bytes == profile.saved_bytes


def training(trained: nn.Module, optimizer: Callable[..., Optimizer]) -> Training:
    return Training(trained, loss, lambda: [batch(8)], optimizer(trained.parameters()))


def test_who_sees_an_optimizer_of_gradient_differences_says_what_rounding_does() -> None:
    work = with_step(by_closure, lbfgs)
    profile = mt.profile(work, options=OPTIONS[:1], seeds=1)
    assert any(note.startswith("LBFGS divides by differences") for note in profile.notes)
    trained = model()
    notice._given.clear()
    with pytest.warns(UserWarning, match="LBFGS divides by differences"):
        Compression(mt.Policy.uniform(level=16)).start(training(trained, lbfgs))
    notice._given.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Compression(mt.Policy.uniform(level=16)).start(training(trained, Adam))


def test_a_measured_step_runs_a_closure_once() -> None:
    calls: list[bool] = []
    work = with_step(by_closure, lbfgs)
    built = work.build()
    built.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    stepper = work.function_stepper(work.make_optimizer(built))
    before = [parameter.detach().clone() for parameter in built.parameters()]
    stepper.prepare(built, work.make_batch(), torch.enable_grad)
    assert all(map(torch.equal, before, built.parameters()))
    stepper.run(built, work.make_batch())
    assert not any(map(torch.equal, before, built.parameters()))
    assert calls == [True, True]


class Sharpness(SGD):
    """Moves the weights uphill between two backwards (SAM)."""

    @torch.no_grad()
    def climb(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(parameter.grad, alpha=0.05)
        self.zero_grad()


def of_sam(trained: nn.Module, given: Batch, optimizer: Optimizer) -> None:
    assert isinstance(optimizer, Sharpness)
    optimizer.zero_grad()
    loss(trained, given).backward()
    optimizer.climb()
    loss(trained, given).backward()
    optimizer.step()


def test_weights_that_move_between_backwards_are_priced_where_they_are_then() -> None:
    """The second backward is that of the loss at the weights after the climb."""
    work = with_step(of_sam, lambda parameters: Sharpness(parameters, lr=0.1))
    profile = mt.profile(work, options=OPTIONS, seeds=2)

    def climbed() -> nn.Module:
        moved = work.build()
        optimizer = Sharpness(moved.parameters(), lr=0.1)
        loss(moved, work.make_batch(draw=1)).backward()
        optimizer.climb()
        optimizer.zero_grad(set_to_none=True)
        return moved

    there = mt.profile(mt.Workload(climbed, batch, loss, batch_size=128), options=OPTIONS, seeds=2)
    assert len(profile.layers) == len(there.layers) == 3
    for ours, alone in zip(profile.layers, there.layers, strict=True):
        for one, other in zip(ours.options, alone.options, strict=True):
            # Calibrated by whole steps, which climb from batches of their own.
            assert one.gradient_error == pytest.approx(other.gradient_error, rel=0.1)
    check, four = mt.verify(work, mt.Policy.uniform(level=16), steps=1, seeds=2), mt.Policy.uniform(level=16)
    assert profile.predict(four).gradient_error == pytest.approx(check.gradient_error, rel=0.3)
    assert profile.predict(four).saved_bytes == check.policy.saved_bytes


def of_objects(trained: nn.Module, given: tuple[Tensor, list[Tensor]]) -> Tensor:
    """A term for each image with objects: as many calls as a batch has such images."""
    maps: Tensor = trained(given[0])
    total = maps.square().mean()
    for one, boxes in zip(maps, given[1], strict=True):
        if len(boxes):
            total = total + 1 - torch.max(one.expand(len(boxes), -1), boxes).sum() / 9
    return total


def objects(n: int) -> tuple[Tensor, list[Tensor]]:
    counts = (3 * (torch.rand(n) < torch.rand(()))).tolist()
    return torch.randn(n, 64), [torch.rand(int(count), 10) for count in counts]


def test_a_loss_that_loops_over_targets_is_profiled_and_searched() -> None:
    profile = mt.profile(mt.Workload(model, objects, of_objects, batch_size=8), options=OPTIONS, seeds=1)
    assert sum(layer.name.startswith("loss.max.") for layer in profile.layers) > 1
    for layer in profile.layers:
        for option in layer.options:
            assert profile.predict_assignment({layer.name: option.settings}).step_ms is not None
    small = search(profile)
    assert small.predicted.peak_bytes <= profile.peak_bytes
    assert known(small.predicted.step_ms) > 0


def search(profile: Profile) -> mt.Plan:
    return mt.search_policy(profile, objective="memory", trials=0, max_noise_ratio=1.0, max_slowdown=100.0)
