"""The study: it wins where there is something to win, never by luck, and goes on where it was stopped."""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest

from mesa_tune.errors import RunError
from mesa_tune.policy import Policy
from mesa_tune.profiler.errors.joint_error import GradientError, Pair
from mesa_tune.profiler.profile import Profile
from mesa_tune.search import Plan, search_policy
from mesa_tune.search.fleet import studies
from mesa_tune.search.study.local_search import FULL, SCREEN, fresh, measurement
from tests.synthetic import COARSE, synthetic_profile

BUDGET = "34%"
NOISE = 0.5
"""Of the batches, over their squared gradient: that of `synthetic_profile`."""
pytestmark = pytest.mark.slow("leaving")


class Weighted:
    """A joint error in which some tags count otherwise than alone, with noise that the pair decides."""

    def __init__(self, profile: Profile, weights: Mapping[str, float], *, noise: float = 0.02) -> None:
        self.profile = profile
        self.weights = weights
        self.noise = noise
        self.asked: list[Pair] = []

    def errors(self, policy: Policy, pairs: Sequence[Pair]) -> list[GradientError]:
        self.asked += pairs
        assignment = self.profile.assignment(policy)
        error = sum(
            (self.profile.layer_error(layer, assignment[layer.name]) or 0.0)
            * self.weights.get(layer.tag, 1.0)
            for layer in self.profile.layers
        )
        errors = [error * (1 + self.noise * self._chance(policy, pair)) for pair in pairs]
        return [GradientError(each, each / NOISE) for each in errors]

    def step_times(self, policies: Sequence[Policy], rounds: int) -> list[list[float]]:
        raise AssertionError("the objective is not time")

    @staticmethod
    def _chance(policy: Policy, pair: Pair) -> float:
        return float(np.random.default_rng([zlib.crc32(policy.dumps().encode()), *pair]).standard_normal())


class Failing(Weighted):
    """Stops with Ctrl-C when it has been asked `count` times."""

    count = 3

    def errors(self, policy: Policy, pairs: Sequence[Pair]) -> list[GradientError]:
        self.count -= 1
        if not self.count:
            raise KeyboardInterrupt
        return super().errors(policy, pairs)


@pytest.fixture(scope="module", name="profile")
def _profile() -> Profile:
    return synthetic_profile(3, grid=COARSE, seed=1)


def _ratio(plan: Plan) -> float:
    """The plan's ratio; it has none, as the profile has no noise to compare errors with."""
    assert plan.measured is not None
    assert plan.measured.noise_ratio is None
    return plan.measured.solved - plan.measured.gain


def study(profile: Profile, objective: Weighted, trials: int, **more: Any) -> Plan:
    return search_policy(profile, BUDGET, measure=objective, trials=trials, **more)


def test_it_wins_where_layers_count_otherwise_than_alone(profile: Profile) -> None:
    solved = search_policy(profile, BUDGET)
    objective = Weighted(profile, {"layernorm": 20.0, "loss": 0.05})
    plan = study(profile, objective, 25)
    assert plan.measured is not None
    assert plan.policy != solved.policy
    assert plan.measured.gain > 2 * plan.measured.gain_error
    assert _ratio(plan) < plan.measured.solved
    assert "won" in plan.won
    assert plan.solver == "HiGHS and study"
    assert plan.predicted.peak_bytes <= solved.predicted.peak_bytes <= (plan.budget_bytes or 0)
    assert plan.predicted.saved_bytes <= solved.predicted.saved_bytes
    assert (plan.bound, plan.gap) == (solved.bound, solved.gap)


def test_it_wins_the_same_with_any_seed(profile: Profile) -> None:
    objective = Weighted(profile, {"layernorm": 20.0})
    plans = [study(profile, objective, 25, seed=seed) for seed in range(5)]
    shares = [_ratio(plan) / plan.measured.solved for plan in plans if plan.measured]
    assert len(shares) == 5
    assert max(shares) < 1.01 * min(shares) < 0.3


def test_trials_that_are_clearly_worse_are_pruned(profile: Profile, tmp_path: Path) -> None:
    study(profile, Weighted(profile, {"layernorm": 20.0}), 25, storage=tmp_path / "study.db")
    stored = optuna.load_study(study_name=None, storage=f"sqlite:///{tmp_path / 'study.db'}").trials
    by_state = {"COMPLETE": len(FULL), "PRUNED": len(SCREEN)}
    assert {trial.state.name for trial in stored} == by_state.keys()
    for trial in stored:
        count = by_state[trial.state.name]
        assert len(trial.user_attrs["errors"]) == count
        assert trial.intermediate_values == {count: trial.value}


def test_luck_wins_nothing(profile: Profile) -> None:
    solved = search_policy(profile, BUDGET)
    plan = study(profile, Weighted(profile, {}, noise=0.3), 15)
    assert plan.policy == solved.policy
    assert "nothing" in plan.won


def test_a_study_that_ran_out_of_time_says_so(profile: Profile) -> None:
    ended = search_policy(profile, BUDGET, measure=Weighted(profile, {}), trials=10_000, timeout=0.2)
    assert f"{ended.trials} of 10000 trials (time was up) found nothing better" in ended.won
    assert ended.won.endswith("the same command continues it")
    whole = search_policy(profile, BUDGET, measure=Weighted(profile, {}), trials=1)
    assert whole.won == "1 trial found nothing better on fresh batches, so the solved plan stays"


def test_what_confirms_was_never_used_before(profile: Profile) -> None:
    objective = Weighted(profile, {})
    study(profile, objective, 3)
    looks = [set(fresh(trials, look)) for trials in (3, 4) for look in (0, 1, 2)]
    assert len(set(FULL).union(*looks)) == len(FULL) + sum(map(len, looks)), "no look shares a batch"
    assert looks[0] <= set(objective.asked)
    assert set(objective.asked) <= set(FULL) | looks[0] | looks[1]


def test_equal_seeds_give_equal_plans(profile: Profile) -> None:
    first, second = (study(profile, Weighted(profile, {"fc": 3.0}), 14, seed=7) for _ in range(2))
    assert first.to_dict() == second.to_dict()


def test_a_split_study_ends_as_a_whole_one(profile: Profile, tmp_path: Path) -> None:
    weights = {"layernorm": 20.0}
    whole = study(profile, Weighted(profile, weights), 11)
    for trials in (1, 5, 11):
        split = study(profile, Weighted(profile, weights), trials, storage=tmp_path / "split.db")
    assert split.to_dict() == whole.to_dict()
    again = Weighted(profile, weights)
    assert study(profile, again, 11, storage=tmp_path / "split.db").to_dict() == whole.to_dict()
    assert set(fresh(11)) <= set(again.asked) <= set(fresh(11)) | set(fresh(11, 1))


def test_a_study_of_an_earlier_version_is_begun_again(
    profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "study.db"
    study(profile, Weighted(profile, {}), 5, storage=path)
    monkeypatch.setattr(studies, "_VERSION", studies._VERSION + 1)
    assert study(profile, Weighted(profile, {}), 2, storage=path).trials == 2


def test_a_stopped_study_goes_on(profile: Profile, tmp_path: Path) -> None:
    weights = {"layernorm": 20.0}
    whole = study(profile, Weighted(profile, weights), 5)
    with pytest.raises(KeyboardInterrupt):
        study(profile, Failing(profile, weights), 5, storage=tmp_path / "study.db")
    assert (
        study(profile, Weighted(profile, weights), 5, storage=tmp_path / "study.db").to_dict()
        == whole.to_dict()
    )


def test_time_ends_a_study(profile: Profile) -> None:
    plan = search_policy(profile, BUDGET, measure=Weighted(profile, {}), timeout=1e-9)
    assert plan.trials == 0
    assert plan.policy == search_policy(profile, BUDGET).policy


def test_problems_of_one_file_keep_apart(profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "study.db"
    study(profile, Weighted(profile, {}), 4, storage=path)
    other = search_policy(profile, "40%", measure=Weighted(profile, {}), trials=2, storage=path)
    assert other.trials == 2


def test_trials_are_all_feasible_and_say_so(profile: Profile, tmp_path: Path) -> None:
    import optuna

    path = tmp_path / "study.db"
    study(profile, Weighted(profile, {}), 8, storage=path)
    [name] = optuna.get_all_study_names(f"sqlite:///{path}")
    trials = optuna.load_study(study_name=name, storage=f"sqlite:///{path}").trials
    assert len(trials) == 8
    for trial in trials:
        assert set(trial.constraints) == {"peak", "saved"}
        assert max(trial.constraints.values()) <= 0


def test_a_damaged_study_is_refused(profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "study.db"
    path.write_bytes(b"SQLite format 3\0" + b"\x07" * 4096)
    _assert_refused(profile, path)


def test_text_in_place_of_a_study_is_refused(profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "study.db"
    path.write_text("not a study" * 500, "utf-8")
    _assert_refused(profile, path)


def test_a_foreign_database_is_refused_and_left_alone(profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "study.db"
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE recipes (name TEXT)")
        database.commit()
    before = path.read_bytes()
    _assert_refused(profile, path)
    assert path.read_bytes() == before


def test_an_unusable_database_is_refused_without_its_password(profile: Profile) -> None:
    with pytest.raises(RunError) as caught:
        study(profile, Weighted(profile, {}), 2, storage="nosuchbase://me:secret@host/db")
    assert "secret" not in str(caught.value)


def _assert_refused(profile: Profile, path: Path) -> None:
    with pytest.raises(RunError) as caught:
        study(profile, Weighted(profile, {}), 2, storage=path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "--force" in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 3


def test_gains_are_paired() -> None:
    errors, solved = ([GradientError(x, 2 * x) for x in xs] for xs in ((1.0, 2.0, 3.0), (1.25, 2.25, 3.25)))
    found = measurement(errors, solved)
    assert found.gain == pytest.approx(0.5)
    assert found.gain_error == pytest.approx(0.0)
    assert found.standard_error > 0.5
