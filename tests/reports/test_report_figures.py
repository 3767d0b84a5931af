"""Figures: they say the finding, hold every number drawn, and stand from one layer to hundreds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from matplotlib.patches import StepPatch
from matplotlib.text import Text

from mesa_tune.policy import Policy
from mesa_tune.policy.settings import LayerSettings
from mesa_tune.profiles.profile import Prediction, Profile
from mesa_tune.reports import figures, frames, style
from mesa_tune.reports.page import inline_svg, png, svg
from mesa_tune.search.plan import Baseline, Plan, TrialEntry
from mesa_tune.units import format_error
from tests.synthetic import COARSE, synthetic_profile

PROFILES = {"3 layers": synthetic_profile(0, grid=COARSE), "303 layers": synthetic_profile(50, grid=COARSE)}


@pytest.fixture(params=PROFILES, name="profile")
def _profile(request: pytest.FixtureRequest) -> Profile:
    return PROFILES[request.param]


def four_bits(profile: Profile) -> dict[str, LayerSettings]:
    return {layer.name: LayerSettings(level=16) for layer in profile.layers}


def texts(figure: Figure) -> str:
    """All that the figure says."""
    found: list[Any] = figure.findobj(Text)
    return "\n".join(text.get_text() for text in found)


def drawn(figure: Figure) -> Figure:
    assert png(figure).startswith(b"\x89PNG")
    return figure


def test_memory_through_the_step_names_peak_and_budget(profile: Profile) -> None:
    frame = frames.timeline_frame(profile, four_bits(profile))
    said = texts(drawn(figures.memory_through_step(frame, int(frame["after"].max()))))
    assert style.change(frame["before"].max(), frame["after"].max()) in said
    assert "within the budget" in said
    assert {"forward", "backward"} <= set(said.split("\n"))
    peak = profile.predict_assignment(four_bits(profile)).peak
    assert peak is not None
    assert f"it is {peak.moment}" in said


def test_memory_through_the_step_says_when_the_budget_is_broken() -> None:
    frame = frames.timeline_frame(PROFILES["3 layers"], {})
    assert "above the budget" in texts(figures.memory_through_step(frame, 10))
    assert "budget" not in texts(figures.memory_through_step(frame.drop(columns="after")))


def test_memory_by_layer_says_the_sum(profile: Profile) -> None:
    frame = frames.layers_frame(profile, four_bits(profile))
    said = texts(drawn(figures.memory_by_layer(frame)))
    assert style.change(frame["before"].sum(), frame["after"].sum()) in said


def test_memory_by_layer_draws_every_layer_of_a_deep_model() -> None:
    frame = frames.layers_frame(PROFILES["303 layers"], four_bits(PROFILES["303 layers"]))
    (axes,) = figures.memory_by_layer(frame).axes
    unit, _ = style.byte_unit(frame["before"].max())
    stairs: list[Any] = axes.findobj(StepPatch)
    assert [step.get_data().values.sum() * unit for step in stairs] == pytest.approx(
        [frame["before"].sum(), frame["after"].sum()]
    )


def test_memory_by_tag_says_what_gives_most(profile: Profile) -> None:
    frame = frames.tags_frame(frames.layers_frame(profile, four_bits(profile)))
    said = texts(drawn(figures.memory_by_tag(frame)))
    freed = frame["before"] - frame["after"]
    assert f"{frame['tag'].iloc[int(freed.to_numpy().argmax())]} layers give" in said
    for row in frame.to_dict("records"):
        assert style.change(row["before"], row["after"]) in said
    assert "layers give" not in texts(figures.memory_by_tag(frame.drop(columns="after")))
    assert "No layer saves anything" in texts(drawn(figures.memory_by_tag(frame.iloc[:0])))


def test_names_with_dollar_signs_are_no_formulas() -> None:
    profile = PROFILES["3 layers"]
    frame = frames.timeline_frame(profile, {}).assign(layer="a$x_{$b", layer_after="a$x_{$b")
    assert r"a\$x_{\$b" in texts(drawn(figures.memory_through_step(frame)))


def test_storage_along_depth_has_a_mark_for_every_layer(profile: Profile) -> None:
    frame = frames.storage_frame(frames.layers_frame(profile, four_bits(profile)))
    figure = drawn(figures.storage_along_depth(frame, 4.25))
    assert len(heights(figure)) == len(frame)
    assert "4.2 bits" in texts(figure)


@pytest.mark.parametrize("word", ["recompute", "derive", "tile", "offload", "exact"])
def test_storage_along_depth_has_a_row_for_each_word_that_occurs(word: str) -> None:
    profile = PROFILES["303 layers"]
    frame = frames.storage_frame(frames.layers_frame(profile, four_bits(profile))).assign(stored="4 bits")
    assert word not in texts(figures.storage_along_depth(frame, 4.25)).split("\n")
    frame.loc[frame.index[0], "stored"] = word
    figure = drawn(figures.storage_along_depth(frame, 4.25))
    rows = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert heights(figure).count(rows.index(word)) == 1
    assert heights(figure).count(rows.index("4 bits")) == len(frame) - 1


def test_storage_along_depth_of_an_exact_policy() -> None:
    frame = frames.storage_frame(frames.layers_frame(PROFILES["3 layers"], {}))
    assert "No layer stores fewer bits" in texts(figures.storage_along_depth(frame, float("nan")))


def heights(figure: Figure) -> list[float]:
    marks: list[Any] = list(figure.axes[0].collections)
    return [height for mark in marks for _, height in mark.get_offsets()]


def test_study_progress_draws_every_trial_and_says_what_it_found() -> None:
    trials = [(1.2, True, True), (1.1, True, True), (1.0, False, True), (1.3, True, False)]
    plan = Plan(
        Policy(), Prediction(0, 0, 0.0, None), Baseline(0, 0), None, 8, 8, 0.0, 0.0,
        history=tuple(TrialEntry(value, 10, 1e-3, None, inside, whole) for value, inside, whole in trials),
    )  # fmt: skip
    frame = frames.study_frame(plan)
    figure = drawn(figures.study_progress(frame, "time"))
    said = texts(figure)
    assert "4 trials: none is better" in said
    assert {"above a limit", "ended early", "within the limits"} <= set(said.split("\n"))
    assert "one of them is better" in texts(figures.study_progress(frame, "memory", won=True))
    lines = {str(line.get_label()): line for line in figure.axes[0].lines}
    assert np.asarray(lines["best so far"].get_ydata()).tolist() == [1.2, 1.1, 1.1, 1.1]
    assert np.asarray(lines["above a limit"].get_ydata()).tolist() == [1.0]


def test_pareto_front_compares_with_the_best_uniform_policy_of_no_more_memory() -> None:
    frame = pareto(Prediction(0, 100, 1e-4, 12.0))
    said = texts(drawn(figures.pareto_front(frame, 110)))
    assert "At 100 B the chosen policy errs 10 times less than uniform 4 bits at 99 B" in said
    said = texts(drawn(figures.pareto_front(frame, 110, "time")))
    assert "At 100 B a step takes 1.20 times plain's" in said
    assert "uniform 4 bits" not in said  # errs more
    said = texts(drawn(figures.pareto_front(pareto(Prediction(0, 100, 2e-3, 12.0)), 110, "time")))
    assert "At 100 B a step takes 1.20 times plain's; uniform 4 bits at 99 B: 1.50" in said


def test_pareto_front_makes_no_claim_where_uniform_is_as_good() -> None:
    said = texts(figures.pareto_front(pareto(Prediction(0, 100, 2e-3, None))))
    assert "times less" not in said
    assert "gradient error 2.0e-03" in said


def test_pareto_front_draws_times_only_if_they_are_known() -> None:
    chosen = Prediction(0, 100, 1e-4, 12.0)
    assert len(figures.pareto_front(pareto(chosen)).axes) == 2
    untimed = pareto(chosen).assign(step_ms=float("nan"))
    (axes,) = drawn(figures.pareto_front(untimed, objective="time")).axes
    assert axes.get_ylabel() == "gradient error"


@pytest.mark.parametrize(
    ("traced", "said"), [(True, "least time"), (False, "least time (hollow: bytes inferred)")]
)
def test_pareto_front_says_which_bytes_are_inferred(traced: bool, said: str) -> None:
    figure = drawn(figures.pareto_front(pareto(Prediction(0, 100, 1e-4, 12.0)).assign(traced=traced)))
    legend = figure.axes[0].get_legend()
    assert legend is not None
    assert said in [text.get_text() for text in legend.get_texts()]


def pareto(chosen: Prediction) -> pd.DataFrame:
    points = {
        ("plain", "plain"): Prediction(0, 300, None, 10.0),
        ("uniform", "8 bits"): Prediction(0, 200, 1e-5, 13.0),
        ("uniform", "4 bits"): Prediction(0, 99, 1e-3, 15.0),
        ("uniform", "2 bits"): Prediction(0, 50, 1e-1, 14.0),
        ("time", "time, 20% of plain"): Prediction(0, 60, 3e-2, 11.0),
        ("error", "error, 20% of plain"): Prediction(0, 60, 1e-2, 16.0),
        ("chosen", "chosen"): chosen,
    }
    columns = ["peak_bytes", "step_ms", "gradient_error"]
    rows = [[*key, *(getattr(point, name) for name in columns)] for key, point in points.items()]
    frame = pd.DataFrame(rows, columns=["kind", "label", *columns]).assign(traced=False)
    return frame.astype({"step_ms": float, "gradient_error": float})


def test_predicted_beside_measured_says_how_far_off() -> None:
    frame = pd.DataFrame(
        {
            "quantity": ["saved_bytes", "peak_bytes", "step_ms", "gradient_error"],
            "plain": [80.0, 100.0, 5.0, 0.0],
            "predicted": [20.0, 50.0, None, 1e-3],
            "measured": [20.0, 52.0, 6.0, 2e-3],
            "difference": [0.0, 0.04, None, 1.0],
            "measured_low": [None, None, 5.5, 1e-3],
            "measured_high": [None, None, 6.5, 3e-3],
        }
    )
    figure = drawn(figures.predicted_beside_measured(frame))
    said = texts(figure)
    assert "within 4.0 %" in said
    assert "not known" in said
    assert "2.0e-03" in said
    intervals = [[np.asarray(line.get_xdata()).tolist() for line in axes.lines] for axes in figure.axes]
    assert intervals == [[], [], [[5.5, 6.5]], [[1e-3, 3e-3]]]


class TestStyle:
    @pytest.fixture(autouse=True)
    def _restored(self) -> Iterator[None]:
        before = dict(mpl.rcParams)
        yield
        assert dict(mpl.rcParams) == before, "a figure left its settings behind"

    def test_svg_is_a_part_of_a_page(self) -> None:
        frame = frames.timeline_frame(PROFILES["3 layers"], {})
        text = inline_svg(svg(figures.memory_through_step(frame)), "one")
        assert text.startswith("<svg role=")
        assert 'id="one-' in text
        assert "url(#one-" in text
        assert "var(--ink)" in text
        assert style.INK not in text

    def test_svg_is_the_same_each_time(self) -> None:
        frame = frames.timeline_frame(PROFILES["3 layers"], {})
        first, second = (inline_svg(svg(figures.memory_through_step(frame)), "one") for _ in range(2))
        assert first == second

    def test_short_names_drop_what_all_begin_with(self) -> None:
        names = ["model.encoder.0.fc", "model.encoder.1.fc", "loss.cross_entropy.0"]
        assert style.short_names(names, 30) == ["0.fc", "1.fc", "loss.cross_entropy.0"]
        assert style.short_names(["model.fc"], 30) == ["model.fc"]

    def test_short_names_keep_both_ends(self) -> None:
        (name,) = style.short_names(["blocks.17.attention.scaled_dot_product_attention.0"], 24)
        assert len(name) == 24
        assert name.startswith("blocks.1")
        assert name.endswith("attention.0")

    def test_errors_as_text(self) -> None:
        texts = [format_error(error) for error in (3.14e-4, 0.0, None, float("nan"))]
        assert texts == ["3.1e-04", "0", "not known", "not known"]
