"""What hooks meet and cannot encode stays, and the profile knows: class numbers, few floats."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mesa_tune as mt
from mesa_tune.profiler.meter import measure_step
from mesa_tune.profiler.profile import Profile

WIDTH, CLASSES = 64, 96


def made() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, CLASSES))


def batch(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 20, WIDTH), torch.randint(0, CLASSES, (n, 21))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    # Cutting a column off copies the class numbers: they are born in the step, and stay whatever the policy.
    likely = F.log_softmax(model(batch[0]), -1)
    return F.nll_loss(likely.flatten(0, 1), batch[1][:, 1:].flatten())


WORK = mt.Workload(made, batch, loss, batch_size=16)


@pytest.fixture(scope="module", name="profile")
def _profile() -> Profile:
    return mt.profile(WORK, options=())


@pytest.mark.parametrize("batch_size", [16, 40])
@pytest.mark.parametrize("level", [None, 256, 16], ids=["plain", "8 bits", "4 bits"])
def test_saved_bytes_with_class_numbers_are_those_of_a_real_step(
    profile: Profile, level: int | None, batch_size: int
) -> None:
    policy = mt.Policy.parse("") if level is None else mt.Policy.uniform(level=level)
    model = mt.convert(WORK.build(), policy, seed=0)

    def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        with mt.compress_saved(policy, seed=0):
            return loss(model, batch)

    found = measure_step(model, WORK.make_batch(batch_size), step, WORK.make_optimizer(model))
    predicted = profile.predict(policy, batch_size=batch_size)
    # A scalar that nothing outside the call has seen (the sum of weights) is not found again.
    assert predicted.saved_bytes == pytest.approx(found.saved_bytes, abs=8)


def test_storing_the_loss_in_fewer_bits_frees_no_class_number(profile: Profile) -> None:
    """What the log-softmax keeps exactly, the loss would only copy."""
    alone = {"loss.nll_loss.0": mt.LayerSettings(level=256)}
    assert profile.timeline.saved_bytes(alone) > profile.timeline.saved_bytes({})
