"""The minibatch's own noise, and how large rounding errors are beside it."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import mesa_tune as mt
from mesa_tune.files import dump_json
from mesa_tune.measure.errors.joint_error import FEWEST_NOISE_STEPS, NOISE_STEPS, JointError
from mesa_tune.measure.errors.noise import Noise, Parts
from mesa_tune.measure.errors.sliced_noise import noise_of_steps
from mesa_tune.profiles.own_noise import OwnNoise, ParameterNoise
from tests.builders import known, workload
from tests.measure.by_hand import OwnByHand, gradients_of
from tests.measure.models import three_classes
from tests.step_memory import regression, squares

pytestmark = pytest.mark.usefixtures("without_variants")

OPTIONS = [mt.LayerSettings(level=level) for level in (4, 16)]


def classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 200), nn.GELU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 3))


def classifying(**step: Any) -> mt.Workload:
    return workload(classifier, three_classes, batch_size=64, **step)


@pytest.fixture(scope="module", name="profile")
def _profile() -> mt.Profile:
    return mt.profile(classifying(), options=OPTIONS, seeds=2)


@pytest.fixture(scope="module", name="check")
def _check() -> mt.Verification:
    return mt.verify(classifying(), mt.Policy.uniform(level=4), steps=1)


def own_of(work: mt.Workload, steps: int) -> OwnByHand:
    """The own noise of the parameters, from the gradients of the first steps."""
    return OwnByHand(work.build(), gradients_of(work, range(steps)))


def changes_of(work: mt.Workload, policy: mt.Policy, draws: range, seed: int = 0) -> Tensor:
    """The changes of gradients by a policy, one in each row."""
    return gradients_of(work, draws, policy, seed) - gradients_of(work, draws)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_noise_is_the_variance_of_whole_steps(accumulation: int) -> None:
    work = classifying(accumulation=accumulation)
    for steps in (2, NOISE_STEPS):
        table = gradients_of(work, range(steps))
        noise = JointError(work).noise(fewest=steps, most=steps)
        variance, mean = float(table.var(0).sum()), float(table.square().sum(1).mean())
        assert noise.relative == pytest.approx(variance / mean, rel=1e-5)
        own = OwnByHand(work.build(), table)
        assert [one.elements for one in noise.own.parameters] == own.elements.tolist()
        assert [one.noise for one in noise.own.parameters] == pytest.approx(own.variances.tolist(), rel=1e-4)


def test_noise_takes_more_steps_where_gradients_vary_more() -> None:
    def work(spread: float) -> mt.Workload:
        def batch(size: int) -> Tensor:
            return torch.randn(size, 32) * (1 + spread * torch.rand(()))

        return workload(lambda: nn.Linear(32, 8), batch, squares, batch_size=256)

    steady, varying = (JointError(work(spread)).noise().count for spread in (0.0, 4.0))
    assert (steady, varying) == (FEWEST_NOISE_STEPS, NOISE_STEPS)
    assert JointError(work(0.0)).noise(fewest=20).count == 24


def test_noise_changes_no_gradient_that_errors_are_relative_to() -> None:
    joint, policy, pairs = JointError(classifying()), mt.Policy.uniform(level=4), [(0, 0), (1, 0)]
    errors = joint.errors(policy, pairs)
    assert joint.noise() == JointError(classifying()).noise()
    assert [one.error for one in joint.errors(policy, pairs)] == [one.error for one in errors]


def test_accumulation_averages_noise_away() -> None:
    one, eight = (JointError(classifying(accumulation=count)).noise() for count in (1, 8))
    assert eight.relative < 0.5 * one.relative


def test_both_ratios_are_those_of_many_batches(profile: mt.Profile, check: mt.Verification) -> None:
    work, policy = classifying(), mt.Policy.uniform(level=4)
    both = (work, work.with_batch_size(4 * work.batch_size))
    changes = (changes_of(one, policy, range(32), seed=7) for one in both)
    right, at_larger = (own_of(one, 64).mean_ratio(each) for one, each in zip(both, changes, strict=True))
    predicted = profile.predict(policy).gradient_noise_ratio
    for found in (predicted, check.gradient_noise_ratio):
        assert found == pytest.approx(right, rel=0.5)
    larger = profile.predict(policy, batch_size=4 * work.batch_size).gradient_noise_ratio
    assert larger == predicted == pytest.approx(at_larger, rel=0.5)
    assert profile.predict(mt.Policy()).gradient_noise_ratio == 0


def test_prices_predict_the_error_of_whole_steps_on_their_batches(profile: mt.Profile) -> None:
    """The only batch that prices has the number 1."""
    work, policy = classifying(), mt.Policy.uniform(level=16)
    changes = changes_of(work, policy, range(1, 2))
    measured = known(profile.own_noise).ratio(Parts(work.build()).squares(split(work, changes[0])))
    assert profile.predict(policy).gradient_noise_ratio == pytest.approx(measured, rel=1e-4)


def split(work: mt.Workload, row: Tensor) -> list[Tensor]:
    """A row of `gradients_of` as the gradients of the parameters."""
    parameters = [one for one in work.build().parameters() if one.requires_grad]
    pieces = row.split([one.numel() for one in parameters])
    return [piece.view_as(one) for piece, one in zip(pieces, parameters, strict=True)]


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
    profile, own, draws = mt.profile(work, options=OPTIONS, seeds=12), own_of(work, NOISE_STEPS), range(1, 12)
    changes = [changes_of(work, policy, draws, seed) for seed in range(4)]
    ratios = np.mean([[own.ratio(change) for change in table] for table in changes], axis=0)
    sizes = np.array([own.ratio(gradient) for gradient in gradients_of(work, draws)])
    assert (ratios / sizes).mean() * sizes.mean() > 3 * ratios.mean()
    found = profile.predict(policy).gradient_noise_ratio
    assert found == pytest.approx(ratios.mean(), rel=0.2)
    document = json.loads(json.dumps(profile.to_dict()))
    assert mt.Profile.from_dict(document).predict(policy).gradient_noise_ratio == found


def test_it_is_in_the_documents(profile: mt.Profile) -> None:
    document = json.loads(json.dumps(profile.to_dict()))
    noise = noise_of_steps(JointError(classifying()))
    assert document["gradient_noise"] == noise.relative
    assert mt.Profile.from_dict(document).own_noise == profile.own_noise
    assert known(profile.own_noise) == noise.own
    del document["gradient_noise"]
    assert mt.Profile.from_dict(document).predict(mt.Policy.uniform(level=16)).gradient_noise_ratio is None
    plan = mt.search_policy(profile, profile.peak_bytes, max_saved=profile.saved_bytes // 3)
    assert f"noise ratio {plan.predicted.gradient_noise_ratio:.1e}" in str(plan.policy.header.predicted)


def test_batches_that_are_all_the_same_have_no_ratio() -> None:
    def same(size: int) -> tuple[Tensor, Tensor]:
        return torch.ones(size, 20), torch.zeros(size, dtype=torch.long)

    work, policy = workload(classifier, same, batch_size=64), mt.Policy.uniform(level=16)
    noise = JointError(work).noise(policy)
    assert noise.errors is not None
    assert (noise.measured_ratio, noise.worst, noise.own.is_known) == (None, None, False)
    profile = mt.profile(work, options=OPTIONS, seeds=1)
    predicted = profile.predict(policy)
    assert (predicted.gradient_noise_ratio, predicted.worst_own_ratio) == (None, None)
    assert known(predicted.gradient_error) > 0
    assert known(profile.noise_ratio(profile.assignment(policy))) > 0
    own = OwnNoise((ParameterNoise("weight", 100, 2.0),))
    assert Noise(0.5, own, 2, np.array([4e-3])).measured_ratio == pytest.approx(2e-3)
    assert Noise(0.5, own, 2).measured_ratio is None


def adapting(**step: Any) -> mt.Workload:
    """Training that begins as LoRA's does: behind weights of zero, all gradients are zero before a step."""

    def adapted() -> nn.Module:
        last = nn.Linear(200, 100)
        nn.init.zeros_(last.weight)
        return nn.Sequential(*list(classifier().children())[:4], last)

    return workload(adapted, three_classes, batch_size=64, **step)


def test_weights_behind_others_that_are_zero_are_named_and_have_no_say() -> None:
    found = mt.profile(adapting(steps_before=0), options=OPTIONS, seeds=1)
    (note,) = (note for note in found.notes if "exactly zero" in note)
    # 0.weight and 0.bias have ten parts each, 2.weight and 2.bias one.
    assert note.startswith("0.weight, part 1 of 10 and 21 more: ")
    predicted = found.predict(mt.Policy.uniform(level=16))
    assert 0 < known(predicted.worst_own_ratio) < math.inf
    assert known(predicted.worst_parameter).startswith("4.weight")
    dump_json(found.to_dict() | {"predicted": predicted.to_dict()})  # no number is NaN


def test_all_weights_have_a_say_after_the_first_steps(profile: mt.Profile) -> None:
    found = mt.profile(adapting(), options=OPTIONS, seeds=1)
    assert all(one.noise > 0 for one in found.parameters)
    (note,) = (note for note in found.notes if "exactly zero" in note)
    assert note.startswith("1 training step taken")
    assert "0.weight has a gradient of exactly zero" in note
    assert not any("exactly zero" in note for note in profile.notes)


def test_what_is_unknown_of_a_layer_leaves_the_worst_parameter_unknown(profile: mt.Profile) -> None:
    predicted = profile.predict(mt.Policy.uniform(level=16, ema_decay=0.9))
    assert (predicted.gradient_noise_ratio, predicted.worst_own_ratio) == (None, None)


def own(*parameters: tuple[int, float]) -> OwnNoise:
    """The own noise of parameters with so many elements and this noise."""
    return OwnNoise(tuple(ParameterNoise(f"p{n}", *one) for n, one in enumerate(parameters)))


def test_half_of_the_ratio_goes_by_elements_and_half_by_count() -> None:
    noise, squares = own((900, 9.0), (100, 4.0)), np.array([18.0, 2.0])
    assert noise.own(squares).tolist() == [2.0, 0.5]
    assert noise.ratio(squares) == pytest.approx(((0.9 * 2.0 + 0.1 * 0.5) + (2.0 + 0.5) / 2) / 2)
    # An error as large as the noise throughout.
    assert noise.ratio(np.array([9.0, 4.0])) == pytest.approx(1.0)


def test_noise_counts_as_at_least_a_thousandth_of_the_mean_per_element() -> None:
    """The mean is 0.5: of 100 elements, noise below 0.05 counts as 0.05."""
    for noise, counted in ((1e-9, 0.05), (0.04, 0.05), (0.06, 0.06)):
        found = own((100, 100.0 - noise), (100, noise))
        assert found.own(np.array([0.0, 0.1]))[1] == pytest.approx(0.1 / counted)
        assert found.ratio(np.array([0.0, 0.1])) == pytest.approx(0.1 / counted / 2)


def test_what_has_no_gradient_has_no_say_and_is_named() -> None:
    heard, squares = ((900, 9.0), (100, 4.0)), np.array([18.0, 2.0])
    noise = own(*heard, (10**6, 0.0), (1, 0.0))
    with_others = np.array([*squares, 0.0, 0.0])
    assert noise.ratio(with_others) == own(*heard).ratio(squares)
    assert noise.own(with_others).tolist() == [2.0, 0.5, 0.0, 0.0]
    assert noise.worst(with_others) == ("p0", 2.0)
    assert own((100, 0.0), (5, 1.0)).worst(np.ones(2)) is None
    (note,) = noise.notes
    assert note.startswith("p2 and 1 more: ")
    assert own(*heard).notes == ()
    assert own((5, 0.0)).notes[0].startswith("p0: ")
    assert own((5, 0.0)).ratio(np.zeros(1)) == own().ratio(np.zeros(0)) == 0.0


@pytest.mark.parametrize("factor", [1.0, 0.1])
def test_a_gradient_that_is_the_same_on_all_batches_has_the_least_noise(factor: float) -> None:
    """Of the bias; whether sums over batches round or not."""
    work = workload(
        lambda: nn.Linear(64, 8), lambda n: torch.randn(n, 64), lambda net, x: (factor * net(x)).mean()
    )
    noise = JointError(work).noise().own
    bias = noise.parameters[-1]
    mean = sum(one.noise for one in noise.parameters) / sum(one.elements for one in noise.parameters)
    assert (bias.name, noise.notes) == ("bias", ())
    assert 0 < bias.noise < 1e-3 * mean * bias.elements
    assert noise.variances[-1] == pytest.approx(1e-3 * mean * bias.elements)


def test_the_worst_parameter_has_64_elements_or_more() -> None:
    squares = np.array([9.0, 2.0, 1.0])
    assert own((63, 1.0), (64, 1.0), (1000, 1.0)).worst(squares) == ("p1", 2.0)
    assert own((64, 1.0), (64, 1.0), (1000, 1.0)).worst(squares) == ("p0", 9.0)
    assert own((63, 1.0), (63, 1.0), (63, 1.0)).worst(squares) is None
    assert OwnNoise(own((64, 1.0)).parameters, is_known=False).worst(squares[:1]) is None


class Fused(nn.Module):
    """Parameters of each kind that counts in parts or whole, and one that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.narrow = nn.Linear(32, 96), nn.Linear(80, 8)
        self.attend = nn.MultiheadAttention(32, 2)
        self.gpt = Conv1D(96, 32)  # type: ignore[no-untyped-call]
        self.uneven, self.long = nn.Linear(20, 29), nn.Linear(2, 400)
        self.words, self.bag = nn.Embedding(99, 4), nn.EmbeddingBag(99, 4)
        self.head = nn.Linear(4, 99, bias=False)
        self.head.weight = self.words.weight
        self.image, self.sound = nn.Conv2d(1, 64, 2), nn.Conv1d(4, 64, 3)
        self.experts, self.many = nn.Parameter(torch.ones(4, 8, 9)), nn.Parameter(torch.ones(40, 2, 2))
        self.frozen = nn.Parameter(torch.ones(9, 3), requires_grad=False)
        self.empty = nn.Parameter(torch.ones(0, 3, 3))


def test_parameters_count_in_parts() -> None:
    parts = Parts(Fused())
    counts = {
        name.partition(",")[0]: int(name.rpartition(" of ")[2]) if " of " in name else 1
        for name in parts.names
    }
    expected = {
        "qkv.weight": 3, "qkv.bias": 3, "narrow.weight": 10, "narrow.bias": 1,
        "attend.in_proj_weight": 3, "attend.in_proj_bias": 3, "attend.out_proj.weight": 1,
        "attend.out_proj.bias": 1, "gpt.weight": 3, "gpt.bias": 3, "uneven.weight": 1, "uneven.bias": 1,
        "long.weight": 12, "long.bias": 12, "words.weight": 1, "bag.weight": 1, "image.weight": 1,
        "image.bias": 1, "sound.weight": 1, "sound.bias": 1, "experts": 4, "many": 16, "empty": 1,
    }  # fmt: skip
    assert counts == expected
    assert len(parts.names) == len(parts.elements) == len(set(parts.names)) == sum(expected.values())
    fused = parts.names.index("qkv.weight, part 1 of 3")
    assert parts.names[fused : fused + 4] == [f"qkv.weight, part {n} of 3" for n in (1, 2, 3)] + [
        "qkv.bias, part 1 of 3"
    ]
    trained = [parameter for parameter in Fused().parameters() if parameter.requires_grad]
    assert sum(parts.elements) == sum(parameter.numel() for parameter in trained)
    assert parts.elements[fused : fused + 6] == [32 * 32] * 3 + [32] * 3


@pytest.mark.parametrize(
    ("name", "part"),
    [
        *((name, np.s_[32:64]) for name in ("qkv.weight", "qkv.bias", "attend.in_proj_bias", "gpt.bias")),
        ("gpt.weight", np.s_[:, 32:64]),
        ("narrow.weight", np.s_[:, 8:16]),
        ("experts", np.s_[1]),
    ],
)
def test_parts_are_along_the_larger_side_or_of_a_stack(name: str, part: Any) -> None:
    net = Fused()
    parts = Parts(net)
    gradient = [torch.zeros_like(parameter) for parameter in parts.parameters]
    where = next(n for n, parameter in enumerate(parts.parameters) if parameter is net.get_parameter(name))
    gradient[where][part] = 2.0
    found = parts.squares(gradient)
    (position,) = np.flatnonzero(found)
    assert parts.names[position].startswith(f"{name}, part 2 of ")
    assert found[position] == 4.0 * parts.elements[position]
    assert parts.squares(gradient, gradient).sum() == 0
    assert parts.squares([None] * len(gradient), gradient).tolist() == found.tolist()
    change = {parts.parameters[where]: gradient[where]}
    assert parts.squares_of(change).tolist() == parts.products(change, change).tolist() == found.tolist()


def test_the_noise_of_gradients_in_16_bits_is_that_of_their_values() -> None:
    """Neither squares nor sums fit into 16 bits."""
    net = nn.Linear(64, 64)
    for dtype, size in ((torch.float16, 3e4), (torch.bfloat16, 1.0)):
        first, second = (
            [(size * torch.randn(part.shape).clamp(-1, 1)).to(dtype) for part in net.parameters()]
            for _ in range(2)
        )
        exact = [float((a.double() - b.double()).square().sum()) for a, b in zip(first, second, strict=True)]
        assert Parts(net).squares(first, second).tolist() == pytest.approx(exact, rel=1e-12)
    work = workload(lambda: nn.Linear(64, 64).bfloat16(), lambda n: torch.randn(n, 64).bfloat16(), squares)
    noise = JointError(work).noise()
    own = own_of(work, noise.count)
    assert [one.noise for one in noise.own.parameters] == pytest.approx(own.variances.tolist(), rel=1e-4)


def test_verify_names_the_parameter_with_the_largest_own_ratio(check: mt.Verification) -> None:
    work, policy = classifying(), mt.Policy.uniform(level=4)
    steps = JointError(work).noise(first=500_000).count
    draws = range(500_000, 500_000 + steps)
    by_hand = OwnByHand(work.build(), gradients_of(work, draws))
    changes = changes_of(work, policy, draws[1::2])
    assert check.gradient_noise_ratio == pytest.approx(by_hand.mean_ratio(changes), rel=1e-4)
    ratios = torch.stack([by_hand.own(change) for change in changes]).mean(0)
    ratios[by_hand.elements < 64] = 0.0
    assert check.worst_own_ratio == pytest.approx(float(ratios.max()), rel=1e-4)
    assert check.worst_parameter == Parts(work.build()).names[int(ratios.argmax())]


def test_the_predicted_worst_own_ratio_is_that_of_whole_steps(profile: mt.Profile) -> None:
    work, policy = classifying(), mt.Policy.uniform(level=16)
    own = own_of(work, 64)
    ratios = torch.stack([own.own(each) for each in changes_of(work, policy, range(32))]).mean(0)
    predicted = profile.predict(policy)
    position = Parts(work.build()).names.index(known(predicted.worst_parameter))
    assert known(predicted.worst_own_ratio) == pytest.approx(float(ratios[position]), rel=0.5)
    ratios[own.elements < 64] = 0.0
    assert known(predicted.worst_own_ratio) == pytest.approx(float(ratios.max()), rel=0.5)
