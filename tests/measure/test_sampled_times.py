"""What leaving out rows adds to the time of a step: as it was measured in steps, not of encoding alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import nn

import mesa_tune as mt
from mesa_tune.measure.timing.kinds import Kind, timed_policies
from mesa_tune.measure.timing.step_time import StepTimes, with_times
from mesa_tune.policy.settings import LayerSettings
from mesa_tune.profiles.profile import Profile
from tests.builders import policy_of, workload
from tests.step_memory import squares
from tests.synthetic import GRID, synthetic_profile

pytestmark = pytest.mark.usefixtures("without_variants")

FOUR = LayerSettings(level=16, group_size=256)
QUARTER, FIFTH, TENTH = (LayerSettings(level=4, rows=share) for share in (0.25, 0.2, 0.1))


def sampling(*settings: LayerSettings) -> Profile:
    """A profile of which the linear layers have options that leave out rows."""
    profile = synthetic_profile(grid=(*GRID, *settings))
    layers = [
        layer
        if layer.tag == "fc"
        else replace(layer, options=tuple(o for o in layer.options if o.settings.rows == 1))
        for layer in profile.layers
    ]
    samplers = tuple(layer.name for layer in layers if layer.tag == "fc")
    timeline = replace(profile.timeline, samplers=samplers)
    return replace(profile, layers=tuple(layers), timeline=timeline)


def timed(profile: Profile, ms: Mapping[Kind, float]) -> Profile:
    """The profile after steps in which each layer added 3 ms, and so many where it left out rows."""
    every = {layer.name: 3.0 for layer in profile.layers}
    sampled = {kind: dict.fromkeys(every, added) for kind, added in ms.items()}
    return with_times(profile, StepTimes(50.0, 2.0, every, sampled=sampled), FOUR)


def added(profile: Profile, name: str, settings: LayerSettings) -> float:
    """Milliseconds that one layer adds to the step of the converted model."""
    return (profile.predict_assignment({name: settings}).step_ms or 0.0) - 52.0


def test_steps_are_timed_with_the_most_and_the_fewest_rows() -> None:
    profile = sampling(QUARTER, FIFTH, TENTH)
    policies = timed_policies(profile, FOUR)
    for kind, settings in ((Kind.MOST_ROWS, QUARTER), (Kind.FEWEST_ROWS, TENTH)):
        chosen = profile.assignment(policies[kind])
        assert chosen["head"] == settings
        assert chosen["blocks.0.norm"] == FOUR
        assert chosen["sin.0"].exact  # stored by hooks


def test_one_share_of_rows_takes_one_kind_of_step_and_none_takes_none() -> None:
    one = timed_policies(sampling(QUARTER), FOUR)
    assert Kind.MOST_ROWS in one
    assert Kind.FEWEST_ROWS not in one
    assert not {Kind.MOST_ROWS, Kind.FEWEST_ROWS} & timed_policies(sampling(), FOUR).keys()


def test_leaving_out_rows_adds_what_steps_took() -> None:
    profile = timed(sampling(QUARTER, TENTH), {Kind.MOST_ROWS: 1.0, Kind.FEWEST_ROWS: -2.0})
    assert added(profile, "head", FOUR) == pytest.approx(3.0)
    assert added(profile, "head", QUARTER) == pytest.approx(1.0)
    assert added(profile, "head", TENTH) == pytest.approx(-2.0)
    again = mt.Profile.from_dict(profile.to_dict())
    assert added(again, "head", TENTH) == pytest.approx(-2.0)


def test_a_share_that_was_not_timed_follows_the_nearest() -> None:
    before = sampling(QUARTER, FIFTH, TENTH)
    profile = timed(before, {Kind.MOST_ROWS: 1.0, Kind.FEWEST_ROWS: -2.0})
    options = before.layer("head").options
    ms = {option.settings: option.ms for option in options}
    assert added(profile, "head", FIFTH) == pytest.approx(1.0 + ms[FIFTH] - ms[QUARTER])


def test_a_real_profile_prices_rows_of_a_linear_layer_by_steps() -> None:
    work = workload(
        lambda: nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)),
        lambda size: torch.randn(size, 64),
        squares,
        batch_size=256,
    )
    profile = mt.profile(work, options=[FOUR, TENTH], seeds=1)
    sampled = policy_of("on fc:\n    by_index: all\n    level: 4\n    rows: 0.1\n")
    assert [layer.name for layer in profile.layers if TENTH in layer.positions] == ["2"]
    assert profile.predict(sampled).step_ms is not None


def test_timing_does_not_warn_of_calls_that_store_all_rows(recwarn: pytest.WarningsRecorder) -> None:
    work = workload(
        lambda: nn.TransformerEncoderLayer(64, 4, 128, batch_first=True),
        lambda size: torch.randn(size, 32, 64),
        lambda model, batch: model(batch).square().mean() + model(batch).mean(),
    )
    profile = mt.profile(work, options=[FOUR, TENTH], seeds=1)
    assert any(TENTH in layer.positions for layer in profile.layers if layer.tag == "attention")
    assert [str(each.message) for each in recwarn if "rows" in str(each.message)] == []
