"""Intervals of errors over batches, and what units at few bits add to the sum of errors."""

from __future__ import annotations

import numpy as np
import pytest

from mesa_tune.profiles.intervals import (
    CONFIDENCE,
    SPREAD,
    UNSEEN,
    fitted_interaction,
    interaction_of,
    interval,
)
from tests.builders import known


def covered(scatter: float) -> float:
    """Return how often an interval of five errors that scatter so covers the mean of unseen ones."""
    generator = np.random.default_rng(0)
    count = 0
    for _ in range(2000):
        errors = np.exp(scatter * generator.standard_normal(5 + UNSEEN))
        low, high = known(interval(tuple(errors[:5].tolist())))
        count += low <= errors[5:].mean() <= high
    return count / 2000


def test_intervals_cover_the_mean_of_unseen_batches() -> None:
    assert covered(SPREAD) == pytest.approx(CONFIDENCE, abs=0.03)
    assert covered(SPREAD / 5) > CONFIDENCE
    assert CONFIDENCE - 0.08 < covered(1.6 * SPREAD) < CONFIDENCE


def test_batches_that_move_together_do_not_average_out_over_layers() -> None:
    layer = (1e-3, 2e-3, 4e-3)
    low, high = known(interval(layer))
    assert interval(tuple(100 * error for error in layer)) == pytest.approx((100 * low, 100 * high))


def test_intervals_of_no_error_and_of_one_batch() -> None:
    assert interval((0.0, 0.0)) == (0.0, 0.0)
    assert interval((1e-3,)) is None
    assert interval(()) is None


def test_doubt_widens() -> None:
    narrow, wide = (known(interval((1.0, 1.1, 0.9), doubt=doubt)) for doubt in (0.0, 0.2))
    assert wide[0] < narrow[0] < narrow[1] < wide[1]


def test_interaction_is_between_units_at_few_bits() -> None:
    assert interaction_of([]) == 0
    assert interaction_of([1.0]) == interaction_of([1.0, 0.0, 0.0]) == 0
    assert interaction_of([0.1 * 1.0, 0.1 * 4.0]) == pytest.approx(2 * 0.1 * 2)
    assert interaction_of([1.0] * 20) > 5 * interaction_of([1.0] * 8)


def test_a_fitted_interaction_gives_the_error_back() -> None:
    errors = [1e-3, 4e-3, 2e-3]
    factor = fitted_interaction(errors, 0.01)
    weights = [factor * error for error in errors]
    assert sum(errors) + interaction_of(weights) == pytest.approx(0.01)
    assert fitted_interaction(errors, 0.006) == 0  # below the sum: no interaction shows
    assert fitted_interaction([1e-3], 0.01) == 0
