"""Profile, predictions and search over settings of every codec."""

from __future__ import annotations

from pathlib import Path

import pytest

import mesa_tune as mt
from mesa_tune.measure.memory.meter import measure_step
from mesa_tune.policy.settings import LayerSettings
from mesa_tune.profiles.profile import Profile
from tests.builders import ViT, workload
from tests.step_memory import assigned

pytestmark = pytest.mark.usefixtures("without_variants")

OPTIONS = {
    "4 bits": LayerSettings(level=16),
    "running": LayerSettings(level=16, ema_decay=0.9),
    "by sample": LayerSettings(level=16, allocation="sample"),
    "dropped": LayerSettings(level=16, drop=0.9),
    "dropped, survivors exact": LayerSettings(drop=0.5, store="exact"),
    "a tenth of the rows": LayerSettings(level=16, rows=0.1),
    "half of the rows, exact": LayerSettings(rows=0.5, store="exact"),
    "offload": LayerSettings(store="offload"),
}
WORK = workload(lambda: ViT(depth=1))


@pytest.fixture(scope="module", name="profile")
def _profile() -> Profile:
    return mt.profile(WORK, options=list(OPTIONS.values()), seeds=1)


def uniform(profile: Profile, settings: LayerSettings) -> mt.Policy:
    return assigned(profile, lambda _: settings)


@pytest.mark.filterwarnings(
    "ignore:mesa-tune. .* frees nothing on a CPU", "ignore:mesa-tune. `rows` has no effect"
)
@pytest.mark.parametrize("name", OPTIONS)
def test_predicted_bytes_are_the_measured_ones(profile: Profile, name: str) -> None:
    policy = uniform(profile, OPTIONS[name])
    assert mt.Policy.parse(policy.dumps()) == policy
    model = mt.convert(WORK.build(), policy)

    def loss(model, batch):  # type: ignore[no-untyped-def]
        with mt.compress_saved(policy):
            return WORK.compute_loss(model, batch)

    measured = measure_step(model, WORK.make_batch(), loss, WORK.make_optimizer(model))
    predicted = profile.predict(policy)
    assert predicted.saved_bytes == pytest.approx(measured.saved_bytes, abs=64)
    if OPTIONS[name].rows < 1:
        assert predicted.peak_bytes == measured.peak_bytes
    elif name != "offload":
        most = 0.01 * measured.peak_bytes
        assert -0.003 * measured.peak_bytes <= predicted.peak_bytes - measured.peak_bytes <= most


def test_each_option_has_its_own_error_and_bytes(profile: Profile) -> None:
    layer = next(layer for layer in profile.layers if layer.name.endswith("fc1"))
    by_settings = {option.settings: option for option in layer.options}
    assert OPTIONS["offload"] not in by_settings
    names = "4 bits", "dropped", "dropped, survivors exact"
    four, dropped, exact = (by_settings[OPTIONS[name]] for name in names)
    assert dropped.bytes < four.bytes < exact.bytes < layer.bytes
    assert dropped.tensor_error > exact.tensor_error > four.tensor_error > 0
    unknown = [option.settings for option in layer.options if option.gradient_error is None]
    assert unknown == [OPTIONS["running"]]  # its ranges come from many steps


def test_a_search_can_choose_to_drop(profile: Profile) -> None:
    low = profile.predict(uniform(profile, OPTIONS["4 bits"]))
    only = profile.predict(uniform(profile, OPTIONS["dropped"]))
    assert only.saved_bytes < low.saved_bytes
    limit = (only.saved_bytes + low.saved_bytes) // 2
    plan = mt.search_policy(
        profile, low.peak_bytes, objective="error", max_saved=limit, forbid=["recompute", "derive"]
    )
    assert plan.predicted.saved_bytes <= limit
    chosen = set(profile.assignment(plan.policy).values())
    assert any(settings.drop for settings in chosen)


def test_a_saved_profile_knows_the_same(profile: Profile, tmp_path: Path) -> None:
    profile.save(tmp_path / "profile.json")
    again = Profile.load(tmp_path / "profile.json")
    for settings in OPTIONS.values():
        policy = uniform(profile, settings)
        assert again.predict(policy) == profile.predict(policy)
