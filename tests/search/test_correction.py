"""Prices as they become in training: a floor below which no layer's error counts."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest

from mesa_tune.policy.settings import LayerSettings
from mesa_tune.profiles.profile import Profile
from mesa_tune.search import search_policy, steps
from mesa_tune.search.again.correction import with_floor
from tests.builders import known
from tests.synthetic import COARSE, noisy, synthetic_profile

NUMB, JOINT = "blocks.1.norm", 1.5


@pytest.fixture(scope="module", name="profile")
def _profile() -> Profile:
    """A profile before training: one layer hardly feels rounding."""
    profile = noisy(synthetic_profile(2, grid=COARSE, seed=1, joint=JOINT))
    return replace(
        profile,
        layers=tuple(
            replace(layer, options=tuple(option.times(1e-6) for option in layer.options))
            if layer.name == NUMB
            else layer
            for layer in profile.layers
        ),
    )


@pytest.mark.parametrize("settings", COARSE, ids=lambda settings: settings.label)
def test_no_layer_counts_as_less_sensitive_than_the_mean_of_those_stored_alike(
    profile: Profile, settings: LayerSettings
) -> None:
    def ratios(of: Profile) -> list[float]:
        return [known(known(layer.like(settings)).noise_ratio) for layer in of.layers]

    before = ratios(profile)
    tied = {name for tie in profile.ties for name in tie.layers}
    others = profile.timeline.hooked if settings.level < 256 else ()  # hooks store 8 bits at least
    named = zip([layer.name for layer in profile.layers], before, strict=True)
    alike = [
        JOINT * ratio if name in tied else ratio for name, ratio in named if ratio and name not in others
    ]
    mean = profile.mean_ratio(settings)
    assert mean == pytest.approx(statistics.fmean(alike))
    assert ratios(with_floor(profile)) == pytest.approx([ratio and max(mean, ratio) for ratio in before])


def test_a_plan_does_not_bet_on_a_layer_that_feels_nothing_yet(
    profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def level() -> int:
        plan = search_policy(profile, "40%", objective="error")
        return profile.assignment(plan.policy)[NUMB].level

    guarded = level()
    monkeypatch.setattr(steps, "with_floor", lambda profile: profile)
    assert level() < guarded


def test_without_noise_prices_stay_as_they_are() -> None:
    silent = synthetic_profile(1, grid=COARSE)
    assert with_floor(silent) is silent
