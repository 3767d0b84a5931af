"""The study: it wins where there is something to win, never by luck, and goes on where it was stopped."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import optuna
import pytest

from mesa_tune.profiles.profile import Profile
from mesa_tune.search import Plan, objectives, search_policy
from mesa_tune.search.again.correction import with_floor
from mesa_tune.search.space import make_space
from mesa_tune.search.study import study as studies
from mesa_tune.search.study.knobs import MOST_GROUPS, _groups
from mesa_tune.search.study.trial import FULL, SCREEN, fresh, measurement
from tests.builders import known
from tests.search.meters import Stopped, Weighted
from tests.synthetic import COARSE, noisy, synthetic_profile

BUDGET = "34%"
ERRING = {"layernorm": 20.0, "loss": 0.05}
SLOWER = {"fc": 4.0, "relu": 0.3}


@pytest.fixture(scope="module", name="profile")
def _profile() -> Profile:
    """Without noise to compare errors with: the objective is the error."""
    return synthetic_profile(3, grid=COARSE, seed=1)


@pytest.fixture(scope="module", name="noisy_profile")
def _noisy_profile(profile: Profile) -> Profile:
    return noisy(profile, 0.5)


@pytest.fixture(name="free_noise")
def _free_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """In these profiles, compressing takes less time than what noise costs."""
    monkeypatch.setattr(objectives, "WEIGHT", 0.0)


def search(profile: Profile, meter: Weighted, trials: int | None, **more: Any) -> Plan:
    return search_policy(profile, more.pop("budget", BUDGET), measure=meter, trials=trials, **more)


def stored(path: Path) -> list[optuna.trial.FrozenTrial]:
    return list(optuna.load_study(study_name=None, storage=f"sqlite:///{path}").trials)


@pytest.mark.parametrize("seed", range(3))
def test_it_wins_where_layers_err_otherwise_than_alone(profile: Profile, seed: int) -> None:
    solved, meter = search_policy(profile, BUDGET), Weighted(profile, ERRING)
    plan = search(profile, meter, 25, seed=seed)
    assert "of the noise ratio in fresh measurements" in plan.won
    assert plan.is_from_study
    assert meter.error(plan.policy) < 0.3 * meter.error(solved.policy)
    assert plan.measured is not None
    assert plan.measured.gain > 2 * plan.measured.gain_error > 0
    assert plan.predicted.peak_bytes <= (plan.budget_bytes or 0)
    assert (plan.bound, plan.gap) == (solved.bound, solved.gap)


@pytest.mark.usefixtures("free_noise")
def test_it_wins_where_kinds_of_layers_take_longer_than_alone(noisy_profile: Profile) -> None:
    limits: dict[str, Any] = {"budget": "50%", "max_noise_ratio": math.inf}
    solved = search_policy(noisy_profile, **limits)
    meter = Weighted(noisy_profile, slower=SLOWER, joint=0.9)
    plans = [search(noisy_profile, meter, 30, seed=seed, **limits) for seed in range(3)]
    faster = [plan for plan in plans if meter.ms(plan.policy) < 0.9 * meter.ms(solved.policy)]
    assert len(faster) == 3
    for plan in faster:
        assert "of the step's time in fresh measurements" in plan.won
        assert plan.measured is not None
        assert (plan.measured.noise_ratio or 1.0) <= 0.1


def test_luck_wins_nothing(profile: Profile, noisy_profile: Profile) -> None:
    plan = search(profile, Weighted(profile, noise=0.3), 15)
    assert plan.policy == search_policy(profile, BUDGET).policy
    assert plan.won == "15 trials found nothing better, so the solved plan stays"
    timed = Weighted(noisy_profile, joint=0.98, chance=0.1)
    assert search(noisy_profile, timed, 15, budget="50%").policy == search_policy(noisy_profile, "50%").policy


@pytest.mark.usefixtures("free_noise")
def test_a_plan_measured_above_the_ratio_is_corrected(noisy_profile: Profile, tmp_path: Path) -> None:
    limit, path = 3e-3, tmp_path / "study.db"
    limits: dict[str, Any] = {"budget": "50%", "max_noise_ratio": limit}
    solved = search_policy(noisy_profile, **limits)
    alone = Weighted(noisy_profile).error(solved.policy) / 0.5
    meter = Weighted(noisy_profile, joint=1.7 * limit / alone)
    plan = search(noisy_profile, meter, 5, storage=path, **limits)
    assert plan.won.startswith("5 trials won by noise, which the solved plan exceeds")
    assert meter.joint * meter.error(plan.policy) / 0.5 <= limit
    first, second = stored(path)[:2]
    assert first.constraints["noise"] == pytest.approx(0.7, abs=0.1)
    predicted = known(with_floor(noisy_profile).predict(solved.policy).gradient_noise_ratio)
    assert second.params["noise margin"] == pytest.approx(math.log(0.9 * predicted / (1.7 * limit)), abs=0.05)
    assert set(first.constraints) == {"peak", "noise"}


def test_a_smallest_plan_above_the_slowdown_is_corrected(noisy_profile: Profile) -> None:
    limits: dict[str, Any] = {"objective": "memory", "max_noise_ratio": 1e-4, "max_slowdown": 1.2}
    solved, plain = search_policy(noisy_profile, **limits), noisy_profile.plain_ms(noisy_profile.batch_size)
    alone = Weighted(noisy_profile).error(solved.policy) / 0.5
    meter = Weighted(noisy_profile, joint=0.5 * 1e-4 / alone, chance=0.002)
    assert meter.ms(solved.policy) > 1.2 * plain  # the profile predicts less
    plan = search(noisy_profile, meter, 8, budget=None, **limits)
    assert "by slowdown, which the solved plan exceeds" in plan.won
    assert meter.ms(plan.policy) <= 1.2 * plain * 1.01


def test_trials_that_are_clearly_worse_are_pruned(profile: Profile, tmp_path: Path) -> None:
    plan = search(profile, Weighted(profile, ERRING), 25, storage=tmp_path / "study.db")
    trials = [trial for trial in stored(tmp_path / "study.db") if "errors" in trial.user_attrs]
    counts = {trial.state.name: len(trial.user_attrs["errors"]) for trial in trials}
    assert counts == {"COMPLETE": len(FULL), "PRUNED": len(SCREEN)}
    assert [entry.is_whole for entry in plan.history] == [trial.state.name == "COMPLETE" for trial in trials]
    assert all(trial.constraints["peak"] <= 0 for trial in trials)


def test_why_a_study_ended_is_said(profile: Profile, noisy_profile: Profile) -> None:
    def won(meter: Weighted, trials: int | None, timeout: float | None = None, **more: Any) -> str:
        return search(meter.profile, meter, trials, timeout=timeout, **more).won

    assert won(Weighted(profile), 1) == "1 trial found nothing better, so the solved plan stays"
    assert "of 10000 trials (20 in turn gained nothing)" in won(Weighted(profile), 10_000)
    assert "trials (time was up)" in won(Weighted(profile, seconds=0.3), None, 3.0)
    free: dict[str, float] = dict.fromkeys(("fc", "relu", "layernorm", "loss", "other"), 0.0)
    as_plain = Weighted(noisy_profile, slower=free, joint=0.01, chance=0.001)
    assert "(its step is as fast as plain's)" in won(as_plain, 9, budget="70%")


def test_without_time_for_a_trial_nothing_is_measured(profile: Profile) -> None:
    meter = Weighted(profile)
    plan = search(profile, meter, None, timeout=0.5)  # a trial takes about 35 plain steps of 40 ms
    assert (plan.trials, plan.measured, meter.asked) == (0, None, [])
    assert plan.won == "not measured: no trial fits into the time; give timeout= more seconds"
    assert plan.policy == search_policy(profile, BUDGET).policy


def test_a_trial_stops_where_its_first_steps_take_longer_than_the_profile_says(profile: Profile) -> None:
    meter = Weighted(profile, seconds=3.2)  # as beside other work on the machine
    plan = search(profile, meter, None, timeout=2.0)
    assert (plan.trials, plan.measured, meter.asked, meter.calls) == (0, None, [FULL[0]], 0)
    assert plan.won == "not measured: no trial fits into the time; give timeout= more seconds"


def test_what_confirms_was_never_used_before(profile: Profile) -> None:
    meter = Weighted(profile, ERRING)
    assert search(profile, meter, 25).is_from_study
    assert set(fresh(25)).isdisjoint(FULL)
    assert set(fresh(25)).isdisjoint(fresh(24))
    assert any(set(meter.asked) == {*FULL, *fresh(count)} for count in range(26))


def test_a_stopped_study_goes_on(profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "study.db"
    with pytest.raises(KeyboardInterrupt):
        search(profile, Stopped(profile, ERRING, pair=21), 25, storage=path)
    done = [trial for trial in stored(path) if trial.state.is_finished() and "errors" in trial.user_attrs]
    assert len(done) >= 2
    again = Weighted(profile, ERRING)
    plan = search(profile, again, 25, storage=path)
    assert plan.is_from_study
    assert plan.history[: len(done)] == search(profile, again, 1, storage=path).history[: len(done)]
    assert "RUNNING" not in {trial.state.name for trial in stored(path)}
    calls = len(again.asked)
    search(profile, again, len(stored(path)), storage=path)
    assert len(again.asked) - calls <= 2 * len(FULL)  # confirmed only


def test_other_problems_and_other_versions_are_other_studies(
    profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "study.db"
    assert search(profile, Weighted(profile), 4, storage=path).trials == 4
    assert search(profile, Weighted(profile), 2, storage=path).trials == 4
    assert search(profile, Weighted(profile), 2, storage=path, budget="40%").trials == 2
    monkeypatch.setattr(studies, "hardware", lambda: "another processor")
    assert search(profile, Weighted(profile), 2, storage=path).trials == 2
    monkeypatch.setattr(studies, "_VERSION", studies._VERSION + 1)
    assert search(profile, Weighted(profile), 3, storage=path).trials == 3


def test_groups_of_like_layers_are_few() -> None:
    few, many = (
        _groups(make_space(synthetic_profile(blocks, grid=COARSE), 8, {}).decisions) for blocks in (3, 9)
    )
    assert {"fc early", "fc late", "relu middle"} < set(few)
    for groups in (few, many):
        assert len(groups) <= MOST_GROUPS
        numbers = [number for group in groups.values() for number in group]
        assert len(numbers) == len(set(numbers))


def test_gains_are_paired() -> None:
    from mesa_tune.profiles.own_noise import GradientError

    errors, solved = ([GradientError(x, 2 * x) for x in xs] for xs in ((1.0, 2.0, 3.0), (1.25, 2.25, 3.25)))
    found = measurement(errors, solved)
    assert found.gain == pytest.approx(0.5)
    assert found.gain_error == pytest.approx(0.0)
    assert found.standard_error > 0.5
