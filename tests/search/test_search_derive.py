"""Plans in which layers derive what they keep: `store: derive` where it pays, never where it does not fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

import mesa_tune as mt
from mesa_tune.measure.errors.joint_error import JointError
from mesa_tune.policy import Policy
from mesa_tune.policy.policy import Header
from mesa_tune.policy.settings import EXACT, LayerSettings
from mesa_tune.profiles.own_noise import GradientError, Pair
from mesa_tune.profiles.profile import Profile
from mesa_tune.search import search_policy
from mesa_tune.search.restrictions import NO_RESTRICTIONS, Restrictions
from mesa_tune.search.solver import Program
from mesa_tune.search.space import Limits, Space, make_space
from tests.builders import conversion, known
from tests.measure.models import DIGITS, workload_of
from tests.search.meters import Weighted
from tests.search.random_spaces import consistent
from tests.synthetic import COARSE, DERIVING, NORM, deriving, synthetic_profile

pytestmark = pytest.mark.usefixtures("without_variants")

BOUND = Restrictions(frozenset({"derive"}))
FOUR = LayerSettings(level=16)
DERIVE = replace(FOUR, store="derive")


@pytest.fixture(scope="module", name="profile")
def _profile() -> Profile:
    return deriving(synthetic_profile(1, grid=COARSE, seed=3), 3.0)


def names(space: Space, cluster: Sequence[int]) -> set[str]:
    return {name for unit in cluster for name in space.units[unit].layers}


def test_units_that_derive_from_one_another_are_a_cluster(profile: Profile) -> None:
    space = make_space(profile)
    assert [names(space, units) for units in space.clusters] == [{NORM, *DERIVING}]
    assert not make_space(profile, restrictions=BOUND).clusters


def test_who_derives_keeps_nothing_and_errs_by_what_it_derives_from(profile: Profile) -> None:
    unit = next(unit for unit in make_space(profile).units if unit.layers == DERIVING)
    derived = [choice for choice in unit.choices if choice.derived]
    assert [(choice.saved, choice.noise, choice.settings.store) for choice in derived] == [(0, 0.0, "derive")]
    norm = next(unit for unit in make_space(profile).units if unit.layers == (NORM,))
    errors = {(choice.settings, choice.derived): choice.noise for choice in norm.choices}
    pairs = [(one, replace(one, store="derive")) for one in COARSE]
    both = [pair for pair in pairs if (pair[0], False) in errors and (pair[1], True) in errors]
    assert both
    assert all(errors[other, True] == pytest.approx(3 * errors[one, False]) for one, other in both)


@pytest.mark.parametrize("factor", [0.5, 3.0, 100.0])
def test_never_worse_than_without(factor: float) -> None:
    profile = deriving(synthetic_profile(2, grid=COARSE, seed=5), factor)
    free, bound = (Program(make_space(profile, restrictions=each)) for each in (NO_RESTRICTIONS, BOUND))
    lowest = known(bound.smallest_peak(Limits())).cost
    gains = []
    for peak in np.linspace(lowest, profile.peak_bytes, 6, dtype=int):
        better, other = (known(program.solve(Limits(int(peak)))).cost for program in (free, bound))
        assert better <= other * (1 + 1e-5)
        gains.append(better < 0.99 * other)
    assert any(gains)


def only(space: Space, layer: str) -> list[tuple[LayerSettings, bool]]:
    unit = next(unit for unit in space.units if layer in unit.layers)
    return [(choice.settings, choice.derived) for choice in unit.choices]


def test_a_pin_can_ask_for_it(profile: Profile) -> None:
    space = make_space(profile, pins={"blocks.0.[qkv]": DERIVE})
    assert only(space, "blocks.0.q") == [(DERIVE, True)]
    assert not space.assignment(known(Program(space).solve(Limits())).chosen)[NORM].exact
    both = make_space(profile, pins={"blocks.0.[qkv]": DERIVE, NORM: FOUR})
    assert (replace(FOUR, store="derive"), True) in only(both, NORM)


@pytest.mark.parametrize(
    "pins", [{"blocks.0.q": FOUR}, {NORM: EXACT}], ids=["taker-stores", "exact-producer"]
)
def test_a_pin_can_rule_it_out(profile: Profile, pins: dict[str, LayerSettings]) -> None:
    space = make_space(profile, pins=pins)
    assert not space.clusters
    assert not any(choice.derived for unit in space.units for choice in unit.choices)


def test_a_pin_that_cannot_take_place_stores(profile: Profile) -> None:
    space = make_space(profile, pins={"blocks.0.[qkv]": DERIVE, NORM: EXACT})
    assert only(space, "blocks.0.q") == [(DERIVE, False)]
    chosen = next(consistent(space))
    assert space.saved(chosen) == profile.predict_assignment(space.assignment(chosen)).saved_bytes


def test_a_batch_whose_tensors_are_too_small_derives_nothing(profile: Profile) -> None:
    assert make_space(profile, 8).clusters
    assert not make_space(profile, 2).clusters


@dataclass
class Noted(Weighted):
    """An objective that remembers whom it was asked about."""

    policies: list[Policy] = field(default_factory=list)

    def errors(self, policy: Policy, pairs: Sequence[Pair]) -> list[GradientError]:
        self.policies.append(policy)
        return super().errors(policy, pairs)


def test_a_study_tries_whole_clusters_only() -> None:
    profile = deriving(synthetic_profile(2, grid=COARSE, seed=5), 1.2)
    noted = Noted(profile)
    search_policy(profile, "55%", measure=noted, trials=12)
    stores = []
    for policy in noted.policies:
        assignment = profile.assignment(policy)
        derives = {assignment[name].store == "derive" for name in DERIVING}
        assert len(derives) == 1
        assert not (derives == {True} and assignment[NORM].exact)
        stores.append(derives == {True})
    assert any(stores)


def test_the_policy_says_who_derives(profile: Profile) -> None:
    plan = search_policy(deriving(synthetic_profile(1, grid=COARSE, seed=3), 0.5), "52%")
    again = Policy.parse(plan.policy.dumps())
    assert all(again.settings("fc", None, name).store == "derive" for name in DERIVING)
    assert again.settings("layernorm", 0, NORM).store == "derive"
    assert again.header.producers
    assert profile.predict(again).peak_bytes == plan.predicted.peak_bytes


@pytest.mark.slow("training")
@pytest.mark.parametrize("name", ["transformer", "llama", "dropped", "reused"])
def test_a_plan_that_derives_keeps_its_word(name: str) -> None:
    work = workload_of(name)
    options = [LayerSettings(level=level, group_size=64) for level in (4, 16, 256)]
    profile = mt.profile(work, options=options, seeds=4)
    least = Program(make_space(profile, restrictions=BOUND)).smallest_saved()
    plan = search_policy(profile, profile.peak_bytes, max_saved=least - 1, objective="error")
    assert "store: derive" in plan.policy.dumps()
    found = mt.verify(work, plan.policy, steps=1, seeds=1).policy
    assert found.saved_bytes == plan.predicted.saved_bytes
    assert found.peak_bytes == pytest.approx(plan.predicted.peak_bytes, rel=0.05)
    # On the profiled batches and as many others.
    error = np.mean([each.error for each in JointError(work).errors(plan.policy, [(n, 9) for n in range(8)])])
    assert error / 1.5 < known(plan.predicted.gradient_error) < error * 1.5


@pytest.fixture(scope="module", name="digits")
def _digits() -> tuple[mt.Workload, Profile]:
    work = mt.Workload.load(Path(DIGITS), batch_size=8)
    options = [LayerSettings(level=level) for level in (4, 8, 16, 256)]
    return work, mt.profile(work, options=options, seeds=1)


@pytest.mark.slow("training")
@pytest.mark.parametrize("part", [0.45, 0.4])
def test_a_vision_transformer_errs_less_at_the_same_peak(
    digits: tuple[mt.Workload, Profile], part: float
) -> None:
    work, profile = digits
    budget = Limits(int(part * profile.peak_bytes))
    errors = []
    for forbidden in ({"recompute"}, {"recompute", "derive"}):
        space = make_space(profile, restrictions=Restrictions(frozenset(forbidden)))
        solved = known(Program(space).solve(budget))
        chosen = space.assignment(solved.chosen)
        rows = ((layer.tag, layer.index, layer.name, chosen[layer.name]) for layer in profile.layers)
        policy = Policy.from_assignments(rows)
        found = JointError(work, own=profile.own_noise).errors(policy, [(0, 0), (0, 1)])
        errors.append((solved.cost, float(np.mean([each.ratio for each in found]))))
    (predicted, measured), (predicted_without, measured_without) = errors
    assert predicted < 0.8 * predicted_without
    assert measured < measured_without


@pytest.mark.slow("training")
def test_a_searched_plan_is_at_work_from_the_first_forward_on(digits: tuple[mt.Workload, Profile]) -> None:
    work, profile = digits
    searched = search_policy(profile, "40%", objective="error", forbid=["recompute"]).policy
    by_hand = replace(searched, header=Header())
    activations = [layer.name for layer in profile.layers if layer.tag == "gelu"]
    serving = []
    for policy in (searched, by_hand):
        model = mt.convert(work.build(), policy, seed=0)
        for _ in range(2):
            work.compute_loss(model, work.make_batch())
            specs = {name: conversion(model).specs[name] for name in activations}
            serving.append({name for name, spec in specs.items() if spec is not None and spec.exposes})
    first, later, by_hand_first, by_hand_later = serving
    assert first == later == by_hand_later
    assert first < by_hand_first == set(activations)
