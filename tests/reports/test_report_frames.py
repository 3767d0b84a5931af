"""The tables behind a report: sums that must agree, and what is said where nothing is known."""

from __future__ import annotations

import math
from dataclasses import replace

import pandas as pd
import pytest

from mesa_tune.policy.settings import EXACT, LayerSettings
from mesa_tune.profiler.verification import Measured, Ratio, Verification
from mesa_tune.reports import frames
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
        late = replace(
            PROFILE,
            layers=tuple(sorted(PROFILE.layers, key=lambda layer: layer.name == "blocks.1.relu")),
            timeline=replace(
                PROFILE.timeline,
                slots=tuple(
                    replace(slot, layer=None) if slot.layer == "blocks.1.relu" else slot
                    for slot in PROFILE.timeline.slots
                ),
            ),
        )
        assert late.layers[-1].name == "blocks.1.relu"
        order = frames.running_order(late)
        assert abs(order.index("blocks.1.relu") - names.index("blocks.1.relu")) <= 1

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
        frame = frames.layers_frame(
            unknown, {layer.name: LayerSettings(level=16) for layer in unknown.layers}
        )
        assert frame["gradient_error"][:-1].isna().any()


class TestBits:
    def test_only_layers_that_keep_something_numbered_as_in_the_table(self) -> None:
        frame, table = frames.bits_frame(PROFILE, MIXED), frames.layers_frame(PROFILE, MIXED)
        assert (frame["before"] > 0).all()
        assert list(table["name"][frame["depth"]]) == list(frame["name"])
        assert frames.NO_LAYER not in set(frame["name"])

    def test_mean_counts_ranges(self) -> None:
        assert frames.mean_bits(PROFILE, FOUR_BITS) == pytest.approx(4.25, rel=0.05)

    def test_mean_of_nothing_is_no_number(self) -> None:
        assert math.isnan(frames.mean_bits(PROFILE, {}))


class TestComparison:
    VERIFIED = Verification(
        baseline=Measured(100, 80, 5.0),
        policy=Measured(51, 20, 6.0),
        gradient_errors=(0.1, 0.3),
        step_ratio=Ratio(1.2, 1.1, 1.3),
        predicted=None,
        device="cpu",
        batch_size=8,
        torch="2.13.0",
        steps=5,
    )

    def test_difference_is_measured_over_predicted(self) -> None:
        predicted = {"peak_bytes": 50, "saved_bytes": 20, "gradient_error": 0.1, "step_ms": None}
        frame = frames.comparison_frame(predicted, self.VERIFIED).set_index("quantity")
        assert frame.loc["peak_bytes", "difference"] == pytest.approx(0.02)
        assert frame.loc["gradient_error", "difference"] == pytest.approx(1.0)
        assert frame["difference"].isna()["step_ms"]
        assert frame.loc["saved_bytes", "plain"] == 80

    def test_of_nothing_measured_is_all_missing(self) -> None:
        frame = frames.comparison_frame({"peak_bytes": 50}, None)
        assert frame["measured"].isna().all()
        assert isinstance(frame, pd.DataFrame)
