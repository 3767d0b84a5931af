"""The minibatch's own noise, and how large rounding errors are beside it."""

from __future__ import annotations

import json
import statistics
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mesa_tune as mt
from mesa_tune.profiler.errors.joint_error import FEWEST_NOISE_STEPS, NOISE_STEPS, JointError, representatives
from mesa_tune.profiler.errors.noise import Noise
from tests.builders import known, workload
from tests.profiler.models import three_classes
from tests.step_memory import regression, squares

OPTIONS = [mt.LayerSettings(level=level) for level in (4, 16)]


def classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 200), nn.GELU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 3))


def classifying(**step: Any) -> mt.Workload:
    return workload(classifier, three_classes, batch_size=64, **step)


@pytest.fixture(scope="module", name="profile")
def _profile() -> mt.Profile:
    return mt.profile(classifying(), options=OPTIONS, seeds=2)


def gradients_of(work: mt.Workload, steps: int) -> Tensor:
    """The gradients of whole steps, one in each row."""
    net, gradients = work.build(), []
    for draw in range(steps):
        net.zero_grad()
        for index in range(work.accumulation):
            work.compute_loss(net, work.make_batch(draw=draw * work.accumulation + index)).backward()
        parts = [parameter.grad for parameter in net.parameters() if parameter.grad is not None]
        gradients.append(torch.cat([part.flatten() for part in parts]).double() / work.accumulation)
    return torch.stack(gradients)


def by_hand(work: mt.Workload, steps: int) -> tuple[float, float]:
    """Variance and mean squared norm of the gradients of whole steps, all of them held."""
    table = gradients_of(work, steps)
    return float(table.var(0).sum()), float(table.square().sum(1).mean())


@pytest.mark.parametrize("accumulation", [1, 3])
def test_noise_is_the_variance_of_whole_steps(accumulation: int) -> None:
    work = classifying(accumulation=accumulation)
    for steps in (2, NOISE_STEPS):
        variance, mean = by_hand(work, steps)
        noise = JointError(work).noise(fewest=steps, most=steps)
        assert noise.relative == pytest.approx(variance / mean, rel=1e-5)


def test_noise_takes_more_steps_where_gradients_vary_more() -> None:
    def work(spread: float) -> mt.Workload:
        def batch(size: int) -> Tensor:
            return torch.randn(size, 32) * (1 + spread * torch.rand(()))

        return workload(lambda: nn.Linear(32, 8), batch, squares, batch_size=256)

    steady, varying = (JointError(work(spread)).noise().norms for spread in (0.0, 4.0))
    assert (len(steady), len(varying)) == (FEWEST_NOISE_STEPS, NOISE_STEPS)
    assert len(JointError(work(0.0)).noise(fewest=20).norms) == 24


def test_noise_changes_no_gradient_that_errors_are_relative_to() -> None:
    joint, policy, pairs = JointError(classifying()), mt.Policy.uniform(level=4), [(0, 0), (1, 0)]
    errors = joint.errors(policy, pairs)
    assert joint.noise() == JointError(classifying()).noise()
    assert joint.errors(policy, pairs) == errors
    norms = joint.noise().norms
    sizes = joint.norms(range(3))
    assert (norms[1] + norms[2]) / 2 / norms[0] == pytest.approx((sizes[1] + sizes[2]) / 2 / sizes[0])


def test_accumulation_averages_noise_away() -> None:
    one, eight = (JointError(classifying(accumulation=count)).noise() for count in (1, 8))
    assert eight.relative < 0.5 * one.relative


def true_ratio(work: mt.Workload, policy: mt.Policy) -> float:
    joint = JointError(work)
    relative = joint.errors(policy, [(draw, 7) for draw in range(32)])
    variance, _ = by_hand(work, 64)
    return statistics.fmean(map(float.__mul__, relative, joint.norms(range(32)))) / variance


def test_predicted_and_measured_ratio_are_those_of_many_batches(profile: mt.Profile) -> None:
    work, policy = classifying(), mt.Policy.uniform(level=4)
    check = mt.verify(work, policy, steps=1)
    sizes = (work.batch_size, 4 * work.batch_size)
    right, at_larger = (true_ratio(work.with_batch_size(size), policy) for size in sizes)
    predicted = profile.predict(policy).gradient_noise_ratio
    for found in (predicted, check.gradient_noise_ratio):
        assert found == pytest.approx(right, rel=0.5)
    larger = profile.predict(policy, batch_size=4 * work.batch_size).gradient_noise_ratio
    assert larger == predicted == pytest.approx(at_larger, rel=0.5)
    assert profile.predict(mt.Policy()).gradient_noise_ratio == 0


def test_prices_of_few_batches_predict_the_error_that_many_have(profile: mt.Profile) -> None:
    work, policy = classifying(), mt.Policy.uniform(level=16)
    joint = JointError(work)
    steps = len(joint.noise().norms)
    odd = range(1, steps, 2)
    squares = map(float.__mul__, joint.errors(policy, [(draw, 0) for draw in odd]), joint.norms(odd))
    variance, _ = by_hand(work, steps)
    ratio = profile.predict(policy).gradient_noise_ratio
    assert ratio == pytest.approx(statistics.fmean(squares) / variance, rel=1e-4)


def uneven(size: int) -> tuple[Tensor, Tensor]:
    """Half of the batches have outliers, which round badly, and small gradients."""
    x, target = torch.randn(size, 64).clamp(-1, 1), torch.randn(size, 8)
    if torch.rand(()) < 0.5:
        return x, 10 * target
    x[:, ::32] *= 30
    return x, 0.1 * target


def test_errors_count_by_the_gradients_of_their_batches() -> None:
    def model() -> nn.Module:
        layer = nn.Linear(64, 8)
        nn.init.zeros_(layer.weight)
        return nn.Sequential(nn.Hardtanh(-99, 99), layer)  # the batch itself would stay exact

    work, policy = workload(model, uneven, regression, batch_size=128), mt.Policy.uniform(level=16)
    profile, joint = mt.profile(work, options=OPTIONS, seeds=12), JointError(work)
    errors, sizes = [], []
    for draw in range(1, 12):
        errors.append(statistics.fmean(joint.errors(policy, [(draw, seed) for seed in range(4)])))
        sizes += joint.norms([draw])
    variance, _ = by_hand(work, NOISE_STEPS)
    squares = statistics.fmean(map(float.__mul__, errors, sizes))
    assert statistics.fmean(errors) * statistics.fmean(sizes) > 3 * squares
    found = profile.predict(policy).gradient_noise_ratio
    assert found == pytest.approx(squares / variance, rel=0.2)
    document = json.loads(json.dumps(profile.to_dict()))
    assert mt.Profile.from_dict(document).predict(policy).gradient_noise_ratio == found
    del document["gradient_norms"]  # of an older profile
    mean = statistics.fmean(errors) * statistics.fmean(sizes)
    older = mt.Profile.from_dict(document).predict(policy).gradient_noise_ratio
    assert older == pytest.approx(mean / variance, rel=0.2)


def test_it_is_in_the_documents(profile: mt.Profile) -> None:
    document = json.loads(json.dumps(profile.to_dict()))
    assert document["gradient_noise"] == JointError(classifying()).noise().relative
    assert mt.Profile.from_dict(document).noise == profile.noise
    for name in ("gradient_noise", "gradient_scale"):
        del document[name]
    assert mt.Profile.from_dict(document).predict(mt.Policy.uniform(level=16)).gradient_noise_ratio is None
    plan = mt.search_policy(profile, profile.peak_bytes, max_saved=profile.saved_bytes // 3)
    assert f"noise ratio {plan.predicted.gradient_noise_ratio:.1e}" in str(plan.policy.header.predicted)


def test_batches_that_are_all_the_same_have_no_ratio() -> None:
    def same(size: int) -> tuple[Tensor, Tensor]:
        return torch.ones(size, 20), torch.zeros(size, dtype=torch.long)

    noise = JointError(workload(classifier, same)).noise()
    assert noise.ratio([1e-3]) is None
    assert noise.ratio(None) is None
    assert Noise(0.5, 2.0).ratio([1e-3]) == pytest.approx(4e-3)


def test_batches_that_stand_for_all_have_their_mean_norm() -> None:
    """Of 24 batches, two have most of the gradient's squared norm."""
    norms = [0.3 + 0.02 * (7 * number % 22) for number in range(22)] + [5.8, 3.1]
    for count in (4, 6, 8):
        chosen = representatives(norms, count)
        mean = statistics.fmean(norms[position] for position in chosen)
        assert len(set(chosen)) == count
        assert 1 < mean / statistics.fmean(norms) < 1.8
    assert representatives(norms, 99) == list(range(24))


def test_batches_of_large_gradients_are_among_those_that_make_prices() -> None:
    """Every eighth batch is twice the others, and its gradient four times."""

    def batch(size: int) -> Tensor:
        scale = 2.0 if torch.rand(()) < 1 / 8 else 1.0
        return scale * torch.randn(size, 32)

    model = lambda: nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 8))  # noqa: E731
    work = workload(model, batch, squares, batch_size=64)
    profile = mt.profile(work, options=[mt.LayerSettings(level=4, group_size=64)], seeds=5)
    assert max(profile.gradient_norms) > 2
    uniform, draws, joint = mt.Policy.uniform(level=4), range(500, 548), JointError(work)
    errors = joint.errors(uniform, [(draw, 0) for draw in draws])
    measured = joint.noise(first=500, fewest=48, most=48).ratio(errors)
    assert 0.8 < known(profile.predict(uniform).gradient_noise_ratio) / known(measured) < 2.5


@pytest.mark.parametrize("is_zero", [True, False])
def test_weights_behind_others_that_are_zero_are_named(is_zero: bool) -> None:
    """As LoRA begins: of A no gradient is seen, and so no error."""

    def adapted() -> nn.Module:
        net = classifier()
        if is_zero:
            nn.init.zeros_(net[4].weight)  # type: ignore[index]
        return net

    found = mt.profile(workload(adapted, three_classes, batch_size=64), options=OPTIONS, seeds=1)
    notes = [note for note in found.notes if "exactly zero" in note]
    assert [note.split("'")[1] for note in notes] == ["0.weight"] * is_zero
    assert all(note.startswith("99%") for note in notes)
