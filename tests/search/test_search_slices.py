"""Searches that may let a loss go backward in slices."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

import mesa_tune as mt
from mesa_tune.profiles.entries import Option
from mesa_tune.profiles.other_entries import ModuleEntry
from mesa_tune.profiles.profile import Profile
from mesa_tune.search import objectives, search_policy
from mesa_tune.search.again.correction import with_floor
from mesa_tune.search.batch_sizes import most_samples
from mesa_tune.search.frontier import pareto
from mesa_tune.search.linear.highs import Deadline, TimeUpError
from mesa_tune.search.objectives import Solved
from mesa_tune.search.problem import Limits
from mesa_tune.search.restrictions import NO_RESTRICTIONS
from mesa_tune.search.solver import UNFELT, Program
from mesa_tune.search.steps import solved_best, steps
from tests.builders import known, language_workload
from tests.measure.models import language_profile

LOSS = "loss.cross_entropy.0"
OPTIONS = [mt.LayerSettings(level=level) for level in (4, 16)]
UNLIMITED = float("inf")


@pytest.fixture(scope="module")
def profile() -> Profile:
    return steady(language_profile())


def steady(profile: Profile) -> Profile:
    """The profile with times that do not depend on the machine: in proportion to bytes."""

    def timed(option: Option) -> Option:
        return replace(option, encode_ms=2e-6 * option.bytes, decode_ms=1e-6 * option.bytes)

    layers = [
        replace(layer, call_ms=0.02, options=tuple(map(timed, layer.options))) for layer in profile.layers
    ]

    def again(modules: Iterable[ModuleEntry]) -> tuple[ModuleEntry, ...]:
        each = (replace(module, options=tuple(map(timed, module.options))) for module in modules)
        return tuple([replace(module, rerun_ms=1.0) for module in each])

    tiled = profile.tiled
    if tiled is not None:
        tiled = replace(tiled, added_ms=0.8, modules=again(tiled.modules))
    parts: dict[str, Any] = {"layers": tuple(layers), "modules": again(profile.modules), "tiled": tiled}
    return replace(profile, **parts, step_ms=20.0, routing_ms=0.5, overlap_ms=0.1)


def slices(policy: mt.Policy) -> int:
    return policy.settings("loss", 0, LOSS).tile


def smallest(profile: Profile, **limits: Any) -> mt.Plan:
    asked: dict[str, Any] = {
        "objective": "memory",
        "trials": 0,
        "max_slowdown": 9.0,
        "max_noise_ratio": UNLIMITED,
    }
    return search_policy(profile, **asked, **limits)


def test_the_smallest_step_has_slices_and_the_bytes_that_were_predicted(profile: Profile) -> None:
    plan, whole = smallest(profile), smallest(profile, forbid=["tile"])
    assert (slices(plan.policy), slices(whole.policy)) == (8, 1)
    assert plan.predicted.peak_bytes < whole.predicted.peak_bytes
    measured = mt.verify(language_workload(), plan.policy, steps=1, seeds=1)
    assert measured.policy.saved_bytes == plan.predicted.saved_bytes
    assert measured.policy.peak_bytes == plan.predicted.peak_bytes
    assert plan.bound <= plan.predicted.peak_bytes


@pytest.mark.parametrize(
    "limits", [{"forbid": ["tile"]}, {"only": ["level"]}, {"pins": {LOSS: mt.LayerSettings()}}]
)
def test_a_user_can_do_without_slices(profile: Profile, limits: dict[str, object]) -> None:
    assert slices(smallest(profile, **limits).policy) == 1


def test_a_pin_can_ask_for_the_slices_that_were_traced(profile: Profile) -> None:
    pinned = {LOSS: mt.LayerSettings(store="exact", tile=8)}
    plan = mt.search_policy(profile, "100%", trials=0, objective="error", pins=pinned)
    assert slices(plan.policy) == 8
    with pytest.raises(mt.PolicyError, match=r"the profile has traced `tile: 8` of 'loss.cross_entropy.0'"):
        mt.search_policy(profile, "100%", trials=0, pins={LOSS: mt.LayerSettings(store="exact", tile=3)})


@pytest.mark.parametrize("objective", ["time", "error"])
@pytest.mark.parametrize("budget", ["75%", "85%", "95%"])
def test_the_plan_is_the_better_one_of_both_steps(profile: Profile, budget: str, objective: str) -> None:
    def cost(**limits: Any) -> float:
        asked: dict[str, Any] = {"objective": objective, "trials": 0, "max_noise_ratio": UNLIMITED}
        policy = search_policy(profile, budget, **asked, **limits).policy
        predicted = with_floor(profile).predict(policy)  # noise counts as it becomes in training
        ratio = known(predicted.gradient_noise_ratio)
        return ratio if objective == "error" else objectives.to_same_result(known(predicted.step_ms), ratio)

    sliced = {LOSS: mt.LayerSettings(store="exact", tile=8)}
    # The solver stops where less than this share of a step is to be saved.
    tolerance = 2 * UNFELT if objective == "time" else 1e-6
    assert cost() == pytest.approx(min(cost(forbid=["tile"]), cost(pins=sliced)), rel=tolerance)


def test_what_error_costs_is_no_gap_between_the_better_of_both_steps_and_the_bound(profile: Profile) -> None:
    summed = replace(profile, overlap_ms=0.0)
    plan = mt.search_policy(summed, "85%", objective="time", trials=0, max_noise_ratio=0.5)
    assert plan.gap < 2e-3, "both steps are solved to the end"
    noise = known(with_floor(summed).predict(plan.policy).gradient_noise_ratio)
    assert plan.bound <= known(plan.predicted.step_ms) * (1 + 8 * noise) <= 1.002 * plan.bound


@pytest.mark.parametrize(("objective", "least"), [("error", 0.0), ("time", None)])
def test_a_step_whose_time_was_up_proves_nothing_and_hides_no_plan(
    profile: Profile, objective: str, least: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def solve(profile: Profile, program: Program, *asked: Any) -> Solved | None:
        if program is possible[0].program:
            raise TimeUpError("the time was up")
        return objectives.solve(profile, program, *asked)

    possible = steps(profile, profile.batch_size, {}, NO_RESTRICTIONS)
    lowest = known(possible[1].program.smallest_peak(Limits()))
    asked = profile, possible, Limits(int(1.05 * lowest.cost)), objective, 9.0, Deadline()
    monkeypatch.setattr("mesa_tune.search.steps.solve", solve)
    step, solved = known(solved_best(*asked))
    assert step.sliced
    floor = possible[0].program.space.base_ms if least is None else least
    assert solved.bound <= floor < solved.cost
    assert solved.gap == pytest.approx(1 - floor / solved.cost)


def test_without_time_there_is_an_error_and_not_an_answer(profile: Profile) -> None:
    possible = steps(profile, profile.batch_size, {}, NO_RESTRICTIONS)
    with pytest.raises(TimeUpError, match="no plan within 0 s, and did not prove that there is none"):
        solved_best(profile, possible, Limits(1), "time", 0.5, Deadline(0.0))


def test_a_batch_that_no_look_had_time_for_is_too_large(
    profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = Limits(profile.timeline.at().peak_bytes({}))

    def most() -> int:
        return most_samples(profile, lambda _: limits, "error", 0.1, {}, NO_RESTRICTIONS)

    assert most() > profile.batch_size
    monkeypatch.setattr("mesa_tune.search.batch_sizes._LOOK_SECONDS", 0.0)
    assert most() == 0


def test_the_frontier_reaches_below_the_lowest_peak_without_slices(profile: Profile) -> None:
    table = pareto(profile, budgets=3, objectives=["error"])
    least = table[table.kind == "error"].peak_bytes.min()
    assert least == pytest.approx(smallest(profile).predicted.peak_bytes, rel=0.02)
    assert least < smallest(profile, forbid=["tile"]).predicted.peak_bytes
