"""The pages in a browser without network: no error, no overflow, and all that can be used on them works."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from mesa_tune.cli import run
from mesa_tune.policy import Policy
from mesa_tune.profiles.profile import Profile
from mesa_tune.reports.contents import RunResults, make_figures, make_frames
from mesa_tune.reports.html import render
from mesa_tune.reports.page import svg
from mesa_tune.search import Plan, search_policy
from mesa_tune.search.plan import Baseline
from tests.reports.test_report_page import PROFILE, fill, verified
from tests.synthetic import COARSE, synthetic_profile

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SCRIPT = "<script>alert(1)</script>"
PEAK = "loss.cross_entropy.0"
WIDTHS = (360, 768, 1440)

pytestmark = [
    pytest.mark.slow("browser"),
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: apt-get install chromium)"),
]


@pytest.fixture(scope="module", name="browser")
def _browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        yield browser
        browser.close()


def scripted(layer: str) -> Profile:
    """The profile of a model in which the name of `layer` is a script."""
    text = json.dumps(synthetic_profile(1, grid=COARSE).to_dict())
    return Profile.from_dict(json.loads(text.replace(layer, SCRIPT)))


@pytest.fixture(scope="module", name="report")
def _report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole report of a model with a layer whose name is a script."""
    folder = tmp_path_factory.mktemp("run")
    profile = scripted("blocks.0.q")
    plan = search_policy(profile, "70%")
    fill(folder, plan=plan, found=verified(plan))
    profile.save(folder / "profile.json")
    assert run(["report", "--run", str(folder), "--quiet"]) == 0
    return folder / "report.html"


@pytest.fixture(scope="module", name="comparison")
def _comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of three runs: one that peaks in a layer whose name is a script, and one of such a command."""
    home = tmp_path_factory.mktemp("runs")
    profile = scripted(PEAK)
    plan = search_policy(profile, "70%")
    fill(home / "verified", plan=plan, found=verified(plan))
    profile.save(home / "verified" / "profile.json")
    fill(home / "a-run-with-a-rather-long-name-of-its-own", plan=search_policy(PROFILE, "90%"))
    fill(home / "plain")
    unpriced = tuple(replace(layer, options=()) for layer in PROFILE.layers)
    observed = replace(PROFILE, script=f"python {SCRIPT}", layers=unpriced, ties=())
    observed.save(home / "plain" / "profile.json")
    folders = [str(home / name) for name in ("verified", "a-run-with-a-rather-long-name-of-its-own", "plain")]
    assert run(["report", *folders, "--quiet"]) == 0
    return home / "verified" / "comparison.html"


@pytest.fixture(name="context")
def _context(browser: Browser) -> Iterator[BrowserContext]:
    context = browser.new_context(color_scheme="light", offline=True)
    yield context
    context.close()


@pytest.fixture(name="faults")
def _faults() -> list[str]:
    """Messages and requests of the page."""
    return []


@pytest.fixture(name="page")
def _page(context: BrowserContext, faults: list[str], request: pytest.FixtureRequest) -> Iterator[Page]:
    """The report, or the page of `both`; at its end nothing may have gone wrong, or have been asked for."""
    path: Path = request.getfixturevalue(getattr(request, "param", "report"))
    page = context.new_page()
    page.on("console", lambda message: faults.append(message.text))
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("dialog", lambda dialog: faults.append(dialog.message))
    page.on("request", lambda request: faults.append(request.url))
    page.goto(path.as_uri())
    assert faults.pop(0) == path.as_uri()
    yield page
    assert not faults


both = pytest.mark.parametrize("page", ["report", "comparison"], indirect=True)


def column(page: Page, title: str) -> list[str]:
    """Texts of a column of the layer table, from top to bottom."""
    titles = page.locator("#layers th").all_text_contents()
    return page.locator(f"#layers td:nth-child({titles.index(title) + 1})").all_text_contents()


def overflow(page: Page) -> Any:
    """Pixels by which the page is wider than the window."""
    return page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")


@both
@pytest.mark.parametrize("width", WIDTHS)
def test_is_as_wide_as_the_window(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    assert overflow(page) == 0
    assert page.locator("figure svg").first.is_visible()


def test_begins_with_the_sentence(page: Page) -> None:
    text = page.locator("header .sentence").inner_text().replace("\N{NO-BREAK SPACE}", " ")
    assert text.startswith("Trains at batch 8 in ")
    assert "25 % slower" in text


def test_a_script_in_a_name_is_text(page: Page) -> None:
    assert any(SCRIPT in name for name in column(page, "layer"))
    assert page.locator("script").count() == 1


@pytest.mark.parametrize("page", ["comparison"], indirect=True)
def test_a_script_in_a_command_and_in_a_figure_is_text(page: Page, comparison: Path) -> None:
    models = page.locator("#runs td:nth-child(2)").all_text_contents()
    assert models[-1] == f"python {SCRIPT}"
    assert page.locator("script").count() == 1
    encoded = page.locator("figure a").first.get_attribute("href") or ""
    assert SCRIPT in base64.b64decode(encoded.partition(",")[2]).decode(), "no figure has the layer"


@pytest.mark.parametrize("page", ["comparison"], indirect=True)
def test_each_run_has_its_row_its_sentence_and_its_figure(page: Page) -> None:
    names = page.locator("#runs td:first-child").all_text_contents()
    assert len(names) == 3
    assert page.locator("section h2").all_text_contents() == names
    assert page.locator("section .sentence").count() == page.locator("section figure svg").count() == 3
    assert "25 % slower" in page.locator(".sentence").first.inner_text().replace("\N{NO-BREAK SPACE}", " ")


def test_layers_sort_by_numbers_and_by_names(page: Page) -> None:
    before = page.locator("#layers td:nth-child(5)")

    def numbers() -> list[int]:
        return [int(cell.get_attribute("data-value") or -1) for cell in before.all()]

    button = page.get_by_role("button", name="saved before")
    button.click()
    assert numbers() == sorted(numbers(), reverse=True)
    button.press("Enter")
    assert numbers() == sorted(numbers())
    assert len(set(numbers())) > 2
    page.get_by_role("button", name="tag", exact=True).click()
    assert column(page, "tag") == sorted(column(page, "tag"))
    assert page.locator("#layers th[aria-sort]").inner_text() == "tag"


def test_layers_are_filtered(page: Page) -> None:
    rows = page.locator("#layers tbody tr")
    every = rows.count()
    page.get_by_label("Filter the layers").fill("LAYERNORM")
    shown = [row for row in rows.all() if row.is_visible()]
    assert 0 < len(shown) < every
    assert all("layernorm" in row.inner_text() for row in shown)
    assert page.locator("#shown").inner_text() == f"{len(shown)} of {every} rows"


@both
def test_the_theme_is_chosen_and_remembered(page: Page, faults: list[str]) -> None:
    def background() -> Any:
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    light = background()
    page.get_by_text("dark", exact=True).click()
    dark = background()
    assert dark != light
    page.reload()  # the only request that the test makes
    faults.remove(page.url)
    assert background() == dark
    page.get_by_text("system", exact=True).click()
    assert background() == light
    page.emulate_media(color_scheme="dark")
    assert background() == dark
    page.get_by_text("light", exact=True).click()
    assert background() == light


def test_the_policy_is_copied(page: Page, context: BrowserContext, report: Path) -> None:
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Copy policy.txt").click()
    page.get_by_text("Copied").wait_for()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied == Plan.load(report.with_name("plan.json")).policy.dumps()


def test_without_a_clipboard_the_policy_is_selected(page: Page, report: Path) -> None:
    page.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    page.get_by_role("button", name="Copy policy.txt").click()
    page.get_by_text("Selected").wait_for()
    selected = str(page.evaluate("getSelection().toString()"))
    assert selected.strip() == Plan.load(report.with_name("plan.json")).policy.dumps().strip()


@both
def test_on_paper_everything_is_black_on_white(page: Page) -> None:
    page.get_by_text("dark", exact=True).click()
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    for unused in (".filter", ".theme", "figcaption a"):
        assert not any(found.is_visible() for found in page.locator(unused).all())


@both
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_is_accessible(page: Page, scheme: Any) -> None:
    page.emulate_media(color_scheme=scheme)
    page.evaluate(files("axe_playwright_python").joinpath("axe.min.js").read_text("utf-8"))
    # Letters in figures are paths, of which there are thousands; their svg elements are checked.
    found = page.evaluate("axe.run({exclude: ['svg > *']})")
    serious = [
        (violation["id"], [node["html"][:120] for node in violation["nodes"]])
        for violation in found["violations"]
        if violation["impact"] in ("serious", "critical")
    ]
    assert found["passes"]
    assert not serious


def test_hundreds_of_layers(context: BrowserContext, tmp_path: Path) -> None:
    profile = synthetic_profile(100, grid=COARSE, known=False)
    policy = Policy.uniform(level=16)
    plan = Plan(
        policy, profile.predict(policy), Baseline(profile.peak_bytes, profile.saved_bytes),
        None, profile.batch_size, profile.batch_size, 0.0, 0.0,
    )  # fmt: skip
    results = RunResults(profile, plan)
    tables = make_frames(results)
    path = tmp_path / "report.html"
    drawn = {name: svg(figure) for name, figure in make_figures(results, tables).items()}
    path.write_text(render(results, tables, drawn), "utf-8")
    assert len(profile.layers) > 600
    assert path.stat().st_size < 5_000_000
    page = context.new_page()
    page.set_viewport_size({"width": 360, "height": 900})
    page.goto(path.as_uri())
    assert page.locator("#layers tbody tr").count() >= len(profile.layers)
    assert overflow(page) == 0
    page.get_by_label("Filter the layers").fill("blocks.99.")
    assert page.locator("#layers tbody tr:visible").count() == 6
