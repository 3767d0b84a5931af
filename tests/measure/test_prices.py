"""Prices of options: on how many batches, how much of them is bias, what is measured and what unknown."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mesa_tune as mt
from mesa_tune.measure.errors.joint_error import JointError
from mesa_tune.measure.pricing import LayerPrices, candidates
from mesa_tune.policy.settings import EXACT
from mesa_tune.profiles.entries import Option
from mesa_tune.profiles.intervals import DOUBT, interval
from mesa_tune.profiles.price_table import NO_DERIVATIONS, PriceTable
from mesa_tune.profiles.profile import Prediction, Profile
from tests.builders import ViT, known, workload
from tests.step_memory import Composed, without_parts
from tests.synthetic import noisy, synthetic_profile

BATCHES = 3
FOUR = Option(mt.LayerSettings(level=16), 10, 0.1, 0.6, (2.0, 4.0, 8.0), True, 0.0, 0.0)
NEAREST = mt.LayerSettings(level=4, rounding="nearest")
DROP = mt.LayerSettings(level=16, drop=0.5)
CHANNELS = mt.LayerSettings(level=16, group_size=None, quant_groups=2)
SAMPLE = mt.LayerSettings(level=16, allocation="sample")
RUNNING = mt.LayerSettings(level=16, ema_decay=0.9)
GRID = [mt.LayerSettings(level=level, group_size=size) for level in (2, 4, 16) for size in (64, 256)]
OWN = (NEAREST, DROP, CHANNELS, SAMPLE)


def classifying(**options: Any) -> mt.Workload:
    return workload(lambda: ViT(width=32, depth=1), **options)


def branching() -> mt.Workload:
    return workload(branches, rows, batch_size=128)


@pytest.fixture(scope="module", name="full")
def _full() -> Profile:
    with without_parts():
        return mt.profile(classifying(), options=GRID, seeds=BATCHES)


@pytest.fixture(scope="module", name="own")
def _own() -> Profile:
    return mt.profile(branching(), options=[mt.LayerSettings(level=4), *OWN, RUNNING], seeds=2)


def rows(count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 64), torch.randint(10, (count,))


def _uniform(settings: mt.LayerSettings) -> mt.Policy:
    return mt.Policy.uniform(**settings.to_dict())  # type: ignore[arg-type]


def compressed(profile: Profile) -> list[Option]:
    options = (option for layer in profile.layers for option in layer.options)
    return [option for option in options if not option.settings.exact and option.gradient_error]


def test_all_options_are_screened_and_candidates_priced_on_all_batches(full: Profile) -> None:
    counts = {option.batches for option in compressed(full)}
    assert counts == {1, BATCHES}
    for layer in full.layers:
        if layer.options and not layer.shared_with and layer.options[0].gradient_error:
            priced = {option.settings for option in layer.priced}
            assert priced == candidates(layer.options)
            assert layer.priced


def test_derivations_are_priced_on_the_batches_that_make_prices(full: Profile) -> None:
    options = [option for derivation in full.derivations for option in derivation.options]
    assert options
    for option in options:
        assert option.price_ratios == option.ratios
        assert option.batches == BATCHES - 1
    counts = {option.batches for derivation in full.derivations for option in derivation.complete}
    assert counts == {BATCHES - 1}
    document = json.loads(json.dumps(full.to_dict()))
    assert Profile.from_dict(document).derivations == full.derivations


def test_prices_do_not_depend_on_what_was_asked_before() -> None:
    profile, fresh = synthetic_profile(), synthetic_profile
    policies = [mt.Policy.uniform(level=level) for level in range(2, 40, 5)]
    expected = [fresh().predict(policy) for policy in policies]
    assert [profile.predict(policy) for policy in policies] == expected
    assert [profile.predict(policy) for policy in reversed(policies)] == expected[::-1]


def test_a_solver_chooses_among_options_priced_on_all_batches(full: Profile) -> None:
    plan = mt.search_policy(full, full.peak_bytes - 1, max_saved="20%")
    for layer in full.layers:
        settings = plan.policy.settings(layer.tag, layer.index, layer.name)
        neighbours = {option.settings.bits for option in layer.priced}
        assert settings.exact or {settings.bits - 1, settings.bits, settings.bits + 1} & neighbours


def test_options_left_out_follow_the_others() -> None:
    left = Option(mt.LayerSettings(level=16, group_size=64), 12, 0.05, 9.0, (9.0,), False, 0.0, 0.0)
    layer = replace(synthetic_profile().layers[0], options=(FOUR, left))
    like = known(layer.like(left.settings))
    assert like.price_ratios == pytest.approx((2.0, 4.0))
    assert like.gradient_error == pytest.approx(0.3)
    assert layer.like(FOUR.settings) == FOUR


def test_the_batch_that_chooses_is_no_part_of_the_price() -> None:
    assert FOUR.noise_ratio == 6.0
    low, high = known(interval((4.0, 8.0), DOUBT))
    assert known(FOUR.interval) == pytest.approx(
        (0.1 * low, 0.1 * high)
    )  # of the error, 0.6 where 6 is the ratio
    assert replace(FOUR, ratios=(2.0,)).noise_ratio == 2.0
    first, second, third = (
        LayerPrices((replace(FOUR, ratios=(ratio,), gradient_error=error),), (joint,))
        for ratio, error, joint in ((2.0, 5.0, 9.0), (4.0, 0.5, 1.0), (8.0, 0.7, 3.0))
    )
    together = first.extended(second).extended(third)
    assert together == LayerPrices(
        (replace(FOUR, gradient_error=known(together.options[0].gradient_error)),), (2.0,)
    )
    assert together.options[0].gradient_error == pytest.approx(0.6)


def test_errors_add_up_batch_by_batch() -> None:
    profile = synthetic_profile()
    four = mt.LayerSettings(level=16)
    first, second, third = (
        replace(profile.layers[0], name=name, options=(Option(four, 10, 0.1, 0.5, ratios, True, 0.0, 0.0),))
        for name, ratios in (("a", (9.0, 1.0, 2.0)), ("b", (9.0, 3.0, 5.0)), ("c", (0.0,)))
    )
    table = PriceTable((first, second, third), (), (), hooked=(), exact=(), interaction={})
    assert table.cost((first, second, third), dict.fromkeys("abc", four), NO_DERIVATIONS).ratios == (4.0, 7.0)
    assert table.cost((third,), {"c": four}, NO_DERIVATIONS).ratios == (0.0, 0.0)
    assert table.cost((first,), {}, NO_DERIVATIONS).ratios == (0.0, 0.0)


def test_times_meet_what_all_layers_added_and_what_half_of_them_added() -> None:
    """All four add 8 ms, each half 5 ms: so a layer is priced at 2 ms, and the halves overlap by 2 ms."""
    four = mt.LayerSettings(level=16)
    options = (Option(four, 10, 0.1, 0.5, (1.0, 2.0), True, 0.0, 0.0),)
    layer = replace(synthetic_profile().layers[0], call_ms=2.0, options=options)
    layers = [replace(layer, name=name) for name in "abcd"]
    table = PriceTable(layers, (), (), hooked=(), exact=(), interaction={}, overlap_ms=2.0)

    def added(names: str) -> float | None:
        return table.cost(None, dict.fromkeys(names, four), NO_DERIVATIONS).ms

    half = 4.0 + (1 - math.exp(-10.0))  # the rise at the first layers is over, but for 5e-5 ms
    assert [added(names) for names in ("", "ab", "abcd")] == pytest.approx([0.0, half, 8.0])
    assert added("a") == pytest.approx(2.0 + 1.5 * (1 - math.exp(-5.0)))  # the first adds more than others
    assert table.cost(layers[:1], {"a": four}, NO_DERIVATIONS).ms == pytest.approx(2.0)


def test_candidates_are_on_the_hull() -> None:
    def option(bits: int, group_size: int, bytes_: int, error: float) -> Option:
        settings = mt.LayerSettings(level=2**bits, group_size=group_size)
        return Option(settings, bytes_, error, error, (error,), True, 0.0, 0.0)

    options = [
        option(1, 1024, 10, 1.0),
        option(1, 64, 20, 0.5),  # as large as 2 bits, and worse
        option(2, 1024, 20, 0.1),
        option(3, 64, 35, 0.09),  # on no chord
        option(4, 1024, 40, 5e-3),
        option(4, 64, 50, 7e-3),  # larger and worse than the one before
    ]
    exact = Option(EXACT, 100, 0.0, 0.0, (0.0,), True, 0.0, 0.0)
    assert candidates([*options, exact]) == {options[position].settings for position in (0, 2, 4)}
    lossless = [replace(item, ratios=(0.0,)) for item in options]
    assert candidates(lossless) == {options[0].settings}


def test_bias_is_all_of_nearest_and_little_of_stochastic_rounding(own: Profile) -> None:
    split = [option for option in compressed(own) if option.bias is not None]
    nearest = [option for option in split if option.settings == NEAREST]
    assert nearest
    assert all(option.bias == pytest.approx(option.ratios[1], rel=1e-3) for option in nearest)
    others = (option for option in split if option.settings.rounding != "nearest")
    assert statistics.median((option.bias or 0) / option.ratios[1] for option in others) < 0.2


def test_kinds_have_prices_of_their_own_or_none(own: Profile, full: Profile) -> None:
    errors = [own.predict(_uniform(settings)).gradient_error for settings in OWN]
    assert all(error is not None and error > 0 for error in errors)
    assert len({round(error, 12) for error in errors if error is not None}) == len(errors)
    for settings in (*OWN, RUNNING):
        assert full.predict(_uniform(settings)).gradient_error is None
    running = [option for layer in own.layers for option in layer.options if option.settings == RUNNING]
    assert running
    assert {option.provenance for option in running} == {"unknown"}
    assert own.predict(_uniform(RUNNING)).gradient_error is None


def test_every_option_says_where_its_price_comes_from(full: Profile) -> None:
    for option in compressed(full):
        document = option.to_dict()
        assert document["provenance"] in ("measured", "inferred")
        assert document["batches"] == len(document["ratios"])
        assert document["seeds"] == option.batches + (option.batches > 1)
        assert (document["interval"] is None) == (option.batches < 3)
        if option.interval is not None and option.gradient_error is not None:
            assert option.interval[0] < option.gradient_error < option.interval[1]
    assert {option.provenance for option in compressed(full)} == {"measured", "inferred"}


def test_predictions_have_intervals(full: Profile) -> None:
    predicted = full.predict(mt.Policy.uniform(level=16))
    low, high = known(predicted.gradient_error_interval)
    assert 0 < low < known(predicted.gradient_error) < high
    assert Prediction.from_dict(json.loads(json.dumps(predicted.to_dict()))) == predicted


def test_no_prediction_is_below_the_floor() -> None:
    """The floor is a noise ratio, of which the gradient error is a half here."""
    profile = replace(noisy(synthetic_profile()), error_floor=0.5)
    four = profile.predict(mt.Policy.uniform(level=16))
    assert four.gradient_noise_ratio == 0.5
    assert four.gradient_noise_ratio_interval == (0.5, 0.5)
    assert four.gradient_error == pytest.approx(0.25)
    assert known(four.gradient_error_interval) == pytest.approx((0.25, 0.25))
    nothing = profile.predict(mt.Policy())
    assert (nothing.gradient_error, nothing.gradient_noise_ratio) == (0.0, 0.0)


def test_the_floor_is_what_lower_precision_leaves() -> None:
    rounded = classifying(autocast="bfloat16")
    assert JointError(classifying()).floor().error < 1e-10 < JointError(rounded).floor().error < 1e-2


def test_interaction_adds_to_the_prediction_and_widens_the_interval() -> None:
    profile, one = synthetic_profile(), mt.Policy.uniform(level=2)
    plain, raised = profile.predict(one), replace(profile, interaction=((1, 0.1),)).predict(one)
    assert known(raised.gradient_error) > known(plain.gradient_error)
    widths = [high / low for low, high in (known(one.gradient_error_interval) for one in (plain, raised))]
    assert widths[0] < widths[1]
    four = mt.Policy.uniform(level=16)
    assert replace(profile, interaction=((1, 0.1),)).predict(four) == profile.predict(four)


def branches() -> nn.Module:
    """Two layers of one input, and a norm that others derive from."""

    def forward(m: Any, x: Tensor) -> Any:
        x = m.norm(x)
        return m.head(m.act(m.left(x) + m.right(x)))

    layers = {"left": nn.Linear(64, 64), "right": nn.Linear(64, 64), "head": nn.Linear(64, 10)}
    return Composed(forward, norm=nn.LayerNorm(64), act=nn.GELU(), **layers)


def test_an_interrupted_profile_has_the_same_prices(tmp_path: Path) -> None:
    path, work = tmp_path / "profile.json", branching()
    full = mt.profile(work, options=GRID, seeds=BATCHES)
    assert full.ties
    assert full.derivations

    def stop(text: str, share: float) -> None:
        if 0.7 < BATCHES * share < 1 and "first batch" in text:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mt.profile(work, options=GRID, seeds=BATCHES, path=path, progress=stop)
    resumed = mt.profile(work, options=GRID, seeds=BATCHES, path=path)
    for before, after in zip(full.layers, resumed.layers, strict=True):
        for one, two in zip(before.options, after.options, strict=True):
            assert replace(one, encode_ms=0, decode_ms=0) == replace(two, encode_ms=0, decode_ms=0)
        assert before.shares == after.shares
    assert (full.ties, full.interaction) == (resumed.ties, resumed.interaction)
