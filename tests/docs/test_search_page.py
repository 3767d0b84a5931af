"""docs/rivals.md: which ways count as answers, and which are faster than the searched plan."""

from __future__ import annotations

from typing import Any

from tests.builders import of_benchmarks

PAGE = of_benchmarks("search_page")


def row(peak: float, noise: float, step: float, beside: tuple[float, float, float]) -> dict[str, Any]:
    sizes = {"peak": peak * 1e6, "with workspaces": (peak + 2) * 1e6}
    return {**sizes, "noise ratio": noise, "step": (step, step, step), "of searched": beside}


def line(limit: float | None, **rivals: dict[str, Any]) -> dict[str, Any]:
    """Return a result with a searched plan of 50 MB, 2 more with workspaces, 20 static."""
    own = {"plain": row(100, 0, 1, (0.9, 0.9, 0.9)), "searched": row(50, 0.05, 1.1, (1, 1, 1))}
    title = {"model": "gpt", "title": "GPT", "batch size": 4, "command": "python benchmarks/search.py"}
    cell = {"cell": "smallest" if limit is None else "midway", "limit": limit and limit * 1e6}
    found = {"won": "nothing", "gap": 0.001, "predicted ms": [11.0, 11.0], "plain ms": 10.0}
    sizes = {"static with gradients": 20e6, "floor": 41e6}
    return {**title, **cell, **found, **sizes, "rows": {**own, **rivals}}


def test_only_ways_within_limit_and_ratio_can_be_faster() -> None:
    result = line(
        50,
        faster=row(50, 0, 1.0, (0.9, 0.88, 0.95)),
        within_the_spread=row(50, 0, 1.0, (0.97, 0.95, 1.01)),
        noisy=row(50, 0.2, 1.0, (0.9, 0.88, 0.95)),
        large=row(60, 0, 1.0, (0.9, 0.88, 0.95)),
    )
    assert PAGE.faster(result) == ["faster"]
    text = PAGE.page([result])
    assert "In 0 of 1 cells no rival that fits is better.\n  Better: GPT, midway: faster." in text
    assert "| (noisy) | 60" not in text
    assert "| (noisy) |" in text
    assert "| (large) |" in text
    assert "| within_the_spread | 50.0 | 50% | 0 | 1.000 (1.000 to 1.000) | 0.970 (0.950 to 1.010) |" in text
    assert "midway, 50.0 MB (*sums*)" in text
    added = "its added time, of which error is up to 2% of a step, is at most 0.10% above the least"
    assert f"takes 1.100 times plain's, and {added}" in text


def test_the_smallest_plan_is_compared_by_activations() -> None:
    text = PAGE.page([line(None, uniform=row(60, 0.09, 1.2, (1, 1, 1)), noisy=row(30, 0.3, 1.2, (1, 1, 1)))])
    activations = "0.76 of the best rival's activations (uniform); no policy has less than 0.50"
    assert f"* GPT, batch 4, smallest: {activations}." in text
    assert "In 0 of 0 cells" in text


def test_noise_makes_a_step_count_as_longer_where_the_ratio_is_the_parameters_own() -> None:
    rivals = {
        "as_noisy": row(50, 0.05, 1.0, (0.95, 0.93, 0.97)),
        "noisier": row(50, 0.06, 1.0, (0.97, 0.95, 0.98)),
        "slower": row(50, 0.0, 1.3, (1.2, 1.15, 1.3)),
    }
    result = {**line(50, **rivals), "max noise ratio": 0.06}
    assert PAGE.faster(result) == ["as_noisy", "slower"]  # 1.3 is below 1 + 8 x 0.05
    assert "(*sums*)" not in PAGE.page([result])
    assert PAGE.faster({**result, "max noise ratio": 0.01}) == ["slower"]
