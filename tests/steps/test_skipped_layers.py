"""Models that skip layers at random (LayerDrop, stochastic depth): what is promised is the dearest step's."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mesa_tune as mt
from mesa_tune.conversion.conversion import MISSING_AFTER
from mesa_tune.profiler.draws import in_dearest_state
from tests.builders import known, workload

WIDTH, BLOCKS = 32, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return y


class Skipping(nn.Module):
    """Skips each block with this probability."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if torch.rand(()) >= self.probability:
                x = block(x)
        y: Tensor = self.head(x.mean(1))
        return y


def batch(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 32, WIDTH), torch.randint(0, 4, (n,))


def loss(model: nn.Module, given: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(given[0]), given[1])


def skipping(probability: float = 0.5) -> mt.Workload:
    return workload(partial(Skipping, probability), batch, loss, batch_size=8)


def forward(model: nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    model(batch(8)[0]).sum().backward()


def seed_of(blocks: int) -> int:
    """The first seed under which so many of the first blocks run, and no other."""
    wanted = [number < blocks for number in range(BLOCKS)]

    def runs(seed: int) -> list[bool]:
        torch.manual_seed(seed)
        return [float(torch.rand(())) >= 0.5 for _ in range(BLOCKS)]

    return next(seed for seed in range(999) if runs(seed) == wanted)


def test_steps_start_from_the_random_state_that_skips_the_least() -> None:
    work = skipping()
    model = work.build()
    before = torch.get_rng_state(), [parameter.clone() for parameter in model.parameters()]
    dearest, notes = in_dearest_state(work, model, work.make_batch())
    assert torch.equal(before[0], torch.get_rng_state())
    assert all(map(torch.equal, before[1], model.parameters()))
    with dearest.same_random_state():
        assert all(float(torch.rand(())) >= 0.5 for _ in range(BLOCKS))
    assert "skips layers at random" in notes[0]
    same, none = in_dearest_state(skipping(0.0), skipping(0.0).build(), work.make_batch())
    assert (same.random_state, none) == (None, ())


def test_looking_for_the_dearest_state_leaves_running_statistics_alone() -> None:
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(32 * WIDTH), nn.Linear(32 * WIDTH, 4))
    before = [buffer.clone() for buffer in model.buffers()]
    work = workload(lambda: model, batch, loss, batch_size=8)
    in_dearest_state(work, model, work.make_batch())
    assert all(map(torch.equal, before, model.buffers()))


def test_a_plan_keeps_its_promise_in_the_dearest_step(tmp_path: Path) -> None:
    work = skipping()
    profile = mt.profile(work, options=[mt.LayerSettings(level=level) for level in (16, 256)], seeds=1)
    assert {layer.name for layer in profile.layers} >= {f"blocks.{number}.up" for number in range(BLOCKS)}
    every = mt.profile(skipping(0.0), options=[], seeds=1)
    assert (profile.peak_bytes, profile.saved_bytes) == (every.peak_bytes, every.saved_bytes)
    profile.save(tmp_path / "profile.json")
    assert mt.Profile.load(tmp_path / "profile.json").random_state == profile.random_state
    plan = mt.search_policy(profile, "70%", trials=0, max_noise_ratio=1.0, workload=work)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check = mt.verify(work, plan.policy, steps=1, seeds=1)
    assert check.baseline.peak_bytes == profile.peak_bytes
    assert known(check.policy.peak_bytes) <= known(plan.budget_bytes)
    assert check.policy.peak_bytes == plan.predicted.peak_bytes


def test_a_layer_that_was_skipped_is_missing_after_twenty_forwards() -> None:
    model, rule = Skipping(0.5), mt.Policy.parse("on gelu:\n    by_name: blocks.2.gelu.0\n    level: 16\n")
    mt.convert(model, rule)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(MISSING_AFTER - 1):
            forward(model, seed_of(2))
    with pytest.warns(UserWarning, match="no gelu layer 'blocks.2.gelu.0'"):
        forward(model, seed_of(2))


@pytest.mark.parametrize("last", [True, False])
def test_a_layer_that_runs_later_is_compressed_and_a_wrong_name_is_told_at_once(last: bool) -> None:
    name = "blocks.2.gelu.0" if last else "blocks.0.gelu.7"
    model = Skipping(0.5)
    mt.convert(model, mt.Policy.parse(f"on gelu:\n    by_name: {name}\n    level: 16\n"))
    context: Any = warnings.catch_warnings() if last else pytest.warns(UserWarning, match="no gelu layer")
    with context:
        if last:
            warnings.simplefilter("error")
        forward(model, seed_of(2))
    for _ in range(MISSING_AFTER):
        forward(model, seed_of(BLOCKS))
