"""Plans whose own step is traced: it takes what is promised, also where the profile says too little."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

import mesa_tune as mt
from mesa_tune.errors import BudgetError
from mesa_tune.measure.fake_steps import PolicyTracer
from mesa_tune.profiles.timeline.memory_model import Slot, Timeline
from mesa_tune.search import search_policy
from mesa_tune.search.again import traced
from mesa_tune.search.api import solve
from mesa_tune.search.frontier import pareto
from mesa_tune.search.objectives import to_same_result
from tests.builders import known, language_workload, next_word, workload
from tests.synthetic import is_sorted

OPTIONS = [mt.LayerSettings(level=level) for level in (4, 16, 256)]


def of_a_file(work: mt.Workload) -> mt.Workload:
    """The workload as if it were read from a file: its functions make models and batches anew."""
    return replace(work, path=Path("model.py"))


@pytest.fixture(scope="module", name="profile")
def _profile() -> mt.Profile:
    return mt.profile(language_workload(), options=OPTIONS, seeds=1)


def understated(profile: mt.Profile, share: float) -> mt.Profile:
    """A profile that leaves out a share of the plain peak in the slots of layers that compress."""
    missing = int(share * profile.peak_bytes)

    def less(slot: Slot) -> Slot:
        exact, *others = slot.once.live
        live = (exact, *((large - missing, small) for large, small in others))
        return slot if slot.layer is None else replace(slot, once=replace(slot.once, live=live))

    timeline: Timeline = replace(profile.timeline, slots=tuple(map(less, profile.timeline.slots)))
    return replace(profile, timeline=timeline)


def test_the_promise_is_the_traced_step(profile: mt.Profile) -> None:
    work = of_a_file(language_workload())
    plan = search_policy(profile, "85%", trials=0, workload=work)
    real = mt.estimate(work, plan.policy)
    predicted = plan.predicted
    assert (predicted.peak_bytes, predicted.saved_bytes) == (real.peak_bytes, real.saved_bytes)
    assert predicted.peak_bytes <= (plan.budget_bytes or 0)
    assert predicted.peak is not None
    assert sum(predicted.peak.bytes.values()) == predicted.peak_bytes


def test_other_budgets_are_solved_and_traced_as_long_as_there_is_time(
    profile: mt.Profile, tmp_path: Path
) -> None:
    profile = replace(profile, overlap_ms=0.0)  # the prediction is then the sum that is solved
    work = of_a_file(language_workload())
    asked: dict[str, Any] = dict.fromkeys(
        ("batch_size", "max_saved", "max_slowdown", "pins", "forbid", "only")
    )
    asked |= {"max_batch": False, "max_noise_ratio": 0.5, "objective": "time", "seed": 0}
    solved = solve(profile, "85%", **asked).traced(work)
    plan = solved.with_frontier(solved.plan, math.inf)
    assert len(plan.frontier) >= 3
    assert all(point.traced for point in plan.frontier)
    assert is_sorted([point.budget_bytes for point in plan.frontier])
    pairs = [(known(point.step_ms), known(point.gradient_noise_ratio)) for point in plan.frontier]
    times = [to_same_result(*pair) for pair in pairs]
    # Solved to 1 %, by sums that are not quite what is predicted.
    assert all(after <= 1.05 * before for before, after in pairwise(times))
    lowest, tightest = plan.frontier[0], plan.frontier[1]
    same = search_policy(profile, tightest.budget_bytes, max_noise_ratio=0.5, objective="time", trials=0)
    best = known(same.predicted.step_ms), known(same.predicted.gradient_noise_ratio)
    assert times[1] == pytest.approx(to_same_result(*best), rel=0.05)
    assert lowest.peak_bytes < plan.baseline.peak_bytes
    plan.save(tmp_path / "plan.json")
    assert mt.Plan.load(tmp_path / "plan.json").frontier == plan.frontier
    drawn = pareto(profile, objectives=["time"], known=plan.frontier)
    rows = drawn[drawn["kind"] == "time"]
    assert rows["traced"].all()
    assert rows["peak_bytes"].tolist() == [point.peak_bytes for point in plan.frontier]
    assert not drawn[drawn["kind"] != "time"]["traced"].any()
    assert solved.with_frontier(solved.plan, 0.0).frontier == ()


def test_a_plan_that_does_not_fit_is_solved_again(profile: mt.Profile) -> None:
    wrong, work = understated(profile, 0.1), of_a_file(language_workload())
    solved = search_policy(wrong, "76%", trials=0)
    assert mt.estimate(work, solved.policy).peak_bytes > (solved.budget_bytes or 0)
    plan = search_policy(wrong, "76%", trials=0, workload=work)
    real = mt.estimate(work, plan.policy)
    assert plan.predicted.peak_bytes == real.peak_bytes <= (plan.budget_bytes or 0)
    assert plan.predicted.peak is not None
    assert sum(plan.predicted.peak.bytes.values()) == real.peak_bytes


def test_a_budget_that_no_traced_step_fits_is_refused(profile: mt.Profile) -> None:
    wrong = understated(profile, 0.3)
    least = search_policy(wrong, objective="memory", max_noise_ratio=np.inf, max_slowdown=9.0, trials=0)
    with pytest.raises(BudgetError, match="no plan was found whose traced step fits\nthe smallest one found"):
        search_policy(
            wrong,
            int(1.01 * least.predicted.peak_bytes),
            max_noise_ratio=np.inf,
            trials=0,
            workload=of_a_file(language_workload()),
        )


def test_differences_go_to_the_choice_of_the_layer_there(profile: mt.Profile) -> None:
    from mesa_tune.search.space import make_space, policy_at

    wrong = understated(profile, 0.1)
    space = make_space(wrong, wrong.batch_size, {})
    packs = [
        [
            number
            for number, choice in enumerate(unit.choices)
            if not (choice.settings.exact or choice.derived)
        ]
        for unit in space.units
    ]
    chosen = tuple(numbers[0] if numbers else 0 for numbers in packs) + tuple(-1 for _ in space.modules)
    tracer = PolicyTracer(of_a_file(language_workload()), wrong.batch_size, profile.peak_bytes)
    step = tracer.trace(policy_at(wrong, space, chosen))
    assert step is not None
    known = traced.corrected(space, chosen, step, wrong)
    assert int(space.live(chosen).max()) < step.peak
    assert int(known.live(chosen).max()) == pytest.approx(step.peak, rel=1e-3)
    # Other choices of these layers are as they were.
    assert all(
        after.choices[0] is before.choices[0]
        for before, after, n in zip(space.units, known.units, chosen, strict=False)
        if n
    )


def test_where_fake_steps_are_no_real_ones_a_real_one_is_traced(profile: mt.Profile) -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        value = next_word(model, batch)
        return value if value.item() > 0 else value * 2

    sample = language_workload()
    branching = workload(sample.model, sample.batch, loss, batch_size=sample.batch_size)
    for work in (sample, of_a_file(branching)):  # the first is of a running script
        plan = search_policy(profile, "85%", trials=0, workload=work)
        assert plan.predicted.saved_bytes == mt.estimate(sample, plan.policy).saved_bytes
        assert plan.predicted.peak_bytes == mt.estimate(sample, plan.policy).peak_bytes
    work = of_a_file(branching)
    tracer = PolicyTracer(work, 2 * profile.batch_size, profile.peak_bytes, fits=profile.batch_size)
    assert tracer.trace(mt.Policy(())) is None, "a step of that batch may not fit"
    # Its plain step differs from the profile's.
    assert PolicyTracer(of_a_file(sample), 8, 10 * profile.peak_bytes).trace(mt.Policy(())) is None
