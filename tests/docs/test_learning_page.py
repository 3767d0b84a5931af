"""docs/learning.md: its paired intervals and what it says of them; and that trainings of a seed are pairs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mesa_tune as mt
from tests.builders import of_benchmarks

PAGE, TASKS = of_benchmarks("learning_page"), of_benchmarks("learning_tasks")
PLAIN = (2.0, 2.1, 1.9)


def lines(scores: tuple[float, ...], *, code: str = "new", **other: Any) -> list[dict[str, Any]]:
    """Return lines of plain and smallest, and of a training with each of three seeds under both."""
    policy = {"peak": 20, "saved": 10, "predicted": 0.09, "at_start": 0.012, "text": "…"}
    title = {"title": "GPT", "metric": "loss", "relative": True, "steps": 7, "uninformed": 3.0}
    made = [
        {"policy": "plain", "seed": None, "plain_peak": 80, "budget": None, **title, "peak": 80, "saved": 40},
        {"policy": "smallest", "seed": None, "plain_peak": 80, "budget": None, **title, **policy},
    ]
    for seed, (plain, score) in enumerate(zip(PLAIN, scores, strict=True)):
        run = {"seed": seed, "drawn": seed / 8}
        made.append({**run, "policy": "plain", "score": plain, "at_end": None})
        made.append({**run, "policy": "smallest", "score": score, "at_end": 0.05 + seed / 100, **other})
    hardware = {"cpu": "CPU", "capability": "AVX2", "threads": 1}
    head = {"date": "2026-01-02T03", "hardware": hardware, "versions": {"torch": "2"}, "task": "text"}
    return [{**head, "code": code, **line} for line in made]


def changed(*percent: float) -> tuple[float, ...]:
    return tuple(score * (1 + change / 100) for score, change in zip(PLAIN, percent, strict=True))


def test_a_row_has_the_paired_interval_of_the_latest_code() -> None:
    # Differences of 0.1, 0.2 and 0.3 %: mean 0.2, deviation 0.1, and t is 4.303 for 2 degrees of freedom.
    old, new = lines(changed(9, 9, 9), code="old"), lines(changed(0.1, 0.2, 0.3))
    page = PAGE.page([*old, *new])
    cells = "0.09 | 0.012 | 0.06 (≤ 0.07) | 3 | 2.004 | +0.20 (-0.05 … +0.45) | yes | yes"
    assert f"| smallest | 25% | 12% | – | {cells} |" in page
    assert "| plain | 100% | 50% | 1.00 | – | – | – | 3 | 2.000 | – | – | – |" in page
    assert page.count("| smallest |") == 1
    assert "`old`" not in page


@pytest.mark.parametrize(
    ("percent", "verdict"),
    [
        ((0.1, -0.1, 0.0), "as plain"),
        ((0.3, 0.31, 0.32), "different from plain, by less than 1 %"),
        ((3, -3, 0), "undecided: the interval contains zero, but is too wide"),
        ((3, 3.1, 3.2), "different from plain"),
    ],
)
def test_an_interval_is_put_in_words(percent: tuple[float, ...], verdict: str) -> None:
    page = PAGE.page(lines(changed(*percent)))
    ratios = "noise ratio 0.09 predicted, at most 0.07 measured"
    assert f"* text, smallest: {ratios}. Learns **{verdict}**." in page


def test_the_largest_ratio_of_all_trainings_is_said() -> None:
    assert "at most 0.2 measured" in PAGE.page(lines(changed(0, 1, 2), at_end=0.2))


def test_trainings_with_other_batches_are_no_pair() -> None:
    with pytest.raises(ValueError, match="smallest, seed 0: not the batches"):
        PAGE.page(lines(changed(0, 1, 2), drawn=0.9))


@pytest.mark.parametrize("name", ["digits", "text"])
def test_a_seed_has_the_same_batches_under_a_policy(name: str) -> None:
    task = TASKS.TASKS[name]._replace(steps=3)
    plain = TASKS.train(task, None, 1)
    rounded = TASKS.train(task, mt.Policy.uniform(level=4), 1)
    other = TASKS.train(task, None, 2)
    assert rounded.drawn == plain.drawn != other.drawn
    before, after = (next(trained.model.parameters()) for trained in (plain, rounded))
    assert not torch.equal(before, after)
    # Rounding is unbiased and the steps are few, so the weights stay close.
    assert torch.allclose(before, after, atol=0.05)
    assert rounded.model.state_dict().keys() == plain.model.state_dict().keys()


@pytest.mark.parametrize("better", [True, False])
def test_the_search_is_shown_beside_rivals_of_the_same_bytes(better: bool) -> None:
    names = PAGE.SEARCHED_AT, PAGE.GREEDY_AT
    searched, rival = names if better else reversed(names)
    made = []
    for label, scores in ((searched, PLAIN), (rival, changed(0.9, 1.0, 1.1))):
        rows = (line for line in lines(scores) if line["policy"] == "smallest")
        made += [{**line, "policy": label, "step": 1.5} for line in rows]
    amount = "+0.99 (+0.75 … +1.23) | yes" if better else "-1.00 (-1.25 … -0.75) | yes, worse"
    row = f"| text | any step | greedy | 3 | {amount} | 1.50 and 1.50 |"
    assert row in PAGE.page([*lines(PLAIN), *made])
    assert "| any step |" not in PAGE.page([*lines(PLAIN), *made[:1]])


def test_plans_solved_before_training_are_rows_with_paired_differences() -> None:
    plan = {"task": "text", "code": "new", "metric": "loss", "relative": True, "steps": 10, "seed": None}
    made: list[dict[str, Any]] = [
        {**plan, "policy": "plain", "budget": None, "peak": 1.0, "step": 1.0, "predicted": 0.0},
        {**plan, "policy": "fastest", "budget": "45%", "peak": 0.45, "step": 1.2, "predicted": 0.003},
    ]
    growth = [[0.0, 0.002, 0.1, 0.01, 0.2], [1.0, 0.008, 0.3, 0.02, 0.4]]
    for seed, (plain, score) in enumerate(zip(PLAIN, changed(0.1, 0.2, 0.3), strict=True)):
        run = {"task": "text", "code": "new", "seed": seed, "drawn": seed / 8}
        made.append({**run, "policy": "plain", "score": plain, "growth": []})
        made.append({**run, "policy": "fastest", "score": score, "growth": growth if seed == 0 else []})
    page = PAGE.page(lines(changed(0, 0, 0)), made)
    cells = "0.003 | 0.002 | 0.008 | 0.3 | 4.0, 2.0 | 3 | +0.20 (-0.05 … +0.45) | yes"
    assert f"| text | 45 % | 45% | 1.20 | {cells} |" in page
    assert page.index("## Plans solved before training") < page.index(
        "## Plans solved with the weights at the end"
    )
