"""Of plans that err equally, the one that keeps the fewest bytes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mesa_tune.search.linear.polish import polished
from mesa_tune.search.solver import Program
from mesa_tune.search.space import Floats, Limits, Space, make_space
from tests.builders import known
from tests.synthetic import COARSE, synthetic_profile

LOSS = "loss.cross_entropy.0"


@pytest.fixture(scope="module", name="space")
def _space() -> Space:
    """With a loss that errs in no setting and keeps the tensor that another layer keeps as well."""
    profile = synthetic_profile(1, grid=COARSE, seed=3)
    loss = profile.layer(LOSS)
    right = replace(
        loss, options=tuple(replace(option, gradient_error=0.0, ratios=(0.0,)) for option in loss.options)
    )
    layers = tuple(right if layer is loss else layer for layer in profile.layers)
    (own,) = (item for item in profile.timeline.kept if item.kind == "plain" and LOSS in item.layers)
    shared = replace(own, layers=("sin.0", *own.layers))
    kept = tuple(shared if item is own else item for item in profile.timeline.kept)
    return make_space(replace(profile, layers=layers, timeline=replace(profile.timeline, kept=kept)))


def positions(space: Space, **wanted: bool) -> list[int]:
    """A choice a unit: exact where `wanted` says so, the finest compressed one elsewhere."""
    chosen = []
    for unit in space.units:
        exact = wanted.get(unit.tag, False) or len(unit.choices) == 1
        chosen.append(next(n for n, choice in enumerate(unit.choices) if choice.settings.exact == exact))
    return chosen


def costs(space: Space) -> Floats:
    return np.array([choice.noise for unit in space.units for choice in unit.choices])


def test_no_second_copy_of_what_is_kept_exactly_anyway(space: Space) -> None:
    chosen = positions(space, other=True)
    number = next(n for n, unit in enumerate(space.units) if LOSS in unit.layers)
    assert not space.units[number].choices[chosen[number]].settings.exact
    everything = np.ones(len(costs(space)), dtype=bool)
    found = polished(space, Limits(), chosen, costs(space), everything)
    assert space.units[number].choices[found[number]].settings.exact
    assert space.saved(found) < space.saved(chosen)
    assert space.noise(found) <= space.noise(chosen)


def test_a_copy_that_frees_the_tensor_is_worth_it(space: Space) -> None:
    chosen = positions(space)
    everything = np.ones(len(costs(space)), dtype=bool)
    assert list(polished(space, Limits(), chosen, costs(space), everything)) == chosen


def test_only_what_is_allowed_and_within_the_limits(space: Space) -> None:
    chosen = positions(space, other=True)
    here = np.concatenate(
        [np.arange(len(unit.choices)) == place for unit, place in zip(space.units, chosen, strict=True)]
    )
    assert list(polished(space, Limits(), chosen, costs(space), here)) == chosen
    everything = np.ones(len(costs(space)), dtype=bool)
    slow = Limits(ms=space.ms(chosen) - 1e9)
    assert list(polished(space, slow, chosen, costs(space), everything)) == chosen


def test_solutions_cannot_be_polished_further(space: Space) -> None:
    program = Program(space)
    peaks = np.linspace(int(program.smallest_peak(Limits()).cost), int(program.rows.plain_live.max()), 9)  # type: ignore[union-attr]
    for peak in peaks:
        limits = Limits(int(peak))
        solved = known(program.solve(limits))
        everything = np.ones(len(program.noise), dtype=bool)
        assert polished(space, limits, solved.chosen, program.noise, everything) == solved.chosen
