"""The table of what can be had: every row is a prediction, and no plan is worse than a larger budget's."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from mesa_tune.policy import Policy
from mesa_tune.search import frontier
from mesa_tune.search.frontier import pareto
from mesa_tune.search.objectives import MAX_NOISE_RATIO
from tests.synthetic import COARSE, is_sorted, noisy, synthetic_profile


def test_more_memory_never_costs_time_or_error() -> None:
    profile = replace(noisy(synthetic_profile(2, grid=COARSE, seed=1)), interaction=())
    table = pareto(profile)
    assert set(table["kind"]) == {"plain", "uniform", "time", "error"}
    for objective, column in (("time", "step_ms"), ("error", "gradient_error")):
        rows = table[table["kind"] == objective]
        assert len(rows) >= 5
        assert (rows["peak_bytes"] <= rows["budget"]).all()
        # Solved to 1 %: of what is added to the step.
        values = rows[column] - (40.0 if objective == "time" else 0.0)
        assert is_sorted([-value * 1.01**-place for place, value in enumerate(values)])
        assert values.iloc[0] > values.iloc[-1]
    assert (table[table["kind"] == "time"]["noise_ratio"] <= MAX_NOISE_RATIO * (1 + 1e-9)).all()
    uniform = table[table["label"] == "4 bits"].iloc[0]
    assert uniform["peak_bytes"] == profile.predict(Policy.uniform(level=16)).peak_bytes
    labels = table[table["kind"] == "uniform"]["label"].tolist()
    assert labels == ["8 bits", "6 bits", "4 bits", "3 bits", "2 bits", "1 bit"]
    budgets = table[table["kind"] == "error"]["budget"]
    assert budgets.diff().dropna().nunique() <= 2  # equal steps, of whole bytes
    assert budgets.max() < profile.predict(Policy.parse("")).peak_bytes


def test_a_budget_for_which_the_time_is_too_short_has_the_plan_of_a_smaller_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    profile, solved, calls = synthetic_profile(2, grid=COARSE, seed=1), frontier._solved, count()

    def sometimes(*arguments: Any) -> Any:
        return None if next(calls) == 3 else solved(*arguments)

    monkeypatch.setattr(frontier, "_solved", sometimes)
    errors = pareto(profile, objectives=["error"]).query("kind == 'error'")["gradient_error"].tolist()
    assert errors[3] == errors[2] < errors[0]


@pytest.mark.parametrize("batch_size", [8, 20])
def test_without_a_known_ratio_only_the_error_has_a_curve(batch_size: int) -> None:
    table = pareto(synthetic_profile(1, grid=COARSE), batch_size=batch_size)
    assert "time" not in set(table["kind"])
    assert table["noise_ratio"].isna().all()
    assert (table["kind"] == "error").any()


def test_a_budget_takes_the_place_of_the_nearest_one_and_marked_points_come_last() -> None:
    profile = synthetic_profile(1, grid=COARSE)
    plain = profile.predict(Policy.parse(""))
    budget, chosen = int(0.61 * plain.peak_bytes), profile.predict(Policy.uniform(level=64))
    table = pareto(profile, budgets=5, through=budget, objectives=["error"], marked={"chosen": chosen})
    budgets = table[table["kind"] == "error"]["budget"].tolist()
    assert len(budgets) == 5
    assert budget in budgets
    assert is_sorted(budgets)
    assert table.iloc[-1]["kind"] == "chosen"
    assert table.iloc[-1]["peak_bytes"] == chosen.peak_bytes
