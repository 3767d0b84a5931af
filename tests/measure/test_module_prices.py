"""Prices of modules that run again in backward, against whole steps that do so."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mesa_tune as mt
from mesa_tune import ops
from mesa_tune.measure.errors.joint_error import JointError
from mesa_tune.measure.timing.kinds import Kind, timed_policies
from mesa_tune.measure.timing.step_time import StepTimes, with_times
from mesa_tune.profiles.profile import Profile
from tests.builders import MLPBlock, mean_error, workload
from tests.step_memory import Composed, regression, without_parts

WIDTH, ROWS = 64, 128
OPTIONS = [mt.LayerSettings(level=level) for level in (4, 16, 256)]


class InPlace(MLPBlock):
    def forward(self, x: Tensor) -> Tensor:
        return x.add_(super().forward(x.clone()))


def blocks() -> nn.Module:
    """Blocks that run once, twice, change their input in place, and never run."""

    def forward(m: Any, x: Tensor) -> Any:
        x = m.embed(x)
        for block in (*m.once, *m.twice, *m.twice):
            x = block(x)
        return m.changing(x * 1.5)

    embed, once = nn.Linear(WIDTH, WIDTH), nn.ModuleList([MLPBlock(WIDTH), MLPBlock(WIDTH)])
    twice, changing = nn.ModuleList([MLPBlock(WIDTH)]), nn.Sequential(InPlace(WIDTH))
    unused = nn.ModuleList([MLPBlock(WIDTH)])
    return Composed(forward, embed=embed, once=once, twice=twice, changing=changing, unused=unused)


WORKLOAD = workload(
    blocks, lambda n: (torch.randn(n, WIDTH), torch.randn(n, WIDTH)), regression, batch_size=ROWS
)


def _again(module: str, settings: mt.LayerSettings) -> mt.Policy:
    return mt.Policy.parse("").rerunning({module: settings})


@pytest.fixture(scope="module", name="profile")
def _profile() -> Profile:
    with without_parts():
        return mt.profile(WORKLOAD, options=OPTIONS, seeds=4)


def test_only_blocks_that_can_run_again_have_prices(profile: Profile) -> None:
    assert [module.name for module in profile.modules] == ["once.0", "once.1"]


def test_bytes_are_those_of_the_inputs(profile: Profile) -> None:
    for module in profile.modules:
        assert module.input_bytes == ROWS * WIDTH * 4
        assert [option.settings.level for option in module.options] == [4, 16, 256]
        for option in module.options:
            assert option.settings.store == "recompute"
            assert option.bytes == ops.packed_bytes(ROWS * WIDTH, option.settings.bits, WIDTH)


def test_errors_are_those_of_steps_on_other_batches(profile: Profile) -> None:
    joint = JointError(WORKLOAD)
    pairs = [(draw, seed) for draw in range(50, 54) for seed in range(2)]
    for module in profile.modules:
        for option in module.options:
            measured = mean_error(joint, _again(module.name, option.settings), pairs)
            assert option.gradient_error == pytest.approx(measured, rel=0.4)
            assert option.batches == 3
            assert option.provenance == ("inferred" if option.settings.level == 4 else "measured")


def test_each_module_has_a_time(profile: Profile) -> None:
    assert profile.modules
    assert all(0 <= module.rerun_ms < math.inf for module in profile.modules)


def test_a_prediction_in_which_all_run_again_is_what_was_measured(profile: Profile) -> None:
    """The measured time contains the packing of the inputs, and each module has its share of the rest."""
    settings = mt.LayerSettings(level=16)
    timed = with_times(profile, StepTimes(50.0, 2.0, {}, rerun=12.0), settings)
    policy = timed_policies(timed, settings)[Kind.RERUN]
    assert timed.predict(policy).step_ms == pytest.approx(50.0 + 2.0 + 12.0)
    (first, before), *others = (
        (new.rerun_ms, old.rerun_ms) for new, old in zip(timed.modules, profile.modules, strict=True)
    )
    assert all(new * before == pytest.approx(first * old) for new, old in others)
    assert with_times(profile, StepTimes(50.0, 2.0, {}), settings).modules == profile.modules


def test_they_are_in_the_document_and_older_profiles_have_none(profile: Profile) -> None:
    document = json.loads(json.dumps(profile.to_dict()))
    assert Profile.from_dict(document).modules == profile.modules
    del document["modules"]
    assert Profile.from_dict(document).modules == ()


def test_no_options_no_prices() -> None:
    work = replace(WORKLOAD, model=lambda: nn.Sequential(MLPBlock(WIDTH)))
    for options in ([], [mt.LayerSettings(level=16, drop=0.5)]):
        found = mt.profile(work, options=options, seeds=1)
        assert found.timeline.modules == ("0",)
        assert found.modules == ()
