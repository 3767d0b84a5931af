"""The page in a browser without network: no error, no overflow, and all that can be used on it works."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from mesa_tune.cli import run
from mesa_tune.policy import Policy
from mesa_tune.profiler.profile import Profile
from mesa_tune.reports.contents import RunResults, make_figures, make_frames
from mesa_tune.reports.html import render
from mesa_tune.reports.page import svg
from mesa_tune.search import Plan, search_policy
from mesa_tune.search.plan import Baseline
from tests.reports.test_report_page import fill, verified
from tests.synthetic import COARSE, synthetic_profile

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SCRIPT = "<script>alert(1)</script>"
WIDTHS = (360, 768, 1440)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: apt-get install chromium)")


@pytest.fixture(scope="module", name="browser")
def _browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        yield browser
        browser.close()


@pytest.fixture(scope="module", name="report")
def _report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole report of a model with a layer whose name is a script."""
    folder = tmp_path_factory.mktemp("run")
    text = json.dumps(synthetic_profile(1, grid=COARSE).to_dict())
    profile = Profile.from_dict(json.loads(text.replace("blocks.0.q", SCRIPT)))
    plan = search_policy(profile, "70%")
    fill(folder, plan=plan, found=verified(plan))
    profile.save(folder / "profile.json")
    assert run(["report", "--run", str(folder), "--quiet"]) == 0
    return folder / "report.html"


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
def _page(context: BrowserContext, report: Path, faults: list[str]) -> Iterator[Page]:
    """The page; at the end of the test nothing may have gone wrong, and nothing been asked for."""
    page = context.new_page()
    page.on("console", lambda message: faults.append(message.text))
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("dialog", lambda dialog: faults.append(dialog.message))
    page.on("request", lambda request: faults.append(request.url))
    page.goto(report.as_uri())
    assert faults.pop(0) == report.as_uri()
    yield page
    assert not faults


def column(page: Page, title: str) -> list[str]:
    """Texts of a column of the layer table, from top to bottom."""
    titles = page.locator("#layers th").all_text_contents()
    return page.locator(f"#layers td:nth-child({titles.index(title) + 1})").all_text_contents()


def overflow(page: Page) -> int:
    """Pixels by which the page is wider than the window."""
    width: int = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    return width


@pytest.mark.parametrize("width", WIDTHS)
def test_is_as_wide_as_the_window(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    assert overflow(page) == 0
    assert page.locator("#memory_through_step svg").is_visible()


def test_begins_with_the_sentence(page: Page) -> None:
    text = page.locator("header .sentence").inner_text().replace("\N{NO-BREAK SPACE}", " ")
    assert text.startswith("Trains at batch 8 in ")
    assert "25 % slower" in text


def test_a_script_in_a_name_is_text(page: Page) -> None:
    assert any(SCRIPT in name for name in column(page, "layer"))
    assert page.locator("script").count() == 1


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


def test_the_theme_is_chosen_and_remembered(page: Page, faults: list[str]) -> None:
    def background() -> str:
        color: str = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return color

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


def test_on_paper_everything_is_black_on_white(page: Page) -> None:
    page.get_by_text("dark", exact=True).click()
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not page.get_by_label("Filter the layers").is_visible()
    assert not page.locator(".theme").is_visible()


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
