"""Amplifications that are measured on some batches, and inferred on the others."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

import mesa_tune as mt
from mesa_tune.measure import profiling
from mesa_tune.measure.errors.amplification import LAYERS, Amplifications, Amplified, is_measured
from mesa_tune.measure.errors.sliced_noise import noise_of_steps
from mesa_tune.profiles.entries import kind
from mesa_tune.profiles.own_noise import Floats, rows_from
from tests.builders import known, workload

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
    seen = Amplifications()
    assert ratios(seen.inferred(2, ["a"])) == {}
    seen.add(0, pairs({("a", FOUR): 1.0}))
    seen.add(1, pairs({("a", FOUR): 3.0, ("a", ONE): 5.0, ("b", FOUR): 7.0}))
    assert ratios(seen.inferred(2, ["a"])) == {("a", FOUR): 2.0, ("a", ONE): 5.0}
    assert ratios(seen.inferred(1, ["b"])) == {}
    assert ratios(seen.at(1)) == {("a", FOUR): 3.0, ("a", ONE): 5.0, ("b", FOUR): 7.0}


def test_measured_layers_show_what_is_common_to_a_batch() -> None:
    seen, layers = Amplifications(), [f"layer{number}" for number in range(400)]
    seen.add(1, pairs({(layer, FOUR): float(1 + number) for number, layer in enumerate(layers)}))
    seen.add(2, {key: 3 * values[1] for key, values in list(seen.measured.items())[::2]})
    assert ratios(seen.inferred(2, layers[1:2]))[layers[1], FOUR] == pytest.approx(6.0, rel=0.02)
    few = Amplifications()
    few.add(1, pairs({("a", FOUR): 1.0, ("b", FOUR): 1.0}))
    few.add(2, pairs({("a", FOUR): 3.0}))
    assert ratios(few.inferred(2, ["b"]))["b", FOUR] == pytest.approx(7 / 5)
    assert ratios(few.inferred(3, ["b"]))["b", FOUR] == 1.0


def test_where_they_are_measured_those_of_one_bit_are_inferred_alone() -> None:
    seen = Amplifications()
    seen.add(1, pairs({("a", FOUR): 3.0, ("a", ONE): 5.0, ("b", FOUR): 7.0}))
    assert ratios(seen.inferred(2, ["a", "b"], due=True)) == {("a", ONE): 5.0}
    assert ratios(seen.inferred(1, ["a"], due=True)) == {}


def test_those_of_one_bit_follow_others_where_they_are_not_measured() -> None:
    seen = Amplifications()
    seen.add(0, pairs({(f"layer{number}", FOUR): float(1 + number) for number in range(500)}))
    seen.add(1, pairs({(f"layer{number}", FOUR): float(1 + number) for number in range(400)}))
    assert ratios(seen.inferred(2, ["layer450"]))["layer450", ONE] == 451.0
    seen.add(1, pairs({(f"layer{number}", ONE): 2 * float(1 + number) for number in range(400)}))
    assert ratios(seen.inferred(2, ["layer450"]))["layer450", ONE] == pytest.approx(902.0, rel=0.01)
    assert ratios(seen.inferred(2, ["layer399"]))["layer399", ONE] == pytest.approx(800.0)
    assert ratios(seen.at(1))["layer399", ONE] == 800.0


def test_rows_are_plain_values() -> None:
    seen = Amplifications()
    seen.add(1, pairs({("a", FOUR): 3.0, ("a", ONE): 5.0}))
    seen.add(4, pairs({("a", FOUR): 2.0}))
    again = Amplifications(rows_from(json.loads(json.dumps(seen.rows))))
    assert again.rows == seen.rows
    assert ratios(again.at(1)) == ratios(seen.at(1)) == {("a", FOUR): 3.0, ("a", ONE): 5.0}


@pytest.mark.parametrize("count", [1, 8, 15, 99, 300])
def test_later_batches_measure_few_groups_in_turn(count: int) -> None:
    assert all(is_measured(0, group, count) for group in range(count))
    measured = [[each for each in range(count) if is_measured(batch, each, count)] for batch in range(1, 80)]
    assert all(min(count, LAYERS) <= len(groups) < 2 * LAYERS for groups in measured)
    assert {group for groups in measured for group in groups} == set(range(count))


def test_those_of_a_slice_are_those_of_the_batch(
    monkeypatch: pytest.MonkeyPatch, without_variants: None
) -> None:
    """Of all layers whose errors go through others, and of layers that share what they save."""
    work, options = workload(batch_size=64), [mt.LayerSettings(level=16)]
    sliced = mt.profile(work, options=options, seeds=1)
    measured = noise_of_steps
    monkeypatch.setattr(
        profiling, "noise_of_steps", lambda *given, **more: replace(measured(*given, **more), slices=1)
    )
    whole = mt.profile(work, options=options, seeds=1)
    pairs_of_layers = list(zip(sliced.layers, whole.layers, strict=True))
    found = ([known(layer.options[0].noise_ratio) for layer in pair] for pair in pairs_of_layers)
    ratios = [of_slice / of_batch for of_slice, of_batch in found if of_batch]
    # Of eight samples: over six seeds, the standard deviation of the logarithm is 0.16.
    assert 0.5 < min(ratios) < max(ratios) < 2
    assert statistics.median(ratios) == pytest.approx(1.0, rel=0.3)
    assert all(bool(a.shares) == bool(b.shares) for a, b in pairs_of_layers)
    for tie, of_whole in zip(sliced.ties, whole.ties, strict=True):
        assert tie.joint == pytest.approx(of_whole.joint, rel=0.3)
