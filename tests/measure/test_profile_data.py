"""The profile's data: documents on disk, and predictions for any policy."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mesa_tune.errors import BudgetError, RunError
from mesa_tune.policy import Policy
from mesa_tune.policy.settings import EXACT, LayerSettings
from mesa_tune.profiles.profile import Profile, Tie
from tests.builders import known
from tests.synthetic import GRID, noisy, synthetic_profile

FOUR = LayerSettings(level=16)


@pytest.fixture(scope="module", name="profile")
def _profile() -> Profile:
    return synthetic_profile()


def test_a_saved_profile_loads_equal(profile: Profile, tmp_path: Path) -> None:
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile


def test_the_document_has_the_promised_keys(profile: Profile) -> None:
    document = noisy(profile).to_dict()
    assert document["schema"] == "mesa-tune.profile/3"
    promised = "model fingerprint device autocast batch_size partial static_bytes saved_bytes peak_bytes"
    assert {*promised.split(), "step_ms", "gradient_noise", "parameters"} <= set(document)
    assert set(document["parameters"][0]) == {"name", "elements", "noise"}
    assert set(document["tensors"][0]) == {"id", "owner", "layers", "shape", "dtype", "bytes"}
    layer = "name tag index module shape dtype bytes own_bytes shared_with options call_ms shares"
    layer += " share stored_like"
    assert set(document["layers"][0]) == set(layer.split())
    option = "settings bytes tensor_error gradient_error interval provenance batches seeds encode_ms"
    others = {"decode_ms", "noise_ratio", "ratios", "bias", "screened"}
    assert set(document["layers"][0]["options"][0]) == {*option.split(), *others}


def test_own_bytes_sum_to_saved_bytes(profile: Profile) -> None:
    # The one thing alive between forward and backward that no layer keeps is the loss itself, 64 bytes here.
    assert sum(layer.own_bytes for layer in profile.layers) == profile.saved_bytes - 64


DAMAGES: dict[str, dict[str, Any]] = {
    "no-timeline": {"timeline": None},
    "no-seed": {"seed": None},
    "layers-a-number": {"layers": 7},
    "half-a-tie": {"ties": [{"layers": ["a"]}]},
    "unknown-key": {"unheard_of": 1},
    "foreign": {"schema": "somebody.else/1"},
    "older": {"schema": "mesa-tune.profile/1"},
    "no-parameters": {"parameters": None},
    "no-schema": {"schema": None},
}
"""Values of keys; None: the key is missing."""


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=list(DAMAGES))
def test_a_damaged_document_is_refused(profile: Profile, tmp_path: Path, damage: dict[str, Any]) -> None:
    path = tmp_path / "profile.json"
    document = profile.to_dict() | damage
    missing = [key for key, value in damage.items() if value is None]
    path.write_text(json.dumps({key: document[key] for key in document if key not in missing}), "utf-8")
    _assert_refused(path)


def test_a_document_of_another_version_is_called_so(profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(profile.to_dict() | {"schema": "mesa-tune.profile/1"}), "utf-8")
    with pytest.raises(RunError, match=r"of another version of mesa-tune: schema 'mesa-tune.profile/1'"):
        Profile.load(path)


def test_a_missing_file_or_folder_is_refused(tmp_path: Path) -> None:
    _assert_refused(tmp_path / "nowhere.json")
    _assert_refused(tmp_path)


def _assert_refused(path: Path) -> None:
    with pytest.raises(RunError) as caught:
        Profile.load(path)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(f"{path}: ")
    assert "mesa-tune profile" in lines[-1]
    assert len(lines) <= 3


def test_a_policy_that_compresses_nothing_is_the_plain_step(profile: Profile) -> None:
    predicted = profile.predict(Policy())
    assert (predicted.saved_bytes, predicted.peak_bytes) == (profile.saved_bytes, profile.peak_bytes)
    assert (predicted.gradient_error, predicted.step_ms) == (0.0, profile.step_ms)


@pytest.mark.parametrize("settings", GRID[::9], ids=lambda settings: settings.label)
def test_errors_and_times_of_options_add_up(profile: Profile, settings: LayerSettings) -> None:
    names = ("blocks.0.norm", "blocks.1.fc2")
    options = [profile.layer(name).options[GRID.index(settings)] for name in names]
    predicted = profile.predict_assignment(dict.fromkeys(names, settings))
    assert predicted.gradient_error == pytest.approx(sum(option.gradient_error or 0 for option in options))
    assert profile.noise_ratio(dict.fromkeys(names, settings)) == pytest.approx(
        sum(known(option.noise_ratio) for option in options)
    )
    added = sum(option.encode_ms + option.decode_ms for option in options)
    assert predicted.step_ms == pytest.approx(profile.plain_ms(profile.batch_size) + added)


def test_a_step_whose_times_add_up_to_nothing_is_unknown(profile: Profile) -> None:
    disturbed = replace(profile, routing_ms=-2 * profile.plain_ms(profile.batch_size))
    assert disturbed.predict(Policy.uniform(16)).step_ms is None


def test_tied_layers_err_by_their_joint_ratio_under_equal_settings(profile: Profile) -> None:
    tie = profile.ties[0]
    alone = [profile.noise_ratio({name: FOUR}) or 0.0 for name in tie.layers]
    assert profile.noise_ratio(dict.fromkeys(tie.layers, FOUR)) == pytest.approx(1.5 * sum(alone))
    finer = profile.noise_ratio({tie.layers[0]: LayerSettings()})
    mixed = {tie.layers[0]: LayerSettings(), tie.layers[1]: FOUR}
    assert profile.noise_ratio(mixed) == pytest.approx((finer or 0.0) + alone[1])
    assert (Tie(("a", "b")).ratio(3), Tie(("a", "b"), (2.0,)).ratio(0)) == (1.0, 2.0)


@pytest.mark.parametrize(
    ("settings", "like", "factor"),
    [
        (LayerSettings(level=10), LayerSettings(level=8), (7 / 9) ** 2),
        (LayerSettings(level=14), LayerSettings(level=16), (15 / 13) ** 2),
        (LayerSettings(level=16, group_size=128), LayerSettings(level=16, group_size=256), 1.0),
    ],
    ids=["level-10", "level-14", "group-128"],
)
def test_settings_that_were_not_tried_scale_the_nearest_option(
    profile: Profile, settings: LayerSettings, like: LayerSettings, factor: float
) -> None:
    layer = profile.layer("blocks.0.norm")
    nearest = known(profile.layer_error(layer, like))
    assert profile.layer_error(layer, settings) == pytest.approx(nearest * factor)


@pytest.mark.parametrize(
    "settings",
    [
        LayerSettings(level=16, group_size=None, quant_groups=3),
        LayerSettings(level=4, rounding="nearest"),
        LayerSettings(drop=0.9),
        LayerSettings(level=16, ema_decay=0.9),
        LayerSettings(level=16, allocation="sample"),
    ],
    ids=lambda settings: settings.label,
)
def test_what_was_not_tried_in_any_form_is_unknown(profile: Profile, settings: LayerSettings) -> None:
    assert profile.layer_error(profile.layer("blocks.0.norm"), settings) is None
    predicted = profile.predict_assignment({"blocks.0.norm": settings})
    assert (predicted.gradient_error, predicted.step_ms) == (None, None)
    assert predicted.saved_bytes > 0


def test_hooked_layers_err_as_with_256_levels(profile: Profile) -> None:
    coarse, fine = (profile.noise_ratio({"sin.0": LayerSettings(level=level)}) for level in (2, 256))
    assert coarse == fine
    assert coarse


def test_unknown_errors_make_an_unknown_prediction() -> None:
    profile = synthetic_profile(known=False)
    assert profile.predict(Policy.uniform(16)).gradient_error is None
    assert profile.predict(Policy()).gradient_error == 0.0


def test_layers_without_options_make_an_unknown_prediction(profile: Profile) -> None:
    bare = replace(profile, layers=tuple(replace(layer, options=()) for layer in profile.layers))
    predicted = bare.predict(Policy.uniform(16))
    assert predicted.gradient_error is None
    assert predicted.saved_bytes == profile.predict(Policy.uniform(16)).saved_bytes


def test_other_batch_sizes_scale_bytes_and_time(profile: Profile) -> None:
    here, double = (profile.predict(Policy(), batch_size=size) for size in (8, 16))
    assert double.saved_bytes - 64 == 2 * (here.saved_bytes - 64)
    assert double.step_ms == 2 * profile.plain_ms(profile.batch_size)


def test_a_profile_of_one_size_predicts_no_other(profile: Profile) -> None:
    single = replace(profile, timeline=replace(profile.timeline, batch_sizes=(8, 8)))
    with pytest.raises(BudgetError, match="batch size 9"):
        single.predict(Policy(), batch_size=9)


RERUN = "# mesa-tune policy 1\non module:\n    by_name: {}\n    level: 16\n    store: {}\n"


@pytest.mark.parametrize("names", ["blocks.0", "blocks.*"])
def test_what_runs_again_in_backward_is_not_predicted(profile: Profile, names: str) -> None:
    with pytest.raises(RunError, match=r"(?s)'blocks.0'.*mesa-tune verify"):
        profile.predict(Policy.parse(RERUN.format(names, "recompute")))


def test_tiled_losses_are_not_predicted(profile: Profile) -> None:
    layer = replace(profile.layers[0], tag="loss", name="loss.cross_entropy.0", index=0)
    losses = replace(profile, layers=(layer,))
    with pytest.raises(RunError, match=r"`tile: 8` of 'loss.cross_entropy.0'.*\n.*mesa-tune verify"):
        losses.predict(Policy.uniform(16, tile=8))
    assert losses.unpredictable(Policy.uniform(16, tile=1)) is None


@pytest.mark.parametrize(("names", "store"), [("elsewhere.*", "recompute"), ("blocks.0", "exact")])
def test_rules_for_modules_that_run_once_are_predicted(profile: Profile, names: str, store: str) -> None:
    policy = Policy.parse(RERUN.format(names, store).replace("    level: 16\n", ""))
    assert profile.predict(policy) == profile.predict(Policy())


def test_the_table_has_a_row_for_each_layer_and_option(profile: Profile) -> None:
    table = profile.frame()
    assert len(table) == sum(len(layer.options) for layer in profile.layers)
    assert int(table["exact"].sum()) == len(profile.layers)
    row = table[(table["name"] == "blocks.0.norm") & (table["settings"] == FOUR.label)].iloc[0]
    assert row["noise_ratio"] == profile.noise_ratio({"blocks.0.norm": FOUR})
    assert row["gradient_error"] == profile.predict_assignment({"blocks.0.norm": FOUR}).gradient_error


def test_exact_is_no_compression_however_it_is_said(profile: Profile) -> None:
    for settings in (EXACT, LayerSettings(store="exact")):
        assert profile.predict_assignment({"head": settings}).saved_bytes == profile.saved_bytes
