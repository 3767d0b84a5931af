"""The page and the command that writes it: whole, self-contained, and only over what is its own."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest

from mesa_tune.cli import run
from mesa_tune.profiler.verification import Measured, Ratio, Verification
from mesa_tune.search import Plan, search_policy
from tests.synthetic import COARSE, synthetic_profile

PROFILE = replace(synthetic_profile(1, grid=COARSE), model="models/<tiny>.py")
PLAN = search_policy(PROFILE, "70%")
FIGURES = ["bits_along_depth", "memory_by_layer", "memory_through_step", "pareto"]


def verified(plan: Plan) -> Verification:
    predicted = plan.predicted
    return Verification(
        Measured(PROFILE.peak_bytes, PROFILE.saved_bytes, 40.0),
        Measured(predicted.peak_bytes + 1000, predicted.saved_bytes, 50.0),
        (1e-3, 2e-3),
        Ratio(1.25, 1.2, 1.3),
        predicted,
        "cpu",
        PROFILE.batch_size,
        "2.13.0",
        5,
    )


def fill(folder: Path, *, plan: Plan | None = None, found: Verification | None = None) -> Path:
    PROFILE.save(folder / "profile.json")
    if plan is not None:
        plan.save(folder / "plan.json")
    if found is not None:
        found.save(folder / "verify.json")
    return folder


def report(folder: Path, *options: str) -> int:
    return run(["report", "--run", str(folder), *options])


class Page(HTMLParser):
    """What a page links to, and its visible words."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.words: list[str] = []
        self.ids: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for key, value in attrs:
            if key in {"src", "href", "xlink:href"} and value:
                self.links.append(value)
            if key == "id" and value:
                self.ids.append(value)

    def handle_data(self, data: str) -> None:
        self.words.append(data.strip())

    @property
    def text(self) -> str:
        return " ".join(word for word in self.words if word)


@pytest.fixture(scope="module", name="page")
def _page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    folder = fill(tmp_path_factory.mktemp("run"), plan=PLAN, found=verified(PLAN))
    assert report(folder, "--quiet") == 0
    return Page((folder / "report.html").read_text("utf-8"))


class TestPage:
    def test_needs_no_network_and_no_other_file(self, page: Page) -> None:
        assert all(link.startswith("#") for link in page.links)

    def test_ids_are_unique(self, page: Page) -> None:
        assert len(page.ids) == len(set(page.ids))

    def test_references_lead_somewhere(self, page: Page) -> None:
        assert {link[1:] for link in page.links} <= set(page.ids)

    def test_names_of_models_and_layers_are_escaped(self, page: Page) -> None:
        assert "<tiny>.py" in page.words

    def test_shows_all_five_figures(self, page: Page) -> None:
        assert {*FIGURES, "predicted_beside_measured"} <= set(page.ids)

    def test_has_a_row_for_every_layer(self, page: Page) -> None:
        assert {layer.name for layer in PROFILE.layers} <= set(page.words)

    def test_says_how_to_train_with_it(self, page: Page) -> None:
        assert "\n".join(PLAN.training(PROFILE)) in page.words
        assert PLAN.stores_loss(PROFILE)
        assert "mt.compress_saved" in page.text

    def test_summary_is_measured(self, page: Page) -> None:
        assert "1.5e-03" in page.words
        assert "1.25×" in page.words
        assert "predicted" not in page.text.split("Figures")[0].replace("; predicted", "")


class TestCommand:
    def test_without_plan_shows_what_is_there(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert report(fill(tmp_path)) == 0
        assert "No policy yet" in capsys.readouterr().out
        page = Page((tmp_path / "report.html").read_text("utf-8"))
        assert "No policy yet" in page.text
        assert "bits_along_depth" not in page.ids

    def test_without_verification_says_so(self, tmp_path: Path) -> None:
        assert report(fill(tmp_path, plan=PLAN)) == 0
        assert "Nothing measured under the policy yet" in (tmp_path / "report.html").read_text("utf-8")
        assert sorted(path.stem for path in (tmp_path / "figures").iterdir()) == FIGURES

    def test_bytes_only_and_partial_profiles_have_no_front(self, tmp_path: Path) -> None:
        for profile in (synthetic_profile(1, known=False), replace(PROFILE, partial=True)):
            profile.save(tmp_path / "profile.json")
            assert report(tmp_path, "--force", "--format", "png") == 0
            assert not (tmp_path / "figures" / "pareto.png").exists()

    def test_leaves_out_a_verification_of_another_policy(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        other = search_policy(PROFILE, "90%")
        assert report(fill(tmp_path, plan=PLAN, found=verified(other)), "--format", "json") == 0
        assert "measured another policy" in capsys.readouterr().err

    def test_refuses_a_plan_of_another_model(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        fill(tmp_path, plan=PLAN)
        replace(PROFILE, layers_fingerprint="0ther").save(tmp_path / "profile.json")
        assert report(tmp_path) == 1
        assert "another model" in capsys.readouterr().err

    def test_remakes_its_own_and_grows_with_the_run(self, tmp_path: Path) -> None:
        assert report(fill(tmp_path)) == 0
        assert report(fill(tmp_path, plan=PLAN, found=verified(PLAN))) == 0
        assert "predicted_beside_measured" in (tmp_path / "report.html").read_text("utf-8")

    def test_does_not_overwrite_what_was_edited(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert report(fill(tmp_path), "--format", "json") == 0
        (tmp_path / "report.json").write_text("mine")
        assert report(tmp_path, "--format", "json") == 1
        assert "--force" in capsys.readouterr().err
        assert (tmp_path / "report.json").read_text() == "mine"
        assert report(tmp_path, "--format", "json", "--force") == 0

    def test_json_names_the_files_on_standard_output_alone(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert report(fill(tmp_path, plan=PLAN), "--json", "--format", "csv") == 0
        document = json.loads(capsys.readouterr().out)
        assert document["schema"] == "mesa-tune.report/1"
        assert all(Path(path).is_file() for path in document["files"])

    def test_bad_format_is_a_bad_value(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert report(fill(tmp_path), "--format", "pdf") == 1
        assert "html" in capsys.readouterr().err

    def test_csv_holds_what_is_drawn(self, tmp_path: Path) -> None:
        assert report(fill(tmp_path, plan=PLAN), "--format", "csv") == 0
        frame = pd.read_csv(tmp_path / "figures" / "memory_by_layer.csv")
        assert frame["after"].sum() == PLAN.predicted.saved_bytes
        assert not (tmp_path / "report.html").exists()

    def test_json_format_holds_plain_numbers(self, tmp_path: Path) -> None:
        assert report(fill(tmp_path, plan=PLAN), "--format", "json") == 0
        content = json.loads((tmp_path / "report.json").read_text())
        assert content["schema"] == "mesa-tune.report/1"
        assert sum(row["after"] for row in content["memory_by_layer"]) == PLAN.predicted.saved_bytes
        solved = [row for row in content["pareto"] if row["kind"] == "error"]
        assert len(solved) == 10
        assert PLAN.budget_bytes in [row["budget"] for row in solved]
        least = min(row["gradient_error"] for row in solved if row["budget"] == PLAN.budget_bytes)
        assert least == pytest.approx(PLAN.predicted.gradient_error, rel=1e-3)


def test_solved_points_are_no_worse_than_uniform_ones_of_their_peak(tmp_path: Path) -> None:
    assert report(fill(tmp_path, plan=PLAN), "--format", "csv") == 0
    frame = pd.read_csv(tmp_path / "figures" / "pareto.csv")
    solved, uniform = frame[frame["kind"] == "error"], frame[frame["kind"] == "uniform"]
    compared = 0
    for _, point in uniform[uniform["label"].isin(["8 bits", "4 bits", "2 bits"])].iterrows():
        cheaper = solved[solved["budget"] >= point["peak_bytes"]]
        compared += len(cheaper)
        assert (cheaper["gradient_error"] <= point["gradient_error"] * 1.02 + 1e-15).all()
    assert compared, "no solved point has a uniform one to be compared with"
