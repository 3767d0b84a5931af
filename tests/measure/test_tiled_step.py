"""The profile of a step in which a loss goes backward in slices, against such steps."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

import mesa_tune as mt
from mesa_tune.profiles.profile import Profile
from mesa_tune.profiles.tiled_step import SLICES
from tests.builders import known, language_workload, workload
from tests.measure.models import language_profile
from tests.step_memory import second_step

FOUR = mt.LayerSettings(level=16)
AGAIN = mt.LayerSettings(level=256, store="recompute")


@pytest.fixture(scope="module", name="profile")
def _profile() -> Profile:
    return language_profile()


POLICIES: dict[str, Callable[[], mt.Policy]] = {
    "nothing else": lambda: mt.Policy(()),
    "uniform": lambda: mt.Policy.uniform(level=16),
    "one block again": lambda: mt.Policy.uniform(level=16).rerunning({"blocks.1": AGAIN}),
    "all blocks again": lambda: mt.Policy(()).rerunning({"blocks.0": AGAIN, "blocks.1": AGAIN}),
}


@pytest.mark.parametrize("name", POLICIES)
def test_predicted_bytes_are_those_of_a_step_with_slices(profile: Profile, name: str) -> None:
    policy = known(profile.tiled).policy(POLICIES[name]())
    predicted, found = profile.predict(policy), second_step(language_workload(), policy)
    assert predicted.saved_bytes == found.saved_bytes
    assert predicted.peak_bytes == found.peak_bytes
    assert predicted.peak_bytes < profile.predict(POLICIES[name]()).peak_bytes


def test_slices_add_time_and_no_error(profile: Profile) -> None:
    assert profile.tiled is not None
    assert (profile.tiled.losses, profile.tiled.heads) == (("loss.cross_entropy.0",), ("head",))
    alone, uniform = mt.Policy(()), mt.Policy.uniform(level=16)
    assert profile.predict(profile.tiled.policy(alone)).gradient_error == 0.0
    before, after = profile.predict(uniform), profile.predict(profile.tiled.policy(uniform))
    assert known(after.gradient_error) < known(before.gradient_error)  # the head's input is exact now
    plain, tiled = (profile.predict(policy).step_ms for policy in (alone, profile.tiled.policy(alone)))
    assert tiled == pytest.approx(known(plain) + known(profile.tiled.added_ms))


def test_a_saved_profile_predicts_slices(profile: Profile) -> None:
    policy = known(profile.tiled).policy(mt.Policy.uniform(level=16))
    loaded = Profile.from_dict(json.loads(json.dumps(profile.to_dict())))
    assert loaded.predict(policy) == profile.predict(policy)


def test_other_slices_are_not_predicted(profile: Profile) -> None:
    with pytest.raises(mt.RunError, match=rf"`tile: 3` of .*: the profile has traced `tile: {SLICES}` of"):
        profile.predict(mt.Policy.uniform(level=16, tile=3))


def classifier(model: Callable[[], nn.Module], batch_size: int) -> mt.Workload:
    def batch(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(n, 64), torch.zeros(n, dtype=torch.int64)

    return workload(model, batch, batch_size=batch_size)


def test_a_small_loss_is_not_traced_in_slices() -> None:
    small = classifier(lambda: nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 4)), 64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = mt.profile(small, options=[])
    assert found.tiled is None
    with pytest.raises(mt.RunError, match="the profile has traced no step with slices"):
        found.predict(mt.Policy.uniform(level=16, tile=8))


def test_slices_without_effect_warn_nobody() -> None:
    """Compressed inputs of 96 columns are stored in another shape, and cannot be cut into slices."""
    work = classifier(lambda: nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96), nn.Linear(96, 256)), 2048)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert mt.profile(work, options=[]).tiled is not None
