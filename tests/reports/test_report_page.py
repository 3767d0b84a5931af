"""The page and the command that writes it: whole, self-contained, and only over what is its own."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest

from mesa_tune.cli import run
from mesa_tune.policy import Policy
from mesa_tune.profiles.profile import Profile
from mesa_tune.profiles.verification import Measured, Ratio, Verification
from mesa_tune.reports.contents import RunResults, make_frames
from mesa_tune.reports.sentence import sentence
from mesa_tune.runs.folder import Run
from mesa_tune.runs.provenance import hardware, running
from mesa_tune.search import Plan, search_policy
from mesa_tune.units import format_bytes
from tests.builders import Capture
from tests.synthetic import COARSE, synthetic_profile

PROFILE = replace(synthetic_profile(1, grid=COARSE), model="models/<tiny>.py")
PLAN = search_policy(PROFILE, "70%")
FIGURES = [
    "memory_by_layer",
    "memory_by_module",
    "memory_by_tag",
    "memory_through_step",
    "pareto",
    "storage_along_depth",
]


def verified(plan: Plan) -> Verification:
    predicted = plan.predicted
    plain = Measured(PROFILE.peak_bytes, PROFILE.saved_bytes, 40.0)
    policy = Measured(predicted.peak_bytes + 1000, predicted.saved_bytes, 50.0)
    conditions = ("cpu", PROFILE.batch_size, "2.13.0", 5)
    return Verification(plain, policy, (1e-3, 2e-3), Ratio(1.25, 1.2, 1.3), predicted, *conditions)


def fill(folder: Path, *, plan: Plan | None = None, found: Verification | None = None) -> Path:
    folder.mkdir(exist_ok=True)
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


@pytest.fixture(scope="module", name="whole")
def _whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with everything, whose verification says how it was made, and its report."""
    path = fill(tmp_path_factory.mktemp("run"), plan=PLAN, found=verified(PLAN))
    folder = Run(path, force=True)
    with running(["verify", "--steps", "5"]):
        folder.write(folder.verify, folder.verify.read_text("utf-8"), "inputs")
    assert report(path) == 0
    return folder


@pytest.fixture(scope="module", name="page")
def _page(whole: Run) -> Page:
    return Page(whole.report.read_text("utf-8"))


class TestPage:
    def test_needs_no_network_and_no_other_file(self, page: Page) -> None:
        assert all(link.startswith(("#", "data:text/csv;base64,")) for link in page.links)

    def test_links_contain_the_data_of_their_figures(self, page: Page) -> None:
        links = [link for link in page.links if link.startswith("data:")]
        tables = make_frames(RunResults(PROFILE, PLAN, verified(PLAN)))
        drawn = [name for name in tables if name != "alive"]
        assert len(links) == len(drawn)
        for link, name in zip(links, drawn, strict=True):
            assert base64.b64decode(link.partition(",")[2]).decode() == tables[name].to_csv(index=False)

    def test_ids_are_unique(self, page: Page) -> None:
        assert len(page.ids) == len(set(page.ids))

    def test_references_lead_somewhere(self, page: Page) -> None:
        assert {link[1:] for link in page.links if link.startswith("#")} <= set(page.ids)

    def test_names_of_models_and_layers_are_escaped(self, page: Page) -> None:
        assert "<tiny>.py" in page.words

    def test_shows_all_figures(self, page: Page) -> None:
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
        assert "predicted" not in page.text.split("Memory through")[0].replace("; predicted", "")

    def test_says_how_each_file_was_made_and_on_what(self, whole: Run, page: Page) -> None:
        made = whole.made(whole.verify)
        assert made is not None
        assert {"mesa-tune verify --steps 5", made.versions, made.date} <= set(page.words)
        assert f"Measured on cpu ({hardware()}), torch 2.13.0, {made.date}." in page.words


class TestSentence:
    """The report's first sentence, from what is known."""

    @staticmethod
    def said(results: RunResults) -> str:
        found = sentence(results)
        return f"{found.text} {found.source}".replace("\N{NO-BREAK SPACE}", " ")

    def test_of_a_verified_policy_is_measured(self) -> None:
        check = replace(verified(PLAN), gradient_noise_ratio=0.004)
        peak, plain = format_bytes(PLAN.predicted.peak_bytes + 1000), format_bytes(PROFILE.peak_bytes)
        assert self.said(RunResults(PROFILE, PLAN, check)) == (
            f"Trains at batch 8 in {peak} instead of {plain}, 25 % slower; "
            "the gradient’s noise grows by 0.4 %. Measured in real steps."
        )

    def test_names_what_is_predicted_beside_what_is_measured(self) -> None:
        check = replace(verified(PLAN), step_ratio=None)
        plan = replace(PLAN, predicted=replace(PLAN.predicted, gradient_noise_ratio=0.05))
        said = self.said(RunResults(PROFILE, plan, check))
        assert "noise grows by 5 %" in said
        assert said.endswith("Measured in real steps; time and noise predicted.")

    def test_of_a_plan_is_predicted(self) -> None:
        plan = replace(PLAN, predicted=replace(PLAN.predicted, step_ms=38.0, gradient_noise_ratio=2e-5))
        said = self.said(RunResults(PROFILE, plan))
        assert "5 % faster; the gradient’s noise grows by less than 0.01 %. Predicted" in said

    def test_claims_no_time_that_is_uncertain(self) -> None:
        check = replace(verified(PLAN), step_ratio=Ratio(0.6, 0.5, 1.1))
        said = self.said(RunResults(PROFILE, PLAN, check))
        assert ", a step’s time uncertain (50 % faster to 10 % slower)" in said
        said = self.said(RunResults(replace(PROFILE, time_spread=0.3), PLAN))
        assert "a step’s time uncertain" in said
        assert "faster" not in said

    def test_without_times_and_noise_says_neither(self) -> None:
        predicted = replace(PLAN.predicted, step_ms=None, gradient_noise_ratio=None, gradient_error=None)
        said = self.said(RunResults(PROFILE, replace(PLAN, predicted=predicted)))
        peaks = f"{format_bytes(predicted.peak_bytes)} instead of {format_bytes(PROFILE.peak_bytes)}"
        assert said == f"Trains at batch 8 in {peaks}. Predicted from the profile."

    def test_where_the_plain_step_does_not_fit(self) -> None:
        check = replace(verified(PLAN), baseline=Measured(None, None, None), step_ratio=None)
        assert "(predicted: the plain step does not fit)" in self.said(RunResults(PROFILE, PLAN, check))

    def test_of_a_plain_step_that_fits(self) -> None:
        plan = search_policy(PROFILE, "100%")
        assert "as it is: the plain step fits the budget" in self.said(RunResults(PROFILE, plan))

    def test_of_a_profile_says_what_uniform_bits_would_do(self) -> None:
        uniform = PROFILE.predict(Policy.uniform(level=16))
        said = self.said(RunResults(PROFILE))
        assert said.startswith(f"A plain step at batch 8 takes {format_bytes(PROFILE.peak_bytes)}, of which ")
        assert f"with 4 bits everywhere it would take {format_bytes(uniform.peak_bytes)}" in said
        assert "4 bits" in self.said(RunResults(synthetic_profile(1, known=False)))

    def test_of_a_script_predicts_nothing(self) -> None:
        said = self.said(RunResults(replace(PROFILE, script="python train.py")))
        assert "4 bits" not in said
        assert said.endswith("Observed in a step.")


class TestSeveralRuns:
    @pytest.fixture(name="folders")
    def _folders(self, tmp_path: Path) -> list[str]:
        fill(tmp_path / "a", plan=PLAN, found=verified(PLAN))
        fill(tmp_path / "b", plan=search_policy(PROFILE, "90%"))
        fill(tmp_path / "<c>")
        return [str(tmp_path / name) for name in ("a", "b", "<c>")]

    def test_make_one_page_in_the_folder_of_the_first(self, folders: list[str]) -> None:
        assert run(["report", *folders]) == 0
        page = Page((Path(folders[0]) / "comparison.html").read_text("utf-8"))
        assert set(folders) <= set(page.words)
        assert {f"memory_through_step_{number}" for number in range(3)} <= set(page.ids)
        assert {"measured", "predicted", "plain", "1.25×"} <= set(page.words)
        assert page.text.count("Trains at batch 8 in") == 2
        assert not (Path(folders[0]) / "report.html").exists()

    def test_make_one_table(self, folders: list[str]) -> None:
        for form in ("csv", "md", "json"):
            assert run(["report", *folders, "--format", form]) == 0
        frame = pd.read_csv(Path(folders[0]) / "comparison.csv")
        assert list(frame["source"]) == ["measured", "predicted", "plain"]
        assert list(frame["peak_bytes"])[::2] == [PLAN.predicted.peak_bytes + 1000, PROFILE.peak_bytes]
        lines = (Path(folders[0]) / "comparison.md").read_text("utf-8").splitlines()
        assert len(lines) == 5
        assert r"\<c\>" in lines[-1]
        assert len(json.loads((Path(folders[0]) / "comparison.json").read_text())["runs"]) == 3

    def test_have_no_figures_of_their_own(self, folders: list[str], capsys: Capture) -> None:
        assert run(["report", *folders, "--format", "png"]) == 1
        assert "--format html" in capsys.readouterr().err

    def test_one_run_named_twice_is_one(self, folders: list[str]) -> None:
        assert run(["report", folders[2], folders[2], "--format", "json"]) == 0
        assert (Path(folders[2]) / "report.json").is_file()


class TestCommand:
    def test_shows_what_is_there_and_grows_with_the_run(self, tmp_path: Path, capsys: Capture) -> None:
        assert report(fill(tmp_path)) == 0
        assert "No policy yet" in capsys.readouterr().out
        page = Page((tmp_path / "report.html").read_text("utf-8"))
        assert "No policy yet" in page.text
        assert "storage_along_depth" not in page.ids
        assert "of which" in page.text
        assert report(fill(tmp_path, plan=PLAN)) == 0
        assert "Nothing measured under the policy yet" in (tmp_path / "report.html").read_text("utf-8")
        assert sorted(path.stem for path in (tmp_path / "figures").glob("*.png")) == FIGURES
        assert sorted(path.stem for path in (tmp_path / "figures").glob("*.svg")) == FIGURES

    @pytest.mark.parametrize(
        ("profile", "command"),
        [
            (PROFILE, "mesa-tune search --budget 40%"),
            (replace(PROFILE, step_ms=None), "mesa-tune profile"),
            (replace(PROFILE, script="python train.py"), "mesa-tune init --from"),
        ],
        ids=["profile", "bytes only", "script"],
    )
    def test_without_plan_names_a_command_that_succeeds(self, profile: Profile, command: str) -> None:
        (said,) = RunResults(profile).missing
        assert f"`{command}`" in said

    def test_bytes_only_and_partial_profiles_have_no_front(self, tmp_path: Path) -> None:
        for profile in (synthetic_profile(1, known=False), replace(PROFILE, partial=True)):
            profile.save(tmp_path / "profile.json")
            assert report(tmp_path, "--force", "--format", "png") == 0
            assert not (tmp_path / "figures" / "pareto.png").exists()

    def test_leaves_out_a_verification_of_another_policy(self, tmp_path: Path, capsys: Capture) -> None:
        other = search_policy(PROFILE, "90%")
        assert report(fill(tmp_path, plan=PLAN, found=verified(other)), "--format", "json") == 0
        assert "measured another policy" in capsys.readouterr().err

    def test_refuses_a_plan_of_another_model(self, tmp_path: Path, capsys: Capture) -> None:
        fill(tmp_path, plan=PLAN)
        replace(PROFILE, layers_fingerprint="0ther").save(tmp_path / "profile.json")
        assert report(tmp_path) == 1
        assert "another model" in capsys.readouterr().err

    def test_does_not_overwrite_what_was_edited(self, tmp_path: Path, capsys: Capture) -> None:
        assert report(fill(tmp_path), "--format", "json") == 0
        (tmp_path / "report.json").write_text("mine")
        assert report(tmp_path, "--format", "json") == 1
        assert "--force" in capsys.readouterr().err
        assert (tmp_path / "report.json").read_text() == "mine"
        assert report(tmp_path, "--format", "json", "--force") == 0

    def test_json_names_the_files_on_standard_output_alone(self, tmp_path: Path, capsys: Capture) -> None:
        assert report(fill(tmp_path, plan=PLAN), "--json", "--format", "csv") == 0
        document = json.loads(capsys.readouterr().out)
        assert document["schema"] == "mesa-tune.report/1"
        assert all(Path(path).is_file() for path in document["files"])

    def test_bad_format_is_a_bad_value(self, tmp_path: Path, capsys: Capture) -> None:
        assert report(fill(tmp_path), "--format", "pdf") == 1
        assert "html" in capsys.readouterr().err

    def test_csv_holds_what_is_drawn(self, tmp_path: Path) -> None:
        assert report(fill(tmp_path, plan=PLAN), "--format", "csv") == 0
        for name in ("memory_by_layer", "layers"):
            frame = pd.read_csv(tmp_path / "figures" / f"{name}.csv")
            assert frame["after"].sum() == PLAN.predicted.saved_bytes
        assert not (tmp_path / "report.html").exists()

    def test_json_format_holds_plain_numbers(self, tmp_path: Path) -> None:
        assert report(fill(tmp_path, plan=PLAN), "--format", "json") == 0
        content = json.loads((tmp_path / "report.json").read_text())
        assert content["schema"] == "mesa-tune.tables/1"
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
