"""Modules that run again in backward as choices of a search: the space has the bytes of predicted steps."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

import mesa_tune as mt
from mesa_tune.errors import BudgetError
from mesa_tune.measure.memory.meter import measure_step
from mesa_tune.search.problem import NONE, Space
from mesa_tune.search.space import make_space
from tests.builders import gpt2, own_loss, words, workload
from tests.search.random_spaces import units_inside
from tests.step_memory import without_parts

BLOCKS = tuple(f"transformer.h.{number}" for number in range(2))


WORKLOAD = workload(partial(gpt2, 32, use_cache=False, resid_pdrop=0.0), words, own_loss, batch_size=4)


@pytest.fixture(scope="module", name="profile")
def _profile() -> mt.Profile:
    with without_parts():
        return mt.profile(WORKLOAD, options=[mt.LayerSettings(level=level) for level in (4, 16)], seeds=1)


@pytest.fixture(scope="module", name="space")
def _space(profile: mt.Profile) -> Space:
    return make_space(profile)


def _drawn(space: Space, chance: random.Random) -> list[int]:
    """Return a plan in which each module runs again with a chance of one half, and nothing derives."""
    taken = [
        chance.randrange(len(module.choices)) if chance.random() < 0.5 else NONE for module in space.modules
    ]
    inside = units_inside(space, taken)
    plain = [
        [index for index, choice in enumerate(unit.choices) if not choice.derived] for unit in space.units
    ]
    units = [NONE if number in inside else chance.choice(options) for number, options in enumerate(plain)]
    return [*units, *taken]


def test_every_block_has_choices(space: Space) -> None:
    assert tuple(module.name for module in space.modules) == BLOCKS
    for module in space.modules:
        assert {choice.inside.exact for choice in module.choices} == {True, False}
        assert all(choice.settings.store == "recompute" for choice in module.choices)


@pytest.mark.parametrize("seed", range(12))
def test_plans_have_the_bytes_and_the_time_of_predictions(
    seed: int, space: Space, profile: mt.Profile
) -> None:
    chosen = _drawn(space, random.Random(seed))
    assert space.is_consistent(chosen)
    assignment = space.assignment(chosen)
    step = profile.timeline.at().under(assignment)
    live = space.live(chosen)
    # Each module rounds its share of the bytes outside of all modules up.
    assert abs(live - step.live).max() <= len(space.modules)
    assert space.saved(chosen) == step.saved_bytes
    predicted = profile.predict_assignment(assignment)
    summed = replace(profile, overlap_ms=0.0).predict_assignment(assignment).step_ms
    assert predicted.step_ms is not None
    assert summed is not None
    assert predicted.step_ms + 1e-6 >= summed == pytest.approx(space.ms(chosen))
    if predicted.gradient_error:
        assert predicted.gradient_noise_ratio == pytest.approx(space.noise(chosen))


def test_a_searched_policy_names_the_modules_and_its_step_has_the_predicted_bytes(
    profile: mt.Profile,
) -> None:
    plan = mt.search_policy(profile, "100%", max_saved="4%", objective="error")
    again = [name for name in BLOCKS if plan.policy.recomputed(name) is not None]
    assert again
    policy = mt.Policy.parse(plan.policy.dumps())
    assert policy == plan.policy
    converted = mt.convert(WORKLOAD.build(), policy, seed=0)
    optimizer = WORKLOAD.make_optimizer(converted)
    found = measure_step(converted, WORKLOAD.make_batch(), own_loss, optimizer)
    assert found.peak_bytes == pytest.approx(plan.predicted.peak_bytes, rel=0.01)
    assert profile.predict(policy).peak_bytes == plan.predicted.peak_bytes
    assert mt.Plan.from_dict(plan.to_dict()).policy == plan.policy


def test_they_can_be_forbidden_and_are_left_alone_around_pins(profile: mt.Profile) -> None:
    limits: dict[str, Any] = {"max_noise_ratio": 100.0, "max_slowdown": 10.0}
    free = mt.search_policy(profile, objective="memory", **limits)
    without = mt.search_policy(profile, objective="memory", forbid=["recompute"], **limits)
    assert not without.policy.module_rules()
    assert free.predicted.peak_bytes <= without.predicted.peak_bytes
    pinned = make_space(profile, pins={"transformer.h.1.mlp.*": mt.LayerSettings(level=16)})
    assert [module.name for module in pinned.modules] == [BLOCKS[0]]


def test_a_budget_below_every_plan_is_an_error(profile: mt.Profile) -> None:
    with pytest.raises(BudgetError, match="not reachable"):
        mt.search_policy(profile, "1%", objective="error")
