"""Errors by group of parameters, and in Adam's scale, against a calculation by hand."""

from __future__ import annotations

import json
import statistics
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mesa_tune as mt
from mesa_tune.commands.verify import describe
from mesa_tune.measure.errors.by_group import STATE_STEPS, errors_by_group
from mesa_tune.measure.errors.joint_error import JointError
from mesa_tune.profiles.verification import GroupError
from tests.builders import workload
from tests.step_memory import regression

POLICY = mt.Policy.uniform(level=4)
PAIRS = [(0, 0), (0, 1), (3, 0)]
FIRST = 20
Parts = dict[str, Tensor]


def two_parts() -> nn.Module:
    first = nn.Sequential(nn.Linear(64, 64), nn.GELU())
    return nn.Sequential(OrderedDict(first=first, last=nn.Linear(64, 64)))


def regressing(model: Callable[[], nn.Module] = two_parts, **options: Any) -> mt.Workload:
    batch = lambda n: (torch.randn(n, 64), torch.randn(n, 64))  # noqa: E731
    return workload(model, batch, regression, batch_size=128, **options)


def two_groups(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    every = list(parameters)
    weights = [one for one in every if one.dim() > 1]
    biases = {"params": [one for one in every if one.dim() == 1], "eps": 1e-3, "name": "biases"}
    groups: list[dict[str, Any]] = [{"params": weights}, biases]
    return torch.optim.Adam(groups, betas=(0.8, 0.9), amsgrad=True)


def gradient(net: nn.Module, work: mt.Workload, draw: int) -> Parts:
    net.zero_grad()
    work.compute_loss(net, work.make_batch(draw=draw)).backward()
    return {name: one.grad.clone() for name, one in net.named_parameters() if one.grad is not None}


def scales_by_hand(work: mt.Workload, beta: float, eps: Callable[[str], float], largest: bool) -> Parts:
    """√v̂ + ε after the steps, whose gradients are summed up here; the optimizer only moves the weights."""
    net = work.build()
    optimizer = work.make_optimizer(net)
    second: Parts = {}
    most: Parts = {}
    for draw in range(FIRST, FIRST + STATE_STEPS):
        for name, part in gradient(net, work, draw).items():
            second[name] = beta * second.get(name, torch.zeros_like(part)) + (1 - beta) * part.square()
            most[name] = torch.maximum(most.get(name, second[name]), second[name])
        optimizer.step()
    chosen = most if largest else second
    return {name: (part / (1 - beta**STATE_STEPS)).sqrt() + eps(name) for name, part in chosen.items()}


def error_by_hand(work: mt.Workload, names: Callable[[str], bool], scales: Parts | None) -> float:
    errors = []
    for draw, seed in PAIRS:
        net = work.build()
        exact = gradient(net, work, draw)
        mt.convert(net, POLICY, seed=draw * 1_000_003 + seed)
        net.zero_grad()
        with mt.compress_saved(POLICY, seed=draw * 1_000_003 + seed):
            work.compute_loss(net, work.make_batch(draw=draw)).backward()
        change = size = 0.0
        for name, one in net.named_parameters():
            if names(name) and one.grad is not None:
                scale = 1.0 if scales is None else scales[name].double()
                change += float(((one.grad - exact[name]).double() / scale).square().sum())
                size += float((exact[name].double() / scale).square().sum())
        errors.append(change / size)
    return statistics.fmean(errors)


def found_for(work: mt.Workload) -> dict[str, GroupError]:
    groups = errors_by_group(JointError(work), POLICY, PAIRS, FIRST)
    return {group.group: group for group in groups}


def assert_as_by_hand(work: mt.Workload, group: GroupError, inside: Any, scales: Parts) -> None:
    assert group.gradient_error == pytest.approx(error_by_hand(work, inside, None), rel=1e-4)
    assert group.preconditioned_error == pytest.approx(error_by_hand(work, inside, scales), rel=1e-3)


def test_modules_are_the_groups_of_an_optimizer_with_one() -> None:
    work = regressing()
    found = found_for(work)
    scales = scales_by_hand(work, 0.999, lambda _: 1e-8, largest=False)
    assert list(found) == ["all", "first", "last"]
    assert [group.elements for group in found.values()] == [2 * 4160, 4160, 4160]
    for name, group in found.items():
        assert_as_by_hand(work, group, lambda path, name=name: name == "all" or path.startswith(name), scales)
        assert group.gradient_error != pytest.approx(group.preconditioned_error, rel=0.01)


def test_groups_of_the_optimizer_have_scales_of_their_own() -> None:
    work = regressing(optimizer=two_groups)
    found = found_for(work)
    scales = scales_by_hand(work, 0.9, lambda name: 1e-3 if name.endswith("bias") else 1e-8, largest=True)
    assert list(found) == ["all", "group 0", "biases"]
    for name, ending in (("all", ""), ("group 0", "weight"), ("biases", "bias")):
        assert_as_by_hand(work, found[name], lambda path, ending=ending: path.endswith(ending), scales)


def test_no_scale_without_adam_and_no_error_of_what_gets_no_gradient() -> None:
    def build() -> nn.Module:
        net = two_parts()
        net.register_parameter("unused", nn.Parameter(torch.ones(3)))
        return net

    work = regressing(build, optimizer=lambda parts: torch.optim.SGD(parts, 0.1))
    found = found_for(work)
    assert {group.preconditioned_error for group in found.values()} == {None}
    assert found["the model itself"] == GroupError("the model itself", 3, None, None)
    assert found["last"].gradient_error
    each = [error for pair in PAIRS for error in JointError(work).errors(POLICY, [pair])]
    assert [error for error, _ in JointError(work).errors(POLICY, PAIRS)] == pytest.approx(
        [error for error, _ in each]
    )


def test_verify_measures_them_on_request_and_saves_them() -> None:
    plain = mt.verify(regressing(), POLICY, steps=1, seeds=1)
    check = mt.verify(regressing(), POLICY, steps=1, seeds=1, by_group=True)
    assert plain.groups == ()
    assert check.groups[0].gradient_error == pytest.approx(check.gradient_error)
    assert check.gradient_errors == plain.gradient_errors
    document = json.loads(json.dumps(check.to_dict()))
    assert mt.Verification.from_dict(document).groups == check.groups
    del document["groups"]  # of an older file
    assert mt.Verification.from_dict(document).groups == ()
    lines = describe(check)
    (row,) = [line for line in lines if line.startswith("first")]
    assert f"{check.groups[1].preconditioned_error:.1e}" in row
    assert max(map(len, lines)) <= 80
    assert not any(line.startswith("first") for line in describe(plain))
