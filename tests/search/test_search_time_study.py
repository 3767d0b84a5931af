"""The studies of `time` and `memory`: they win within what is measured, and never by luck."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mesa_tune.policy import Policy
from mesa_tune.profiler.errors.joint_error import GradientError, Pair
from mesa_tune.profiler.profile import Profile
from mesa_tune.search import Plan, objectives, search_policy
from mesa_tune.search.fleet import trials
from mesa_tune.search.study import local_search
from mesa_tune.search.study.fitting import drawn_factors
from tests.search.test_search_study import Weighted
from tests.synthetic import COARSE, noisy, synthetic_profile

pytestmark = pytest.mark.slow("leaving")

BUDGET = "50%"
RATIO = 0.1
SLOWER = {"fc": 4.0, "relu": 0.3}
RELATIVE = 0.5
COST = 20.0
"""Compressing takes this many times what the profile predicts: a share of the step as on real machines."""


@pytest.fixture(autouse=True)
def _noise_costs_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """In these profiles, compressing takes less time than what noise costs."""
    monkeypatch.setattr(objectives, "WEIGHT", 0.0)


class Timed(Weighted):
    """Steps in which some tags take longer than alone, on a machine that is 2 % faster or slower by chance.

    `joint`: the joint error over the sum of single ones.
    """

    def __init__(
        self, profile: Profile, slower: Mapping[str, float], *, joint: float = 1.0, chance: float = 0.02
    ) -> None:
        super().__init__(profile, {})
        self.slower, self.joint, self.chance = slower, joint, chance
        self.calls = 0

    def errors(self, policy: Policy, pairs: Sequence[Pair]) -> list[GradientError]:
        errors = super().errors(policy, pairs)
        return [GradientError(self.joint * error, self.joint * ratio) for error, ratio in errors]

    def step_times(self, policies: Sequence[Policy], rounds: int) -> list[list[float]]:
        self.calls += 1
        chance = np.random.default_rng([rounds, *policies[-1].dumps().encode()])
        times = np.array([self.ms(policy) for policy in policies])
        drift = 1 + 0.3 * chance.random((rounds, 1))
        noise: list[list[float]] = (
            times * drift * (1 + self.chance * chance.standard_normal((rounds, len(policies))))
        ).tolist()
        return noise

    def ms(self, policy: Policy) -> float:
        """Return the true time of a step."""
        assignment = self.profile.assignment(policy)
        plain = self.profile.plain_ms(self.profile.batch_size)
        alone = self.profile.predict(Policy(())).step_ms or plain
        times = [
            COST
            * self.slower.get(layer.tag, 1.0)
            * ((self.profile.predict_assignment({layer.name: assignment[layer.name]}).step_ms or 0) - alone)
            for layer in self.profile.layers
        ]
        return alone + sum(times)


@pytest.fixture(scope="module", name="profile")
def _profile() -> Profile:
    return noisy(synthetic_profile(3, grid=COARSE, seed=1), RELATIVE)


def study(profile: Profile, meter: Timed, count: int, **more: Any) -> Plan:
    plan = search_policy(profile, BUDGET, measure=meter, trials=count, **more)
    assert plan.objective == "time"
    assert plan.predicted.peak_bytes <= (plan.budget_bytes or 0)
    return plan


@pytest.mark.parametrize("seed", range(3))
def test_it_wins_where_kinds_of_layers_take_longer_than_alone(profile: Profile, seed: int) -> None:
    solved = search_policy(profile, BUDGET, max_noise_ratio=RATIO)
    meter = Timed(profile, SLOWER, joint=0.9)
    plan = study(profile, meter, 25, max_noise_ratio=RATIO, seed=seed)
    assert "of the step's time in fresh steps" in plan.won
    assert meter.ms(plan.policy) < meter.ms(solved.policy)
    assert plan.measured is not None
    assert plan.measured.noise_ratio is not None
    assert plan.measured.noise_ratio <= RATIO


def test_a_plan_within_the_ratio_is_found_though_errors_are_larger_on_fresh_batches(profile: Profile) -> None:
    class Fresh(Timed):
        def errors(self, policy: Policy, pairs: Sequence[Pair]) -> list[GradientError]:
            found = super().errors(policy, pairs)
            factors = [1.15 if draw >= 1000 else 1.0 for draw, _ in pairs]
            return [
                GradientError(f * error, f * ratio) for f, (error, ratio) in zip(factors, found, strict=True)
            ]

    limit = 0.01  # the solved plan has 0.94 of it in the study, 1.08 on fresh batches
    plan = study(profile, Fresh(profile, {}, joint=1.95), 25, max_noise_ratio=limit)
    assert plan.measured is not None
    assert plan.measured.noise_ratio is not None
    assert plan.measured.noise_ratio <= limit
    assert "in place of 0.011 on fresh batches" in plan.won


def test_factors_are_those_that_explain_the_steps() -> None:
    generator = np.random.default_rng(0)
    true = np.array([2.0, 0.5, 1.0])
    added = generator.random((40, 3)) * 0.2
    measured = added @ true + 0.002 * generator.standard_normal(40)
    spreads = np.array([0.5, 0.5, 2.0])

    def draws(rows: int, errors: float) -> np.ndarray:
        known = added[:rows], measured[:rows], np.full(rows, errors)
        return np.array([drawn_factors(*known, spreads, generator) for _ in range(400)])

    assert draws(40, 0.002).mean(axis=0) == pytest.approx(true, abs=0.1)
    unknown = draws(1, 1e3)
    assert unknown.mean(axis=0) == pytest.approx(np.ones(3), abs=0.3)
    assert unknown.std(axis=0) == pytest.approx(spreads, rel=0.15)


def test_luck_wins_no_time(profile: Profile) -> None:
    plan = study(profile, Timed(profile, {}, joint=0.98, chance=0.1), 15, max_noise_ratio=1e-3)
    assert plan.policy == search_policy(profile, BUDGET, max_noise_ratio=1e-3).policy
    assert "nothing" in plan.won


def _true_ratio(meter: Timed, policy: Policy) -> float:
    pairs = [(draw, seed) for draw in range(5000, 5010) for seed in range(10)]
    return statistics.fmean(error.ratio for error in meter.errors(policy, pairs))


def _ratios(profile: Profile, limit: float) -> Callable[[float], Timed]:
    """Return what makes a meter by which the solved plan has `part` of the limit on the noise ratio."""
    solved = search_policy(profile, BUDGET, max_noise_ratio=limit)
    sum_ = _true_ratio(Timed(profile, {}), solved.policy)
    return lambda part: Timed(profile, {}, joint=part * limit / sum_, chance=0.002)


def test_room_below_the_ratio_buys_time(profile: Profile) -> None:
    limit = 1e-5
    solved = search_policy(profile, BUDGET, max_noise_ratio=limit)
    meter = _ratios(profile, limit)(0.15)
    plan = study(profile, meter, 4, max_noise_ratio=limit)
    assert "of the step's time" in plan.won
    assert meter.ms(plan.policy) < meter.ms(solved.policy)
    assert _true_ratio(meter, plan.policy) <= limit
    assert (plan.predicted.gradient_noise_ratio or 0) > limit


def test_a_plan_above_the_ratio_is_replaced(profile: Profile) -> None:
    limit = 1e-4
    meter = _ratios(profile, limit)(1.7)
    plan = study(profile, meter, 4, max_noise_ratio=limit)
    assert "won noise ratio" in plan.won
    assert _true_ratio(meter, plan.policy) <= limit


def test_a_study_with_recorded_times_goes_on_where_it_was_stopped(profile: Profile, tmp_path: Path) -> None:
    def meter() -> Timed:
        return Timed(profile, {"fc": 4.0}, joint=0.9)

    whole = study(profile, meter(), 9)
    for count in (1, 4, 9):
        split = study(profile, meter(), count, storage=tmp_path / "split.db")
    assert split.to_dict() == whole.to_dict()
    again = meter()
    assert study(profile, again, 9, storage=tmp_path / "split.db").to_dict() == whole.to_dict()
    assert again.calls <= 1  # the confirmation


def test_trials_say_how_far_they_are_from_the_limits(profile: Profile, tmp_path: Path) -> None:
    import optuna

    path = tmp_path / "study.db"
    study(profile, _ratios(profile, 1e-4)(1.7), 4, max_noise_ratio=1e-4, storage=path)
    [name] = optuna.get_all_study_names(f"sqlite:///{path}")
    first, *others = optuna.load_study(study_name=name, storage=f"sqlite:///{path}").trials
    assert first.constraints["noise"] == pytest.approx(0.7, abs=0.1)
    assert first.user_attrs["paces"]
    assert others[0].params["noise margin"] < 0
    for trial in others:
        assert set(trial.constraints) == {"peak", "noise"}
        if trial.user_attrs["chosen"] != first.user_attrs["chosen"]:
            assert bool(trial.user_attrs["paces"]) == (trial.constraints["noise"] <= 0)


def test_times_of_other_hardware_are_not_compared(
    profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def searched(hardware: str) -> tuple[Plan, Timed]:
        monkeypatch.setattr(trials, "hardware", lambda: hardware)
        monkeypatch.setattr(local_search, "hardware", lambda: hardware)
        meter = Timed(profile, SLOWER, joint=0.9)
        return study(profile, meter, 25, max_noise_ratio=RATIO, storage=tmp_path / "study.db"), meter

    first, _ = searched("one")
    assert "won" in first.won
    again, meter = searched("another")
    assert again.policy == search_policy(profile, BUDGET, max_noise_ratio=RATIO).policy
    assert meter.calls == 0


def smallest(profile: Profile, meter: Timed, count: int, **more: Any) -> Plan:
    plan = search_policy(profile, objective="memory", measure=meter, trials=count, **more)
    assert plan.objective == "memory"
    return plan


def memory_meter(profile: Profile, part: float) -> Timed:
    """Return a meter by which the solved plan of `memory` has `part` of the limit on the noise ratio."""
    solved = search_policy(profile, objective="memory", max_noise_ratio=LIMIT, max_slowdown=SLOWDOWN)
    joint = part * LIMIT / _true_ratio(Timed(profile, {}), solved.policy)
    return Timed(profile, {}, joint=joint, chance=0.002)


LIMIT, SLOWDOWN = 1e-5, 10.0


def test_room_below_the_ratio_buys_memory(profile: Profile) -> None:
    solved = search_policy(profile, objective="memory", max_noise_ratio=LIMIT, max_slowdown=SLOWDOWN)
    meter = memory_meter(profile, 0.2)
    plan = smallest(profile, meter, 4, max_noise_ratio=LIMIT, max_slowdown=SLOWDOWN)
    assert "of the peak" in plan.won
    assert plan.predicted.peak_bytes < solved.predicted.peak_bytes
    assert _true_ratio(meter, plan.policy) <= LIMIT


def test_a_smallest_plan_above_the_ratio_is_replaced(profile: Profile) -> None:
    meter = memory_meter(profile, 1.7)
    plan = smallest(profile, meter, 4, max_noise_ratio=LIMIT, max_slowdown=SLOWDOWN)
    assert "won noise ratio" in plan.won
    assert _true_ratio(meter, plan.policy) <= LIMIT


def test_a_smallest_plan_above_the_slowdown_is_replaced(profile: Profile) -> None:
    limits: dict[str, Any] = {"max_noise_ratio": 1e-4, "max_slowdown": 1.2}
    meter = memory_meter(profile, 0.5)
    solved = search_policy(profile, objective="memory", **limits)
    plain = profile.plain_ms(profile.batch_size)
    assert meter.ms(solved.policy) > 1.2 * plain  # the profile predicts less
    plan = smallest(profile, meter, 8, **limits)
    assert "won slowdown" in plan.won
    assert meter.ms(plan.policy) <= 1.2 * plain * 1.01


def test_a_lower_peak_wins_nothing_if_its_step_is_too_slow(profile: Profile) -> None:
    meter = memory_meter(profile, 0.2)
    plan = smallest(profile, meter, 4, max_noise_ratio=LIMIT, max_slowdown=1.02)
    assert meter.ms(plan.policy) > 1.02 * profile.plain_ms(profile.batch_size)  # as predicted, it is not
    assert "nothing" in plan.won
