"""Noise and gradient error at several points of training."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import mesa_tune as mt
from mesa_tune.commands.verify import describe
from mesa_tune.measure.errors.at_checkpoints import load_weights
from mesa_tune.measure.errors.joint_error import JointError
from tests.builders import mean_error, workload
from tests.measure.by_hand import OwnByHand, gradients_of
from tests.measure.models import three_classes

pytestmark = pytest.mark.usefixtures("without_variants")

POLICY = mt.Policy.uniform(level=16)


def normed() -> nn.Module:
    return nn.Sequential(
        nn.Linear(20, 128), nn.BatchNorm1d(128), nn.GELU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 3)
    )


@pytest.fixture(name="work", scope="module")
def _work(tmp_path_factory: pytest.TempPathFactory) -> mt.Workload:
    """A workload with the weights after 10 and 30 steps."""
    paths = [tmp_path_factory.mktemp("weights") / f"step{step}.pt" for step in (10, 30)]
    work = workload(normed, three_classes, batch_size=64, checkpoints=paths)
    net = work.build()
    optimizer = work.make_optimizer(net)
    for step in range(1, 31):
        work.take_step(net, work.make_batch(draw=100 + step), optimizer)
        if step in (10, 30):
            torch.save(net.state_dict(), paths[step == 30])
    return work


def at(work: mt.Workload, path: str | Path, draws: int, first_seed: int = 0) -> tuple[float, float, float]:
    """Error, noise and noise ratio of a model that is built with the weights of the file."""

    def trained() -> nn.Module:
        net = normed()
        net.load_state_dict(torch.load(path))
        return net

    there = replace(work, model=trained, checkpoints=())
    joint, pairs = JointError(there), [(draw, first_seed + draw) for draw in range(draws)]
    error, noise = mean_error(joint, POLICY, pairs), joint.noise()
    own = OwnByHand(there.build(), gradients_of(there, range(noise.count)))
    moved = [gradients_of(there, [draw], POLICY, seed) - gradients_of(there, [draw]) for draw, seed in pairs]
    return error, noise.relative, own.mean_ratio(torch.cat(moved))


def test_a_profile_measures_checkpoints_and_changes_nothing_else(work: mt.Workload) -> None:
    options = [mt.LayerSettings(level=16)]
    profile = mt.profile(work, options=options, seeds=1)
    assert [entry.checkpoint for entry in profile.checkpoints] == [str(path) for path in work.checkpoints]
    for entry in profile.checkpoints:
        error, noise, ratio = at(work, entry.checkpoint, 3)
        assert (entry.gradient_error, entry.gradient_noise) == (error, noise)
        assert entry.gradient_noise_ratio == pytest.approx(ratio, rel=1e-4)
    without = mt.profile(replace(work, checkpoints=()), options=options, seeds=1)
    assert (profile.own_noise, profile.error_floor) == (without.own_noise, without.error_floor)
    assert [one.ratios for layer in profile.layers for one in layer.options] == [
        one.ratios for layer in without.layers for one in layer.options
    ]
    assert mt.Profile.from_dict(json.loads(json.dumps(profile.to_dict()))) == profile


def test_verify_measures_the_policy_at_each_checkpoint(work: mt.Workload) -> None:
    check = mt.verify(work, POLICY, steps=1)
    assert len(check.checkpoints) == 2
    for entry in check.checkpoints:
        error, noise, ratio = at(work, entry.checkpoint, 3, 500_000)
        assert (entry.gradient_error, entry.gradient_noise) == (error, noise)
        assert entry.gradient_noise_ratio == pytest.approx(ratio, rel=1e-4)
    ratios = [check.gradient_noise_ratio, *(entry.gradient_noise_ratio for entry in check.checkpoints)]
    assert check.worst_noise_ratio == max(ratio for ratio in ratios if ratio is not None)
    assert mt.Verification.from_dict(json.loads(json.dumps(check.to_dict()))) == check
    shown = describe(check)
    assert all(any(Path(at.checkpoint).name in line for line in shown) for at in check.checkpoints)
    assert max(map(len, shown)) <= 80


def test_a_wrong_checkpoint_fails_before_layers_are_priced(work: mt.Workload, tmp_path: Path) -> None:
    shown: list[str] = []
    wrong = replace(work, checkpoints=[tmp_path / "step11.pt"])
    with pytest.raises(mt.WorkloadError, match=r"step11\.pt: no such file"):
        mt.profile(wrong, progress=lambda text, _: shown.append(text))
    assert not any("gradient errors" in text for text in shown)


def test_weights_that_cannot_be_trained_are_named(work: mt.Workload, tmp_path: Path) -> None:
    net = normed()
    load_weights(net, work.checkpoints[0])
    torch.nn.init.constant_(next(net.parameters()), torch.nan)
    torch.save(net.state_dict(), tmp_path / "step30.pt")
    wrong = replace(work, checkpoints=[work.checkpoints[0], tmp_path / "step30.pt"])
    with pytest.raises(mt.WorkloadError, match=r"checkpoint .*step30\.pt: .*nan"):
        mt.verify(wrong, POLICY, steps=1)
