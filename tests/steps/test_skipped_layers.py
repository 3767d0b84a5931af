"""Models that skip layers at random (LayerDrop, stochastic depth): what is promised is the dearest step's."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mesa_tune as mt
from mesa_tune.conversion.conversion import MISSING_AFTER
from mesa_tune.measure.draws import longest_batch, look
from mesa_tune.measure.fake_steps import PolicyTracer
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
    looked = look(work, model, longest_batch(work))
    assert torch.equal(before[0], torch.get_rng_state())
    assert all(map(torch.equal, before[1], model.parameters()))
    with looked.workload.same_random_state():
        assert all(float(torch.rand(())) >= 0.5 for _ in range(BLOCKS))
    assert "skips layers at random" in looked.notes[0]
    assert looked.others == ()
    same = look(skipping(0.0), skipping(0.0).build(), longest_batch(work))
    assert (same.workload.random_state, same.notes, same.others) == (None, (), ())


def test_steps_of_the_users_own_are_looked_at_and_undone() -> None:
    def step(model: nn.Module, given: tuple[Tensor, Tensor], optimizer: torch.optim.Optimizer) -> None:
        loss(model, given).backward()
        optimizer.step()
        optimizer.zero_grad()

    work = mt.Workload(partial(Skipping, 0.5), batch, step=step, batch_size=8)
    model = work.build()
    before = [parameter.clone() for parameter in model.parameters()]
    looked = look(work, model, longest_batch(work))
    assert all(map(torch.equal, before, model.parameters()))
    assert all(parameter.grad is None for parameter in model.parameters())
    plain = look(skipping(), model, longest_batch(work))
    assert looked.workload.random_state == plain.workload.random_state


def test_a_model_without_random_numbers_runs_once() -> None:
    model, original = nn.Sequential(nn.Flatten(), nn.Linear(32 * WIDTH, 4)), mt.Workload.compute_loss
    work = workload(lambda: model, batch, loss, batch_size=8)
    with mock.patch.object(mt.Workload, "compute_loss", autospec=True, side_effect=original) as run:
        look(work, model, longest_batch(work), draws=0)
    assert run.call_count == 1


def test_looking_for_the_dearest_state_leaves_running_statistics_alone() -> None:
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(32 * WIDTH), nn.Linear(32 * WIDTH, 4))
    before = [buffer.clone() for buffer in model.buffers()]
    work = workload(lambda: model, batch, loss, batch_size=8)
    look(work, model, longest_batch(work))
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


class Branching(nn.Module):
    """Runs one of two blocks: at random, or as the batch says."""

    def __init__(self, at_random: bool) -> None:
        super().__init__()
        self.at_random = at_random
        self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        first = torch.rand(()) < 0.5 if self.at_random else x[0, 0, 0] > 0
        y: Tensor = self.head(self.blocks[int(first)](x).mean(1))
        return y


def names_of(layers: Iterable[mt.LayerEntry]) -> set[str]:
    return {layer.name.split(".")[1] for layer in layers if layer.name.startswith("blocks.")}


@pytest.mark.parametrize("at_random", [True, False])
@pytest.mark.parametrize("budget", ["70%", "85%"])
def test_layers_of_the_other_branch_are_stored_as_those_of_the_traced_one(
    at_random: bool, budget: str, tmp_path: Path
) -> None:
    work = workload(partial(Branching, at_random), batch, loss, batch_size=32)
    profile = mt.profile(work, options=[mt.LayerSettings(level=level) for level in (4, 16, 256)], seeds=1)
    (other,) = profile.others
    skipped = [profile.layer(name) for name in other.layers]
    ran = [layer for layer in profile.layers if layer not in skipped]
    assert names_of(skipped) | names_of(ran) == {"0", "1"}
    assert not names_of(skipped) & names_of(ran)
    assert any("are stored as the most alike" in note for note in profile.notes)
    stored = {layer.name: profile.layer(layer.stored_like) for layer in skipped if layer.stored_like}
    assert {name.split(".")[-1] for name in other.layers if name not in stored} == {
        "norm"
    }  # `up` has its output
    assert all(like.name.split(".")[2:] == name.split(".")[2:] for name, like in stored.items())
    assert all(profile.layer(name).bytes == like.bytes for name, like in stored.items())
    assert {layer.own_bytes for layer in skipped} == {0}
    assert {layer.share for layer in skipped} == {other.share}
    profile.save(tmp_path / "profile.json")
    assert mt.Profile.load(tmp_path / "profile.json") == profile
    limits: dict[str, Any] = {"trials": 0, "max_noise_ratio": 1e6, "workload": work}
    plan = mt.search_policy(profile, budget, **limits)
    chosen = profile.assignment(plan.policy)
    assert all(chosen[name] == chosen[like.name] for name, like in stored.items())
    for state, draw in ((profile.random_state, 0), (other.random_state, other.draw)):
        step = replace(work, random_state=state)
        found = PolicyTracer.of(step, replace(profile, random_state=state), 32)
        peak = found._real_on(plan.policy, step, step.make_batch(draw=draw)).peak
        assert peak <= plan.predicted.peak_bytes <= known(plan.budget_bytes)


@pytest.mark.parametrize("at_random", [True, False])
def test_a_layer_that_the_traced_step_skips_has_the_price_of_its_own_steps(at_random: bool) -> None:
    """Both branches are alike, so in the steps that run it, it errs as its like does in the others."""
    work = workload(partial(Branching, at_random), batch, loss, batch_size=32)
    profile = mt.profile(work, options=[mt.LayerSettings(level=level) for level in (4, 16)], seeds=3)
    skipped = [layer for layer in profile.layers if layer.name in profile.skipped and layer.tag == "fc"]
    assert len(skipped) == 2
    for layer in skipped:
        like = profile.layer(str(layer.stored_like))
        for level in (4, 16):
            own, other = (one.like(mt.LayerSettings(level=level)) for one in (layer, like))
            assert own is not None
            assert other is not None
            assert 0.2 < known(own.noise_ratio) / layer.share / known(other.noise_ratio) < 5
    four = profile.predict(mt.Policy.uniform(level=16))
    names = {layer.name: mt.LayerSettings(level=16) for layer in profile.layers}
    traced = {name: settings for name, settings in names.items() if name not in profile.skipped}
    alone = profile.predict_assignment(traced)
    assert known(four.gradient_noise_ratio) > known(alone.gradient_noise_ratio)
    assert four.step_ms == alone.step_ms
    assert four.peak_bytes == alone.peak_bytes
