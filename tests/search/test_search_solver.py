"""The decisions of a plan and their exact solution, against brute force."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy.optimize

from mesa_tune.errors import PolicyError, RunError
from mesa_tune.policy.settings import EXACT, LayerSettings
from mesa_tune.profiles.profile import Profile
from mesa_tune.profiles.timeline.memory_model import SavedSpan
from mesa_tune.search.solver import Program
from mesa_tune.search.space import Limits, Space, make_space
from tests.builders import known
from tests.search.random_spaces import consistent
from tests.synthetic import COARSE, deriving, is_sorted, synthetic_profile


@pytest.fixture(scope="module", name="profile")
def _profile() -> Profile:
    return synthetic_profile(1, grid=COARSE, seed=3)


@pytest.fixture(scope="module", name="space")
def _space(profile: Profile) -> Space:
    return make_space(profile)


def test_sharers_are_one_unit_and_a_mask_keeper_is_its_own(space: Space) -> None:
    units = [unit.layers for unit in space.units]
    assert ("blocks.0.q", "blocks.0.k", "blocks.0.v") in units
    assert ("blocks.0.relu",) in units
    assert [tuple(space.units[unit].layers[0] for unit in link.units) for link in space.links] == [
        ("blocks.0.relu", "blocks.0.fc2")
    ]


def test_sharers_are_tied_by_the_timeline_alone(profile: Profile) -> None:
    units = make_space(replace(profile, ties=())).units
    assert ("blocks.0.q", "blocks.0.k", "blocks.0.v") in [unit.layers for unit in units]


@pytest.mark.parametrize("batch_size", [8, 5, 21])
@pytest.mark.parametrize("derives", [False, True], ids=["stores", "derives"])
def test_the_space_adds_up_to_the_timeline(profile: Profile, derives: bool, batch_size: int) -> None:
    profile = deriving(profile, 3.0) if derives else profile
    space = make_space(profile, batch_size)
    assert bool(space.clusters) is derives
    for chosen in list(consistent(space))[::37]:
        assignment = space.assignment(chosen)
        assert space.live(chosen).tolist() == profile.timeline.live(assignment, batch_size).tolist()
        predicted = profile.predict_assignment(assignment, batch_size=batch_size)
        assert space.saved(chosen) == predicted.saved_bytes
        assert space.noise(chosen) == pytest.approx(profile.noise_ratio(assignment))
        assert space.ms(chosen) == pytest.approx(predicted.step_ms)


def test_a_storage_of_compressed_layers_is_paid_while_one_compresses(profile: Profile) -> None:
    """Two attentions save one mask: what it costs is no part of the price of either alone."""
    timeline = profile.timeline
    last = len(timeline.slots) - 2
    mask = SavedSpan("side", ("blocks.0.relu", "blocks.0.fc2", "blocks.0.norm"), (9000, 4500), 1, 0, last)
    masked = replace(profile, timeline=replace(timeline, kept=(*timeline.kept, mask)))
    program = Program(make_space(masked))
    space = program.space
    assert [link.saved for link in space.links if not link.exact] == [9000]
    plans = list(consistent(space))
    for chosen in plans[::37]:
        assert space.saved(chosen) == masked.timeline.saved_bytes(space.assignment(chosen))
        assert space.live(chosen).tolist() == masked.timeline.live(space.assignment(chosen)).tolist()
    for limit in (0.97, 0.8, 0.5):
        saved = int(limit * profile.saved_bytes)
        within = [space.noise(chosen) for chosen in plans if space.saved(chosen) <= saved]
        assert known(program.solve(Limits(saved=saved))).cost == pytest.approx(min(within))


def test_dropped_choices_never_matter(profile: Profile) -> None:
    """Every full assignment is matched or beaten by one of the choices that are left."""
    unit = next(unit for unit in make_space(profile).units if unit.tag == "layernorm")
    for option in profile.layer(unit.layers[0]).options:
        ratio = option.noise_ratio
        assert any(choice.noise <= (ratio or 0) and choice.saved <= option.bytes for choice in unit.choices)


def test_a_layer_with_nothing_to_win_stays_exact(space: Space) -> None:
    unit = next(unit for unit in space.units if unit.layers == ("head",))
    assert [choice.settings for choice in unit.choices] == [EXACT]


def limits_between(space: Space, peaks: Sequence[int], saved: Sequence[int]) -> Iterator[Limits]:
    for place, peak in enumerate(np.linspace(peaks[0], peaks[-1], 12, dtype=int)):
        yield Limits(
            int(peak),
            saved[len(saved) // 3] if place % 2 else None,
            space.base_ms + 0.12 if place % 3 == 2 else None,
        )


@pytest.mark.parametrize(
    ("seed", "factor"), [(3, None), (4, None), (5, None), (4, 0.5), (4, 3.0), (4, 100.0)], ids=str
)
def test_solutions_are_those_of_brute_force(seed: int, factor: float | None) -> None:
    """Of a profile in which nothing derives, and where it does, with `factor` times the error."""
    profile = synthetic_profile(1, grid=COARSE, seed=seed)
    space = make_space(profile if factor is None else deriving(profile, factor))
    program = Program(space)
    lowest = known(program.smallest_peak(Limits()))
    plans = list(consistent(space))
    peaks = sorted(int(space.live(chosen).max()) for chosen in plans)
    saved = sorted(map(space.saved, plans))
    assert (lowest.cost, program.smallest_saved()) == (peaks[0], saved[0])
    assert lowest.bound == pytest.approx(lowest.cost)
    compared = 0
    for limits in limits_between(space, peaks, saved):
        errors = [space.noise(chosen) for chosen in plans if limits.allow(space, chosen)]
        solved = program.solve(limits)
        assert (solved is None) is (not errors)
        if solved is None:
            continue
        assert space.is_consistent(solved.chosen)
        assert limits.allow(space, solved.chosen)
        assert solved.cost == pytest.approx(min(errors), rel=1e-6)
        assert solved.cost == pytest.approx(space.noise(solved.chosen))
        assert solved.bound <= solved.cost
        assert solved.gap <= 1e-5
        compared += 1
    assert compared >= 6


def test_minima_are_reached_and_nothing_below_them(space: Space) -> None:
    program = Program(space)
    lowest = int(known(program.smallest_peak(Limits())).cost)
    assert program.solve(Limits(lowest)) is not None
    assert program.solve(Limits(lowest - 1)) is None
    assert program.solve(Limits(saved=0)) is None
    saved = program.smallest_saved() + 1000
    inside = [chosen for chosen in consistent(space) if space.saved(chosen) <= saved]
    bounded = known(program.smallest_peak(Limits(saved=saved)))
    assert bounded.cost == min(int(space.live(chosen).max()) for chosen in inside)


def test_every_slot_of_a_large_step_keeps_the_budget() -> None:
    profile = synthetic_profile(8)
    program = Program(make_space(profile))
    lowest = known(program.smallest_peak(Limits())).cost
    costs = []
    for part in (0.1, 0.4, 0.7):
        budget = int(lowest + part * (profile.peak_bytes - lowest))
        solved = known(program.solve(Limits(budget)))
        assert profile.timeline.live(program.space.assignment(solved.chosen)).max() <= budget
        assert solved.bound <= solved.cost
        assert solved.gap < 1e-4
        costs.append(-solved.cost)
    assert is_sorted(costs)


def test_errors_of_any_scale_give_the_same_plan(profile: Profile, space: Space) -> None:
    program = Program(space)
    limits = Limits((profile.peak_bytes * 6) // 10)
    tiny = known(program.solve(limits, price=1e-9))
    assert tiny.chosen == known(program.solve(limits)).chosen


def test_only_allowed_choices_are_taken(profile: Profile, space: Space) -> None:
    program = Program(space)
    allowed = np.concatenate([np.arange(len(unit.choices)) == 0 for unit in space.units])
    solved = known(program.solve(Limits(profile.peak_bytes), allowed=allowed))
    assert set(solved.chosen) == {0}


def test_the_solver_prints_nothing(
    profile: Profile, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    milp = scipy.optimize.milp

    def talking(*args: Any, **kwargs: Any) -> Any:
        os.write(1, b"HiGHS has something to say\n")
        os.write(2, b"an error\n")
        return milp(*args, **kwargs)

    monkeypatch.setattr(scipy.optimize, "milp", talking)
    assert Program(make_space(profile)).solve(Limits(profile.peak_bytes)) is not None
    os.write(1, b"back")
    printed = capfd.readouterr()
    assert printed.out == "back"
    assert "an error" in printed.err


def test_without_limits_everything_is_exact_at_the_first_attempt(
    space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    milp, calls = scipy.optimize.milp, []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return milp(*args, **kwargs)

    monkeypatch.setattr(scipy.optimize, "milp", counted)
    assert known(Program(space).solve(Limits())).cost == 0
    assert len(calls) == 2  # in fractions, then whole


def test_limits_that_the_solver_exceeds_are_tightened_alike() -> None:
    limits = Limits(peak=1000, saved=2000, ms=10.0)
    assert limits.tighter(0.1) == Limits(900, 1800, 9.0)
    assert Limits().tighter(0.1) == Limits()


def test_pins_bind_by_glob_and_later_ones_win(profile: Profile) -> None:
    four, two = LayerSettings(level=16), LayerSettings(level=4)
    space = make_space(profile, pins={"blocks.*": four, "blocks.0.norm": two, "sin.0": EXACT})
    chosen = {unit.layers[0]: [choice.settings for choice in unit.choices] for unit in space.units}
    assert chosen["blocks.0.q"] == [four]
    assert chosen["blocks.0.norm"] == [two]
    assert chosen["sin.0"] == [EXACT]
    assert len(chosen["loss.cross_entropy.0"]) > 1


def test_a_pin_that_no_layer_has_is_refused(profile: Profile) -> None:
    with pytest.raises(PolicyError, match=r"blocks\.0\.nrm.*\n.*'blocks\.0\.norm'"):
        make_space(profile, pins={"blocks.0.nrm": EXACT})


def test_a_profile_without_errors_cannot_be_planned_from(profile: Profile) -> None:
    with pytest.raises(RunError, match="no gradient errors"):
        make_space(synthetic_profile(known=False))
    with pytest.raises(RunError, match="partial"):
        make_space(replace(profile, partial=True))
