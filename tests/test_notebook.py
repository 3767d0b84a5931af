"""What notebooks show of profiles, plans, policies and verifications: their numbers, escaped, and short."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

from mesa_tune.notebook import note, shown, table
from mesa_tune.policy import Policy
from mesa_tune.policy.settings import LayerSettings
from mesa_tune.profiles.verification import Measured, Ratio, Verification
from mesa_tune.search import search_policy
from mesa_tune.units import format_bytes
from tests.synthetic import COARSE, synthetic_profile

SCRIPT = "<script>alert(1)</script>"
PROFILE = replace(synthetic_profile(2, grid=COARSE), model=f"{SCRIPT}.py")
PLAN = search_policy(PROFILE, "70%")
CHECK = Verification(
    Measured(PROFILE.peak_bytes, PROFILE.saved_bytes, 40.0), Measured(5_000_000, 3_000_000, 50.0),
    (1e-3, 2e-3), Ratio(1.25, 1.2, 1.3), PLAN.predicted, SCRIPT, 8, "2.13.0", 5,
)  # fmt: skip
POLICY = Policy.from_assignments(
    [("fc", 0, SCRIPT, LayerSettings(level=16)), ("fc", 1, "b", LayerSettings())]
)
SHOWN = {"profile": PROFILE, "plan": PLAN, "policy": POLICY, "verification": CHECK}


class Parsed(HTMLParser):
    """Cells and tags of a piece of HTML."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open.append(tag)
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def parsed(value: Any) -> Parsed:
    return Parsed(value._repr_html_())


@pytest.mark.parametrize("name", SHOWN)
def test_is_short_and_escaped(name: str) -> None:
    found = parsed(SHOWN[name])
    assert not found.open
    assert found.tags <= {"div", "b", "table", "tr", "th", "td", "small"}
    assert len(SHOWN[name]._repr_html_()) < 8000  # type: ignore[attr-defined]
    if name != "plan":
        assert any(SCRIPT in word for word in found.words)


def test_profile_shows_the_layers_that_save_most() -> None:
    words = parsed(PROFILE).words
    assert format_bytes(PROFILE.peak_bytes) in words
    largest = sorted(PROFILE.layers, key=lambda layer: -layer.own_bytes)
    assert {layer.name for layer in largest[:10]} <= set(words)
    rest = largest[10:]
    assert f"{len(rest)} further layers: {format_bytes(sum(layer.own_bytes for layer in rest))}" in words
    assert "not known" in parsed(replace(PROFILE, step_ms=None)).words


def test_plan_shows_plain_beside_predicted() -> None:
    words = parsed(PLAN).words
    assert words[0] == f"Plan: budget {format_bytes(PLAN.budget_bytes or 0)}, batch 8"
    peaks = [format_bytes(step.peak_bytes) for step in (PLAN.baseline, PLAN.predicted)]
    assert words[words.index("peak") :][1:3] == peaks
    assert PLAN.won in words


def test_policy_shows_its_rules_up_to_a_number() -> None:
    assert "enable: True, level: 16, group_size: 256" in parsed(POLICY).words
    many = Policy.from_assignments([("fc", n, f"l{n}", LayerSettings(level=n + 2)) for n in range(30)])
    assert "10 further rules" in parsed(many).words
    assert parsed(Policy()).words[0] == "Policy"


def test_verification_shows_all_three() -> None:
    words = parsed(CHECK).words
    peaks = [format_bytes(step.peak_bytes) for step in (PROFILE, PLAN.predicted)]
    assert words[words.index("peak") :][1:4] == [*peaks, "5.00 MB"]
    assert "not known" in parsed(replace(CHECK, predicted=None)).words
    assert any("1.25 times the plain one" in word for word in words)


def test_parts_are_escaped() -> None:
    text = shown("<b>", table(["<i>"], [["a & b"]]), note("<u>"), note(""))
    assert Parsed(text).words == ["<b>", "<i>", "a & b", "<u>"]
