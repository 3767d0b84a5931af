"""Amplifications that are measured on some batches, and inferred on the others."""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np
import pytest

import mesa_tune as mt
from mesa_tune.profiler.entries import kind
from mesa_tune.profiler.errors.amplification import LAYERS, Amplifications, Amplified, is_measured, rows_from
from mesa_tune.profiler.errors.recorded import Floats

FOUR = kind(mt.LayerSettings(level=16)), False
ONE = kind(mt.LayerSettings(level=2)), True
OF_ERROR = 10.0
"""How much larger amplifications of errors relative to the gradient are than those beside own noise, here."""


def pairs(values: Mapping[Amplified, float]) -> dict[Amplified, Floats]:
    """Amplifications of both errors, from those beside own noise."""
    return {key: np.array([OF_ERROR * value, value]) for key, value in values.items()}


def ratios(found: Mapping[Amplified, Floats]) -> dict[Amplified, float]:
    """The amplifications beside own noise; those of the other error are in proportion."""
    for pair in found.values():
        assert pair[0] == pytest.approx(OF_ERROR * pair[1])
    return {key: float(pair[1]) for key, pair in found.items()}


def test_inferred_is_the_mean_of_earlier_batches() -> None:
    known = Amplifications()
    assert ratios(known.inferred(2, ["a"])) == {}
    known.add(0, pairs({("a", FOUR): 1.0}))
    known.add(1, pairs({("a", FOUR): 3.0, ("a", ONE): 5.0, ("b", FOUR): 7.0}))
    assert ratios(known.inferred(2, ["a"])) == {("a", FOUR): 2.0, ("a", ONE): 5.0}
    assert ratios(known.inferred(1, ["b"])) == {}
    assert ratios(known.at(1)) == {("a", FOUR): 3.0, ("a", ONE): 5.0, ("b", FOUR): 7.0}


def test_measured_layers_show_what_is_common_to_a_batch() -> None:
    known, layers = Amplifications(), [f"layer{number}" for number in range(400)]
    known.add(1, pairs({(layer, FOUR): float(1 + number) for number, layer in enumerate(layers)}))
    known.add(2, {key: 3 * values[1] for key, values in list(known.measured.items())[::2]})
    assert ratios(known.inferred(2, layers[1:2]))[layers[1], FOUR] == pytest.approx(6.0, rel=0.02)
    few = Amplifications()
    few.add(1, pairs({("a", FOUR): 1.0, ("b", FOUR): 1.0}))
    few.add(2, pairs({("a", FOUR): 3.0}))
    assert ratios(few.inferred(2, ["b"]))["b", FOUR] == pytest.approx(7 / 5)
    assert ratios(few.inferred(3, ["b"]))["b", FOUR] == 1.0


def test_where_they_are_measured_those_of_one_bit_are_inferred_alone() -> None:
    known = Amplifications()
    known.add(1, pairs({("a", FOUR): 3.0, ("a", ONE): 5.0, ("b", FOUR): 7.0}))
    assert ratios(known.inferred(2, ["a", "b"], due=True)) == {("a", ONE): 5.0}
    assert ratios(known.inferred(1, ["a"], due=True)) == {}


def test_those_of_one_bit_follow_others_where_they_are_not_measured() -> None:
    known = Amplifications()
    known.add(0, pairs({(f"layer{number}", FOUR): float(1 + number) for number in range(500)}))
    known.add(1, pairs({(f"layer{number}", FOUR): float(1 + number) for number in range(400)}))
    assert ratios(known.inferred(2, ["layer450"]))["layer450", ONE] == 451.0
    known.add(1, pairs({(f"layer{number}", ONE): 2 * float(1 + number) for number in range(400)}))
    assert ratios(known.inferred(2, ["layer450"]))["layer450", ONE] == pytest.approx(902.0, rel=0.01)
    assert ratios(known.inferred(2, ["layer399"]))["layer399", ONE] == pytest.approx(800.0)
    assert ratios(known.at(1))["layer399", ONE] == 800.0


def test_rows_are_plain_values() -> None:
    known = Amplifications()
    known.add(1, pairs({("a", FOUR): 3.0, ("a", ONE): 5.0}))
    known.add(4, pairs({("a", FOUR): 2.0}))
    again = Amplifications(rows_from(json.loads(json.dumps(known.rows))))
    assert again.rows == known.rows
    assert ratios(again.at(1)) == ratios(known.at(1)) == {("a", FOUR): 3.0, ("a", ONE): 5.0}


@pytest.mark.parametrize("count", [1, 8, 15, 99, 300])
def test_later_batches_measure_few_groups_in_turn(count: int) -> None:
    assert all(is_measured(0, group, count) for group in range(count))
    measured = [[each for each in range(count) if is_measured(batch, each, count)] for batch in range(1, 80)]
    assert all(min(count, LAYERS) <= len(groups) < 2 * LAYERS for groups in measured)
    assert {group for groups in measured for group in groups} == set(range(count))
