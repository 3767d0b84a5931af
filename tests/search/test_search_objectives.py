"""What a search minimises, within which noise, and what it says where that cannot be had."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mesa_tune.errors import BudgetError, PolicyError, RunError
from mesa_tune.free_memory import needed_bytes
from mesa_tune.policy import Policy
from mesa_tune.policy.settings import EXACT, LayerSettings
from mesa_tune.profiles.entries import LayerEntry
from mesa_tune.profiles.prediction import Prediction
from mesa_tune.profiles.profile import Profile
from mesa_tune.search import Plan, objectives, search_policy
from mesa_tune.search.again.correction import with_floor
from mesa_tune.search.objectives import MAX_NOISE_RATIO
from mesa_tune.search.reach import reach
from mesa_tune.search.restrictions import read_pin
from mesa_tune.search.space import make_space
from tests.builders import known
from tests.synthetic import COARSE, noisy, synthetic_profile


@pytest.fixture(scope="module", name="profile")
def _profile() -> Profile:
    return noisy(synthetic_profile(2, grid=COARSE, seed=1))


@pytest.fixture(scope="module", name="small")
def _small() -> Profile:
    return noisy(synthetic_profile(1, grid=COARSE, seed=3))


def test_the_fastest_within_the_ratio_is_the_default(profile: Profile) -> None:
    plan = search_policy(profile, "60%")
    assert (plan.objective, plan.why, plan.max_noise_ratio) == ("time", "", MAX_NOISE_RATIO)
    assert 0 < known(plan.predicted.gradient_noise_ratio) <= MAX_NOISE_RATIO
    least = search_policy(profile, "60%", objective="error")
    assert least.objective == "error"
    assert known(plan.predicted.step_ms) <= known(least.predicted.step_ms)
    assert known(least.predicted.gradient_error) <= known(plan.predicted.gradient_error)
    assert plan.bound <= same_result(plan, profile) <= plan.bound * (1 + 2e-3)
    assert "takes less time, by summed single-layer prices" in plan.claim


def same_result(plan: Plan, profile: Profile) -> float:
    """The product that the objective `time` minimises."""
    later = with_floor(profile).predict(plan.policy)
    return known(later.step_ms) * (1 + 8 * known(later.gradient_noise_ratio))


@pytest.fixture(scope="module", name="all_plans")
def _all_plans(small: Profile) -> list[Prediction]:
    """What is predicted of every assignment, by the prices that a search solves with."""
    later = with_floor(small)
    space, plans = make_space(later), []
    for chosen in product(*(range(len(unit.choices)) for unit in space.units)):
        plans.append(later.predict_assignment(space.assignment(chosen)))
        assert plans[-1].gradient_noise_ratio == pytest.approx(space.noise(chosen), rel=1e-9)
    return plans


@pytest.mark.parametrize("ratio", [1e-4, 1e-3, 1e-2, 0.1])
def test_the_ratio_holds_with_interaction_and_is_the_fastest_of_all(
    small: Profile, all_plans: list[Prediction], ratio: float
) -> None:
    limit = int(0.6 * small.peak_bytes)
    products = [
        known(plan.step_ms) * (1 + 8 * known(plan.gradient_noise_ratio))
        for plan in all_plans
        if plan.peak_bytes <= limit and known(plan.gradient_noise_ratio) <= ratio
    ]
    if not products:
        assert search_policy(small, limit, max_noise_ratio=ratio).objective == "error"
        return
    plan = search_policy(small, limit, objective="time", max_noise_ratio=ratio)
    assert known(plan.predicted.gradient_noise_ratio) <= ratio * (1 + 1e-9)
    assert plan.bound * (1 - 1e-9) <= min(products)
    # The solver takes the fastest step's time for what noise costs.
    assert min(products) * (1 - 1e-9) <= same_result(plan, small) <= min(products) * 1.002


def test_without_a_policy_within_the_ratio_the_error_is_the_least(profile: Profile) -> None:
    plan = search_policy(profile, "40%", max_noise_ratio=1e-9)
    assert plan.objective == "error"
    assert "noise ratio 1e-09" in plan.why
    assert plan.policy == search_policy(profile, "40%", objective="error").policy
    with pytest.raises(BudgetError, match=r"noise ratio 1e-09: no plan within the other limits.*\n.*raise"):
        search_policy(profile, "40%", max_noise_ratio=1e-9, objective="time")


@pytest.mark.parametrize("objective", ["time", "memory"])
def test_an_unknown_ratio_is_no_small_one(objective: str) -> None:
    silent, words = synthetic_profile(2, grid=COARSE, seed=1), "no gradient noise"
    plan = search_policy(silent, "60%")
    assert plan.objective == "error"
    assert words in plan.why
    with pytest.raises(RunError, match=words):
        search_policy(silent, "60%", objective=objective)
    free = search_policy(silent, "60%", objective=objective, max_noise_ratio=math.inf)
    assert free.objective == objective
    assert free.max_noise_ratio is None


def test_without_a_limit_noise_has_its_price(profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    def cost(plan: Plan) -> float:
        ratio = known(plan.predicted.gradient_noise_ratio)
        return objectives.to_same_result(known(plan.predicted.step_ms), ratio)

    asked: dict[str, Any] = {"objective": "time", "max_noise_ratio": math.inf}
    priced = search_policy(profile, "60%", **asked)
    with monkeypatch.context() as free:
        free.setattr(objectives, "WEIGHT", 0.0)
        fastest = search_policy(profile, "60%", **asked)
    assert cost(priced) < cost(fastest)
    assert known(priced.predicted.gradient_noise_ratio) < known(fastest.predicted.gradient_noise_ratio)


def test_the_ratio_is_the_same_at_other_batch_sizes(profile: Profile) -> None:
    plan = search_policy(profile, "60%", batch_size=20, max_noise_ratio=0.1)
    assert plan.objective == "time"
    ratios = [profile.predict(plan.policy, batch_size=size).gradient_noise_ratio for size in (None, 20, 2)]
    assert ratios == [plan.predicted.gradient_noise_ratio] * 3
    assert 0 < known(ratios[0]) <= 0.1


def test_the_smallest_peak_needs_no_budget(profile: Profile) -> None:
    plan = search_policy(profile, objective="memory")
    assert plan.budget_bytes is None
    assert (plan.predicted.gradient_noise_ratio or 0) <= MAX_NOISE_RATIO
    assert known(plan.predicted.step_ms) <= 1.5 * profile.plain_ms(profile.batch_size) * (1 + 1e-9)
    assert plan.bound <= plan.predicted.peak_bytes
    assert plan.gap <= 1e-3
    with pytest.raises(BudgetError):
        search_policy(profile, plan.predicted.peak_bytes - 1, objective="memory")
    quieter = search_policy(profile, objective="memory", max_noise_ratio=1e-3)
    assert plan.predicted.peak_bytes < quieter.predicted.peak_bytes
    faster = search_policy(profile, objective="memory", max_slowdown=1.001)
    assert plan.predicted.peak_bytes < faster.predicted.peak_bytes


def test_layers_that_are_faster_if_they_compress_do(profile: Profile) -> None:
    """As on a machine whose memory is slow: then a plan is faster than the exact step."""
    layers = tuple(replace(layer, call_ms=-100.0) for layer in profile.layers)
    fast = replace(profile, layers=layers, step_ms=1e4)
    plan = search_policy(fast, "90%", objective="time", max_noise_ratio=1e9, forbid=["recompute"])
    compressed = [name for name, settings in fast.assignment(plan.policy).items() if not settings.exact]
    assert len(compressed) == sum(len(layer.options) > 1 for layer in fast.layers)
    assert known(plan.predicted.step_ms) < known(fast.exact_ms) - 90 * len(compressed)
    assert "takes less time, by summed single-layer prices" in plan.claim


def test_the_bias_is_limited(small: Profile) -> None:
    def biased_layer(layer: LayerEntry) -> LayerEntry:
        # The error of exact storage is 0.
        options = (replace(one, bias=30 * (one.noise_ratio or 0.0)) for one in layer.options)
        return replace(layer, options=tuple(options))

    biased = replace(small, layers=tuple(map(biased_layer, small.layers)))
    plan, free = (search_policy(one, objective="memory") for one in (biased, small))
    assert _summed(biased, plan) <= MAX_NOISE_RATIO / 3 / 30 < _summed(small, free)


def _summed(profile: Profile, plan: Plan) -> float:
    """The sum of the ratios of single layers, without interaction."""
    return known(replace(profile, interaction=()).predict(plan.policy).gradient_noise_ratio)


def test_plain_wins_where_it_fits_unless_saved_bytes_are_limited(profile: Profile) -> None:
    plan = search_policy(profile, profile.peak_bytes)
    assert plan.is_exact
    assert plan.objective == "time"
    assert plan.bound == plan.predicted.step_ms == 40.0
    assert not search_policy(profile, profile.peak_bytes, max_saved="50%").is_exact


def test_the_policy_and_the_document_say_the_objective(profile: Profile, tmp_path: Path) -> None:
    plan = search_policy(profile, "60%", max_saved="50%").at(tmp_path / "policy.txt")
    assert Policy.parse(plan.policy.dumps()).header.objective == "time"
    assert plan.to_dict()["objective"] == "time"
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_unknown_objectives_and_missing_budgets_are_refused(profile: Profile) -> None:
    with pytest.raises(BudgetError, match=r"'tme': unknown\n.*'time'"):
        search_policy(profile, "60%", objective="tme")
    with pytest.raises(BudgetError, match=r'budget: missing\n.*objective="memory"'):
        search_policy(profile)
    with pytest.raises(BudgetError, match="max-noise-ratio"):
        search_policy(profile, "60%", max_noise_ratio=0.0)


def test_only_some_settings_vary(profile: Profile) -> None:
    groups = noisy(synthetic_profile(2, seed=1))
    policy = search_policy(groups, "60%", objective="error", only=["level"]).policy
    used = [settings for settings in groups.assignment(policy).values() if not settings.exact]
    assert {settings.group_size for settings in used} == {256}
    free = search_policy(groups, "60%", objective="error").policy
    sizes = {s.group_size for s in groups.assignment(free).values() if not s.exact}
    assert sizes != {256}
    with pytest.raises(PolicyError, match=r"only 'levl'.*\n.*'level'"):
        search_policy(profile, "60%", only=["levl"])
    with pytest.raises(PolicyError, match=r"forbid 'drive'.*\n.*'derive'"):
        search_policy(profile, "60%", forbid=["drive"])


def test_without_time_for_the_solver_what_4_bits_reach_is_reached(
    profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mesa_tune.search.reach._SECONDS", 0.0)
    found = reach(profile)
    four_bits = profile.assignment(Policy.uniform(level=16))
    assert found.lowest == profile.timeline.at().peak_bytes(four_bits) < found.plain
    assert found.quiet is None


def test_pins_as_they_are_typed() -> None:
    assert read_pin("blocks.0.*: exact") == ("blocks.0.*", EXACT)
    assert read_pin("a: level 16 group_size 64") == ("a", LayerSettings(level=16, group_size=64))
    assert read_pin("a: level 16, store derive") == ("a", LayerSettings(level=16, store="derive"))
    assert read_pin("a: quant_groups 4")[1].group_size is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("blocks.0", "no `GLOB: SETTINGS`"),
        (": exact", "no `GLOB: SETTINGS`"),
        ("a: levl 16", "'level'"),
        ("a: level 1", "2 to 256"),
        ("a: level", "level without a value"),
        ("a: exct", "'exact'"),
        ("a: group_size 4 quant_groups 4", "replace each other"),
        ("a: store drive", "'derive'"),
    ],
)
def test_pins_that_cannot_be_read(text: str, words: str) -> None:
    with pytest.raises(PolicyError, match=words):
        read_pin(text)


@pytest.mark.parametrize(("share", "objective"), [("100%", "time"), ("50%", "error")])
def test_the_largest_batch_fits_and_no_larger_one_does(profile: Profile, share: str, objective: str) -> None:
    given: dict[str, Any] = {"objective": objective, "max_noise_ratio": 0.01}
    plan = search_policy(profile, share, max_batch=True, **given)
    budget = known(plan.budget_bytes)
    assert plan.predicted.peak_bytes <= budget
    with pytest.raises(BudgetError):
        search_policy(profile, budget, batch_size=plan.batch_size + 1, **given)
    assert (known(plan.predicted.gradient_noise_ratio) <= 0.01) is (objective == "time")
    assert share == "50%" or plan.batch_size > profile.batch_size


def test_the_largest_batch_leaves_room_in_memory_and_keeps_the_slowdown(profile: Profile) -> None:
    budget, shared = 40 * profile.peak_bytes, "4000%"
    plan = search_policy(profile, budget, max_batch=True)
    without = search_policy(profile, shared, max_batch=True)
    needed = needed_bytes(plan.predicted.peak_bytes, 0, profile.timeline.libraries, cuda=False)
    assert needed <= budget == plan.budget_bytes
    assert without.predicted.peak_bytes > plan.predicted.peak_bytes
    assert plan.batch_size < without.batch_size
    fast = search_policy(profile, budget, max_batch=True, max_slowdown=1.01)
    assert fast.batch_size < plan.batch_size
    assert known(fast.predicted.step_ms) <= 1.01 * profile.plain_ms(fast.batch_size)


def test_a_largest_batch_that_is_none_is_refused(profile: Profile) -> None:
    with pytest.raises(BudgetError, match="not even a batch of one") as caught:
        search_policy(profile, 1000, max_batch=True)
    needed = known(re.search(r"budget=(\d+)", str(caught.value)))
    assert search_policy(profile, int(needed[1]), max_batch=True, objective="error").batch_size == 1
    with pytest.raises(BudgetError, match="max-batch"):
        search_policy(profile, 1000, max_batch=True, batch_size=3)


@pytest.mark.parametrize("objective", ["time", "error", "memory"])
@pytest.mark.parametrize("seed", range(2))
def test_no_plan_is_predicted_to_be_slower_than_asked(seed: int, objective: str) -> None:
    """What the first layers that compress add beyond their prices (`overlap_ms`) included."""
    chance = np.random.default_rng(seed)
    made = noisy(synthetic_profile(2, grid=COARSE, seed=seed))
    layers = [replace(layer, call_ms=float(chance.uniform(0.0, 2.0))) for layer in made.layers]
    profile = replace(made, layers=tuple(layers), overlap_ms=float(chance.uniform(2.0, 8.0)))
    slowdowns = (1.02, 1.05, 1.1, 1.2, 1.3, 1.5)
    assert any(_is_as_fast(profile, objective, most) for most in slowdowns)


def test_a_smallest_plan_is_found_where_few_layers_may_compress() -> None:
    """At last the exact step, which is as fast as asked."""
    made = noisy(synthetic_profile(2, grid=COARSE))
    layers = tuple(replace(layer, call_ms=0.1) for layer in made.layers)
    slow = replace(made, layers=layers, overlap_ms=40.0, routing_ms=3.0)
    plan = search_policy(slow, objective="memory", max_slowdown=1.1)
    assert known(plan.predicted.step_ms) <= 1.1 * made.plain_ms(8)


def _is_as_fast(profile: Profile, objective: str, most: float) -> bool:
    """Return False where there is no plan that is as fast."""
    try:
        plan = search_policy(profile, "60%", objective=objective, max_slowdown=most, max_noise_ratio=0.1)
    except BudgetError as error:
        assert "max-slowdown" in str(error)  # noqa: PT017 - the other outcome is a plan
        return False
    assert known(plan.predicted.step_ms) <= most * profile.plain_ms(8) * (1 + 1e-9)
    return True


def test_where_batches_differ_by_a_hundred_the_end_of_the_interval_is_limited(profile: Profile) -> None:
    def differing(entry: LayerEntry) -> LayerEntry:
        options = (
            replace(option, ratios=tuple(np.multiply(option.ratios, (1.0, 0.02, 1.8))[: len(option.ratios)]))
            for option in entry.options
        )
        return replace(entry, options=tuple(options))

    wild = replace(profile, layers=tuple(map(differing, profile.layers)))
    for limit in (0.05, 0.5):
        plan = search_policy(wild, "60%", max_noise_ratio=limit)
        ends = known(plan.predicted.gradient_noise_ratio_interval)
        assert ends[1] > 5 * known(plan.predicted.gradient_noise_ratio)
        assert ends[1] <= 1.01 * limit
    least = search_policy(wild, "60%", objective="error").predicted
    reached = known(least.gradient_noise_ratio)
    with pytest.raises(BudgetError, match="batches err so differently"):
        search_policy(wild, "60%", objective="time", max_noise_ratio=4 * reached)
