"""Amplifications that are measured on some batches, and inferred on the others."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

import mesa_tune as mt
from mesa_tune.profiler.entries import kind
from mesa_tune.profiler.errors.amplification import EVERY, Amplifications, is_measured, rows_from

FOUR = kind(mt.LayerSettings(level=16)), False
ONE = kind(mt.LayerSettings(level=2)), True


def test_inferred_is_the_mean_of_earlier_batches() -> None:
    known = Amplifications()
    assert known.inferred(2, ["a"]) == {}
    known.add(0, {("a", FOUR): 1.0})
    known.add(1, {("a", FOUR): 3.0, ("a", ONE): 5.0, ("b", FOUR): 7.0})
    assert known.inferred(2, ["a"]) == {("a", FOUR): 2.0, ("a", ONE): 5.0}
    assert known.inferred(1, ["b"]) == {}
    assert known.at(1) == {("a", FOUR): 3.0, ("a", ONE): 5.0, ("b", FOUR): 7.0}


def test_measured_layers_show_what_is_common_to_a_batch() -> None:
    known, layers = Amplifications(), [f"layer{number}" for number in range(400)]
    known.add(1, {(layer, FOUR): float(1 + number) for number, layer in enumerate(layers)})
    known.add(2, {key: 3 * values[1] for key, values in list(known.measured.items())[::2]})
    assert known.inferred(2, layers[1:2])[layers[1], FOUR] == pytest.approx(6.0, rel=0.02)
    few = Amplifications()
    few.add(1, {("a", FOUR): 1.0, ("b", FOUR): 1.0})
    few.add(2, {("a", FOUR): 3.0})
    assert few.inferred(2, ["b"])["b", FOUR] == pytest.approx(7 / 5)
    assert few.inferred(3, ["b"])["b", FOUR] == 1.0


def test_those_of_one_bit_can_be_inferred_alone() -> None:
    known = Amplifications()
    known.add(1, {("a", FOUR): 3.0, ("a", ONE): 5.0})
    assert known.inferred(2, ["a"], one_bit_only=True) == {("a", ONE): 5.0}
    assert known.inferred(1, ["a"], one_bit_only=True) == {}


def test_rows_are_plain_values() -> None:
    known = Amplifications()
    known.add(1, {("a", FOUR): 3.0, ("a", ONE): 5.0})
    known.add(4, {("a", FOUR): 2.0})
    again = Amplifications(rows_from(json.loads(json.dumps(known.rows))))
    assert again.measured == known.measured


@pytest.mark.parametrize("group", range(5))
def test_each_group_is_measured_in_turn(group: int) -> None:
    batches = [batch for batch in range(7) if is_measured(batch, group)]
    assert batches[0] == 0
    assert all(later - earlier <= EVERY for earlier, later in pairwise(batches))
    assert len({is_measured(6, other) for other in range(EVERY)}) == 2
