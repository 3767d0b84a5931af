"""The noise of whole steps from slices of batches, and where only whole steps show it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mesa_tune as mt
from mesa_tune.measure.errors.joint_error import JointError
from mesa_tune.measure.errors.sliced_noise import BATCHES, SLICES, noise_of_steps
from tests.builders import workload
from tests.measure.by_hand import OwnByHand, gradients_of
from tests.measure.models import three_classes

STEPS = 256


def classifier(*inside: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(20, 64), nn.GELU(), *inside, nn.Linear(64, 3))


def entropy(net: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(net(batch[0]), batch[1])


def of_uneven_weights(net: nn.Module, batch: Any) -> Tensor:
    """A mean over tokens, of which each sample has another number."""
    x, labels = batch
    tokens = 1 + labels.float() / 2
    loss: Tensor = (F.cross_entropy(net(x), labels, reduction="none") * tokens).sum() / tokens.sum()
    return loss


def step(net: nn.Module, batch: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    entropy(net, batch).backward()
    optimizer.step()


SLICED = {
    "plain": workload(classifier, three_classes, entropy, batch_size=64),
    "size": workload(classifier, three_classes, entropy, batch_size=68),
    "micro-batches": workload(classifier, three_classes, entropy, batch_size=16, accumulation=3),
    "dropout": workload(lambda: classifier(nn.Dropout(0.5)), three_classes, entropy, batch_size=64),
    "own step": mt.Workload(classifier, three_classes, step=step, batch_size=64),
    "tokens": workload(classifier, three_classes, of_uneven_weights, batch_size=64),
}


@pytest.mark.parametrize("work", SLICED.values(), ids=list(SLICED))
def test_slices_show_the_noise_of_whole_steps(work: mt.Workload) -> None:
    noise = noise_of_steps(JointError(work))
    assert noise.count == SLICES * BATCHES
    table = gradients_of(replace(work, step=None, loss=work.loss or entropy), range(1000, 1000 + STEPS))
    right = OwnByHand(work.build(), table)
    assert noise.own.ratio(right.variances.numpy()) == pytest.approx(1.0, rel=0.2)
    variance, mean = float(table.var(0).sum()), float(table.square().sum(1).mean())
    assert noise.relative == pytest.approx(variance / mean, rel=0.25)


def coupled(net: nn.Module, batch: Any) -> Tensor:
    """Outputs whose mean over the batch is to be near zero."""
    loss: Tensor = net(batch[0]).mean(0).square().sum()
    return loss


def alike(size: int) -> Any:
    """All samples of a batch come from one place."""
    x, labels = three_classes(size)
    return x + 3 * torch.randn(1, 20), labels


def step_in_halves(net: nn.Module, batch: Any, optimizer: torch.optim.Optimizer) -> None:
    """Accumulates micro-batches of 32 samples, whatever the batch size."""
    optimizer.zero_grad()
    for x, labels in zip(batch[0].split(32), batch[1].split(32), strict=True):
        entropy(net, (x, labels)).backward()
    optimizer.step()


def of_full_batches(net: nn.Module, batch: Any) -> Tensor:
    if len(batch[0]) < 64:
        raise ValueError("64 samples, please")
    return entropy(net, batch)


WHOLE = {
    "batch norm": workload(lambda: classifier(nn.BatchNorm1d(64)), three_classes, entropy, batch_size=64),
    "few samples": workload(classifier, three_classes, entropy, batch_size=SLICES - 1),
    "a step in halves": mt.Workload(classifier, three_classes, step=step_in_halves, batch_size=64),
    "samples that know each other": workload(classifier, three_classes, coupled, batch_size=64),
    "sums": workload(
        classifier, three_classes, lambda net, batch: 64 * entropy(net, batch) * (len(batch[0]) / 64)
    ),
    "batches of one place": workload(classifier, alike, entropy, batch_size=64),
    "a loss that refuses": workload(classifier, three_classes, of_full_batches, batch_size=64),
    "equal batches": workload(classifier, lambda n: (torch.ones(n, 20), torch.zeros(n).long()), entropy),
}


@pytest.mark.parametrize("work", WHOLE.values(), ids=list(WHOLE))
def test_where_slices_do_not_show_it_whole_steps_do(work: mt.Workload) -> None:
    joint = JointError(work)
    assert noise_of_steps(joint) == JointError(work).noise()
    assert joint.own is not None
