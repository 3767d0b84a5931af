"""The tables behind a report: sums that must agree, and what is said where nothing is known."""

from __future__ import annotations

import math
from dataclasses import replace

import pandas as pd
import pytest

import mesa_tune as mt
from mesa_tune.policy import Policy
from mesa_tune.policy.settings import EXACT, LayerSettings
from mesa_tune.profiles.profile import Prediction
from mesa_tune.profiles.verification import Measured, Ratio, Verification
from mesa_tune.reports import frames
from mesa_tune.search.plan import Baseline, Plan, TrialEntry
from tests.builders import known
from tests.measure.models import language_profile
from tests.synthetic import COARSE, synthetic_profile

PROFILE = synthetic_profile(3, grid=COARSE)
FOUR_BITS = {layer.name: LayerSettings(level=16) for layer in PROFILE.layers}
MIXED = {**FOUR_BITS, "blocks.0.q": EXACT, "blocks.1.fc2": LayerSettings(level=4)}
ASSIGNMENTS = {"plain": {}, "uniform": FOUR_BITS, "mixed": MIXED}


class TestTimeline:
    @pytest.mark.parametrize("name", ASSIGNMENTS)
    def test_highest_point_is_the_predicted_peak(self, name: str) -> None:
        frame = frames.timeline_frame(PROFILE, ASSIGNMENTS[name])
        assert frame["after"].max() == PROFILE.predict_assignment(ASSIGNMENTS[name]).peak_bytes
        assert frame["before"].max() == PROFILE.peak_bytes

    def test_follows_the_batch_size(self) -> None:
        half = frames.timeline_frame(PROFILE, MIXED, batch_size=4)
        assert half["after"].max() == PROFILE.predict_assignment(MIXED, batch_size=4).peak_bytes

    def test_without_a_policy_has_no_after(self) -> None:
        assert "after" not in frames.timeline_frame(PROFILE)


class TestLayers:
    @pytest.mark.parametrize("name", ASSIGNMENTS)
    @pytest.mark.parametrize("batch_size", [8, 4])
    def test_bytes_sum_to_the_saved_bytes(self, name: str, batch_size: int) -> None:
        frame = frames.layers_frame(PROFILE, ASSIGNMENTS[name], batch_size)
        expected = PROFILE.predict_assignment(ASSIGNMENTS[name], batch_size=batch_size)
        plain = PROFILE.predict_assignment({}, batch_size=batch_size)
        assert frame["after"].sum() == expected.saved_bytes
        assert frame["before"].sum() == plain.saved_bytes

    def test_order_is_that_of_the_run(self) -> None:
        names = [layer.name for layer in PROFILE.layers]
        assert list(frames.layers_frame(PROFILE, MIXED)["name"][: len(names)]) == names
        # A profile has what only hooks reach last, and of that no moments.
        name = "blocks.1.relu"
        layers = tuple(sorted(PROFILE.layers, key=lambda layer: layer.name == name))
        slots = (replace(s, layer=None) if s.layer == name else s for s in PROFILE.timeline.slots)
        late = replace(PROFILE, layers=layers, timeline=replace(PROFILE.timeline, slots=tuple(slots)))
        assert late.layers[-1].name == name
        assert abs(frames.running_order(late).index(name) - names.index(name)) <= 1

    def test_bytes_of_no_layer_have_the_last_row(self) -> None:
        last = frames.layers_frame(PROFILE, MIXED).iloc[-1]
        assert (last["name"], last["before"], last["after"]) == (frames.NO_LAYER, 64, 64)

    def test_a_packed_copy_belongs_to_the_tensors_owner(self) -> None:
        frame = frames.layers_frame(PROFILE, FOUR_BITS)
        grown = frame[frame["after"] > frame["before"]]
        assert grown.empty, "a layer that keeps nothing plainly got another's packed copy"

    def test_settings_bits_and_errors_stand_beside(self) -> None:
        frame = frames.layers_frame(PROFILE, MIXED).set_index("name")
        assert frame.loc["blocks.0.q", "settings"] == "exact"
        assert frame["bits"].isna()["blocks.0.q"]
        assert frame.loc["blocks.1.fc2", "bits"] == 2
        fc2 = PROFILE.layer("blocks.1.fc2")
        assert frame.loc["blocks.1.fc2", "gradient_error"] == PROFILE.layer_error(fc2, MIXED["blocks.1.fc2"])

    def test_settings_are_those_that_take_effect(self) -> None:
        frame = frames.layers_frame(PROFILE, FOUR_BITS).set_index("name")
        assert frame.loc["sin.0", "bits"] == 8, "hooks store no fewer than 8 bits"
        assert frame.loc["head", "settings"] == "exact", "too small to be encoded"

    def test_without_a_policy_only_what_is(self) -> None:
        assert not {"after", "settings", "bits"} & set(frames.layers_frame(PROFILE))

    def test_unknown_errors_are_missing_values(self) -> None:
        unknown = synthetic_profile(1, grid=COARSE, known=False)
        four_bits = {layer.name: LayerSettings(level=16) for layer in unknown.layers}
        frame = frames.layers_frame(unknown, four_bits)
        assert frame["gradient_error"][:-1].isna().any()


class TestStorage:
    def test_only_layers_that_save_something_numbered_as_in_the_table(self) -> None:
        table = frames.layers_frame(PROFILE, MIXED)
        frame = frames.storage_frame(table)
        assert (frame["before"] > 0).all()
        assert list(table["name"][frame["depth"]]) == list(frame["name"])
        assert frames.NO_LAYER not in set(frame["name"])
        stored = table.set_index("name")["stored"]
        assert (stored["blocks.0.q"], stored["blocks.1.fc2"]) == ("exact", "2 bits")

    def test_mean_counts_ranges(self) -> None:
        assert frames.mean_bits(PROFILE, FOUR_BITS) == pytest.approx(4.25, rel=0.05)

    def test_mean_of_nothing_is_no_number(self) -> None:
        assert math.isnan(frames.mean_bits(PROFILE, {}))


def test_tags_sum_to_the_layers() -> None:
    table = frames.layers_frame(PROFILE, MIXED)
    tags = frames.tags_frame(table)
    assert tags["before"].is_monotonic_decreasing
    assert list(tags[["before", "after"]].sum()) == list(table[["before", "after"]].sum())
    assert tags["layers"].sum() == len(table[table["tag"].isin(tags["tag"])]) + 1  # the row of no layer


def test_what_is_alive_sums_to_the_peak() -> None:
    plain, chosen = PROFILE.predict_assignment({}), PROFILE.predict_assignment(FOUR_BITS)
    alive = frames.alive_frame(plain, chosen)
    assert (alive["before"].sum(), alive["after"].sum()) == (plain.peak_bytes, chosen.peak_bytes)
    assert list(frames.alive_frame(plain).columns) == ["kind", "before"]


@pytest.fixture(scope="module", name="profile")
def _profile() -> mt.Profile:
    profile = language_profile()
    assert profile.tiled is not None
    slots = profile.tiled.timeline.slots
    longer = replace(profile.tiled.timeline, slots=(*slots, *slots[-1:] * 3))
    return replace(profile, tiled=replace(profile.tiled, timeline=longer))


@pytest.fixture(scope="module", name="assignment")
def _assignment(profile: mt.Profile) -> dict[str, LayerSettings]:
    assert profile.tiled is not None
    again = dict.fromkeys(profile.timeline.modules[:1], LayerSettings(store="recompute"))
    return {layer.name: LayerSettings(level=16) for layer in profile.layers} | again | profile.tiled.settings


class TestSlicesAndModulesThatRunAgain:
    """A step with slices has a timeline of its own, and inputs of modules belong to no layer."""

    def test_bytes_are_as_predicted(self, profile: mt.Profile, assignment: dict[str, LayerSettings]) -> None:
        predicted = profile.predict_assignment(assignment)
        timeline = frames.timeline_frame(profile, assignment)
        layers = frames.layers_frame(profile, assignment)
        peaks, saved = timeline[["before", "after"]].max(), layers[["before", "after"]].sum()
        assert list(peaks) == [profile.peak_bytes, predicted.peak_bytes]
        assert list(saved) == [profile.saved_bytes, predicted.saved_bytes]
        assert len(timeline) == len(profile.timeline.slots) + 3
        assert list(timeline["slot"]) == list(range(len(timeline)))
        assert frames.peak_text(timeline, "after", "layer_after") == known(predicted.peak).moment

    def test_the_table_names_them(self, profile: mt.Profile, assignment: dict[str, LayerSettings]) -> None:
        table = frames.layers_frame(profile, assignment).set_index("name")
        module = profile.timeline.modules[0]
        assert set(table["stored"][table.index.str.startswith(f"{module}.")]) == {"recompute"}
        assert table.loc["loss.cross_entropy.0", "stored"] == "tile"
        assert (table.loc[module, "tag"], table.loc[module, "before"]) == ("module", 0)
        assert table["after"][module] > 0
        assert frames.NO_LAYER not in table.index


class TestStudy:
    def test_best_is_of_whole_trials_within_the_limits(self) -> None:
        values = (2.0, False, False), (1.0, True, False), (None, True, True), (1.5, True, True)
        trials = (*values, (1.2, False, True))
        history = tuple(TrialEntry(value, 1, None, None, inside, whole) for value, inside, whole in trials)
        plan = Plan(
            Policy(), PROFILE.predict_assignment({}), Baseline(1, 1), None, 8, 8, 0.0, 0.0, history=history
        )  # fmt: skip
        frame = frames.study_frame(plan)
        assert list(frame["trial"]) == [1, 2, 3, 4, 5]
        assert list(frame["best"]) == [2.0, 2.0, 2.0, 1.5, 1.5]


class TestComparison:
    VERIFIED = Verification(
        Measured(100, 80, 5.0), Measured(51, 20, 6.0), (0.1, 0.3), Ratio(1.2, 1.1, 1.3),
        predicted=None, device="cpu", batch_size=8, torch="2.13.0", steps=5,
    )  # fmt: skip

    def test_difference_is_measured_over_predicted(self) -> None:
        predicted = Prediction(20, 50, 0.1, None)
        frame = frames.comparison_frame(predicted, self.VERIFIED).set_index("quantity")
        assert frame.loc["peak_bytes", "difference"] == pytest.approx(0.02)
        assert frame.loc["gradient_error", "difference"] == pytest.approx(1.0)
        assert frame["difference"].isna()["step_ms"]
        assert frame.loc["saved_bytes", "plain"] == 80

    def test_intervals_are_those_of_the_prediction_and_of_the_measurements(self) -> None:
        predicted = Prediction(20, 50, 0.1, None, gradient_error_interval=(0.05, 0.2))
        frame = frames.comparison_frame(predicted, self.VERIFIED).set_index("quantity")
        ends = ["predicted_low", "predicted_high", "measured_low", "measured_high"]
        # Two batches of 0.1 and 0.3: a standard error of 0.1 on each side of 0.2, twice.
        assert list(frame.loc["gradient_error", ends]) == pytest.approx([0.05, 0.2, 0.0, 0.4])
        assert list(frame.loc["step_ms", ends[2:]]) == pytest.approx([5.5, 6.5])
        assert frame.loc["peak_bytes", ends].isna().all()

    def test_of_nothing_predicted_has_only_measurements(self) -> None:
        frame = frames.comparison_frame(None, self.VERIFIED)
        assert frame["predicted"].isna().all()
        assert isinstance(frame, pd.DataFrame)
