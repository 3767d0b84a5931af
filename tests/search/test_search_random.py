"""180 random problems: links, clusters, modules inside modules, interacting noise; against every plan."""

from __future__ import annotations

import numpy as np
import pytest

from mesa_tune.search.linear.highs import Deadline
from mesa_tune.search.problem import Limits, Space
from mesa_tune.search.solver import Program
from tests.builders import known
from tests.search.random_spaces import Plans, all_plans, random_space

GROUPS, EACH = 20, 3
UNITS, OPTIONS = 8, 5


def limits_of(chance: np.random.Generator, plans: Plans, *names: str) -> Limits:
    """Each named limit at a random plan's value, or slightly below or above."""
    row = plans.chosen.shape[0]
    values = {}
    for name in names:
        sorted_values = np.sort(getattr(plans, name))
        value = float(sorted_values[int(row * chance.uniform(0.02, 0.9))])
        values[name] = int(value) if name in ("peak", "saved") else value * float(chance.uniform(0.97, 1.03))
    return Limits(**values)  # type: ignore[arg-type]


def problem(seed: int) -> tuple[np.random.Generator, Space, Plans]:
    chance = np.random.default_rng(seed)
    space = random_space(chance, UNITS, OPTIONS)
    return chance, space, all_plans(space)


def seeds(group: int) -> range:
    return range(group * EACH, (group + 1) * EACH)


@pytest.mark.parametrize("group", range(GROUPS))
def test_the_fastest_within_all_limits(group: int) -> None:
    for seed in seeds(group):
        chance, space, plans = problem(seed)
        limits = limits_of(
            chance, plans, "peak", "noise", *(["saved", "ms", "bias", "worst"] if seed % 3 == 0 else [])
        )
        inside = plans.within(limits)
        program = Program(space)
        price = float(chance.choice([0.0, 1.0, 100.0]))
        solved = program.solve(limits, program.times, price=price)
        assert (solved is None) is (not inside.any())
        if solved is not None:
            assert limits.allow(space, solved.chosen)
            assert space.is_consistent(solved.chosen)
            least = plans.priced(price)[inside].min()
            assert solved.cost == pytest.approx(least, rel=1e-5, abs=1e-5)
            assert solved.bound <= least * (1 + 1e-9) + 1e-12
            fastest = program.least(limits, program.times, Deadline())
            assert known(fastest) <= plans.time[inside].min() * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize("group", range(GROUPS))
def test_the_least_error_within_bytes(group: int) -> None:
    for seed in seeds(group + GROUPS):
        chance, space, plans = problem(seed)
        limits = limits_of(chance, plans, "peak", *(["saved"] if seed % 2 else []))
        inside = plans.within(limits)
        solved = Program(space).solve(limits)
        assert (solved is None) is (not inside.any())
        if solved is not None:
            assert limits.allow(space, solved.chosen)
            assert solved.cost == pytest.approx(plans.priced(1.0, 0.0)[inside].min(), rel=1e-5)
            assert solved.bound <= plans.priced(1.0, 0.0)[inside].min() * (1 + 1e-9)


@pytest.mark.parametrize("group", range(GROUPS))
def test_the_lowest_peak_within_noise_and_time(group: int) -> None:
    for seed in seeds(group + 2 * GROUPS):
        chance, space, plans = problem(seed)
        limits = limits_of(chance, plans, "noise", "ms")
        inside = plans.within(limits)
        lowest = Program(space).smallest_peak(limits)
        assert (lowest is None) is (not inside.any())
        if lowest is not None:
            assert limits.allow(space, lowest.chosen)
            assert lowest.cost == plans.peak[inside].min()
            assert lowest.bound <= lowest.cost
        assert Program(space).smallest_saved() == plans.saved.min()


def test_costs_of_a_space_are_those_of_the_enumeration() -> None:
    for seed in range(1000, 1030):
        chance, space, plans = problem(seed)
        for row in chance.integers(0, len(plans.chosen), 20):
            chosen = tuple(plans.chosen[row].tolist())
            assert space.is_consistent(chosen)
            assert int(space.live(chosen).max()) == plans.peak[row]
            assert space.saved(chosen) == plans.saved[row]
            assert space.worst(chosen) == pytest.approx(plans.worst[row])
            assert space.ms(chosen) == pytest.approx(plans.ms[row])
            assert space.noise(chosen) == pytest.approx(plans.noise[row])


def test_the_problems_have_all_that_a_space_can_have() -> None:
    spaces = [problem(seed)[1] for seed in range(100)]
    assert sum(bool(space.modules) for space in spaces) > 20
    assert sum(bool(space.clusters) for space in spaces) > 20
    assert sum(bool(space.links) for space in spaces) > 50
    assert any(choice.links for space in spaces for module in space.modules for choice in module.choices)
    assert max(len(space.units) for space in spaces) == UNITS
