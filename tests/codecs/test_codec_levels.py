"""Fixed levels of derivatives: the optimal ones, what a layer then saves, and what refuses them."""

from __future__ import annotations

import copy
import math
from itertools import combinations, cycle, pairwise

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import mesa_tune as mt
from mesa_tune import notice
from mesa_tune.codecs import levels
from mesa_tune.formulas.activation import _fixed_levels, fixed_levels
from mesa_tune.formulas.curves import CURVES, FEW_VALUED
from mesa_tune.measure.memory.meter import measure_step
from mesa_tune.ops import DTYPES
from mesa_tune.ops.codecs import RAW
from mesa_tune.ops.maps import KINDS
from mesa_tune.ops.reference import levels as reference
from mesa_tune.policy.settings import LayerSettings
from tests.builders import known, policy_of, workload

pytestmark = pytest.mark.usefixtures("without_variants")

PARAMETERS = {"gelu": ("none",), "softplus": (1.0, 20.0), "elu": (1.0,), "celu": (1.0,)}


def test_a_small_codebook_by_hand() -> None:
    """Runs 0 | 4 4 | 9 and 10: the means are 0, 4 and (9 + 3 * 10) / 4, and Σ w (d - q)² is 0.75."""
    derivative = np.array([0.0, 4.0, 4.0, 9.0, 10.0])
    book = levels.optimal_codebook(derivative, np.array([1.0, 1.0, 1.0, 1.0, 3.0]), 3)
    assert book.values == (0.0, 4.0, 9.75)
    assert book.boundaries == (2.0, 6.5)


def cost(derivative: np.ndarray, weight: np.ndarray, ends: tuple[int, ...]) -> float:
    parts = [slice(*pair) for pair in pairwise((0, *ends, len(derivative)))]
    means = [np.average(derivative[part], weights=weight[part]) for part in parts]
    squares = [(derivative[part] - mean) ** 2 for part, mean in zip(parts, means, strict=True)]
    return float(weight @ np.concatenate(squares))


@pytest.mark.parametrize("count", [2, 3, 4])
def test_no_other_intervals_have_a_smaller_error(count: int) -> None:
    generator = np.random.default_rng(0)
    derivative, weight = np.sort(generator.normal(size=14)), generator.random(14) + 0.1
    book = levels.optimal_codebook(derivative, weight, count)
    found = tuple(int((derivative <= boundary).sum()) for boundary in book.boundaries)
    least = min(cost(derivative, weight, ends) for ends in combinations(range(1, 14), count - 1))
    assert cost(derivative, weight, found) == pytest.approx(least)


@pytest.mark.parametrize(("kind", "count"), [*zip(sorted(FEW_VALUED), cycle((2, 4, 8, 16)), strict=False)])
def test_each_value_is_the_mean_derivative_of_its_interval(kind: str, count: int) -> None:
    """The condition of the least ∫ w (f' - q)², with the density w of standard normal inputs."""
    parameters = PARAMETERS.get(kind, ())
    book, curve = fixed_levels(kind, parameters, count), CURVES[kind]
    assert list(book.boundaries) == sorted(book.boundaries)
    x = torch.linspace(-6, 6, 4001, dtype=torch.float64)
    saved = curve.saved(x, curve.value(x, *parameters), *parameters)
    weight, slope = (-x * x / 2).exp(), curve.back(torch.ones_like(x), saved)
    stored = torch.tensor(book.values, dtype=torch.float64)
    codes = torch.bucketize(saved, torch.tensor(book.boundaries, dtype=torch.float64))
    decoded = curve.back(torch.ones_like(stored), stored)
    for code in codes.unique().tolist():
        part = codes == code
        mean = (weight * slope)[part].sum() / weight[part].sum()
        assert decoded[code].item() == pytest.approx(mean.item(), abs=0.02)


def test_fake_tensors_have_the_same_codebook() -> None:
    with FakeTensorMode():
        book = fixed_levels("softplus", (2.0, 20.0), 7)
    _fixed_levels.cache_clear()
    assert fixed_levels("softplus", (2.0, 20.0), 7) == book


@pytest.mark.parametrize("count", [2, 3, 5, 16])
@pytest.mark.parametrize(("kind", "dtype"), [*zip(["", "gelu", "silu"], DTYPES, strict=True)])
def test_native_kernels_give_the_bytes_of_the_reference(kind: str, dtype: torch.dtype, count: int) -> None:
    values = torch.linspace(-1, 1, count).tolist()
    boundaries = [(low + high) / 2 for low, high in pairwise(values)]
    for size in (0, 1, 7, 8, 9, 1023, 1024, 1025, 5000):
        x = torch.randn(size).to(dtype)
        packed = RAW.pack_levels(x, boundaries, KINDS.get(kind, 0))
        for one, other in zip(packed, reference.pack_levels(x, boundaries, KINDS.get(kind, 0)), strict=True):
            assert torch.equal(one, other)
        data, offset = packed
        decoded = RAW.unpack_levels(data, offset, values, x.shape, dtype)
        assert decoded.dtype == dtype
        assert torch.equal(decoded, reference.unpack_levels(data, offset, values, x.shape, dtype))
        assert data.numel() == (count - 1).bit_length() * math.ceil(size / 8)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_element_that_is_not_finite_makes_all_nan(bad: float) -> None:
    x = torch.randn(3000)
    x[2900] = bad
    for ops in (RAW, reference):
        data, offset = ops.pack_levels(x, [0.0], 0)
        assert ops.unpack_levels(data, offset, [-1.0, 1.0], (3000,), torch.float32).isnan().all()


def gradient(made: nn.Module, x: Tensor, policy: mt.Policy | None, seed: int = 1) -> Tensor:
    model = copy.deepcopy(made)
    model = model if policy is None else mt.convert(model, policy, min_elements=0, seed=seed)
    leaf = x.clone().requires_grad_()
    (found,) = torch.autograd.grad((model(leaf * 1) * torch.linspace(-1, 1, 64)).sum(), leaf)
    return found


@pytest.mark.parametrize("made", [nn.GELU(), nn.SiLU(), nn.ELU(), nn.Mish(), nn.Softplus()], ids=str)
def test_gradients_have_the_derivative_at_its_level(made: nn.Module) -> None:
    x = torch.randn(100, 64).to(torch.bfloat16 if isinstance(made, nn.SiLU | nn.Mish) else torch.float32)
    exact = gradient(made, x, None).double()
    errors = []
    for level in (2, 4, 8, 16):
        policy = mt.Policy.uniform(level, store="levels")
        found = gradient(made, x, policy)
        assert len((found.double() / torch.linspace(-1, 1, 64)).unique()) <= 64 * level
        assert torch.equal(found, gradient(made, x, policy, seed=2)), "no seed matters"
        errors.append(((found - exact).square().sum() / exact.square().sum()).item())
    assert errors[0] < 0.25
    assert all(second < first for first, second in pairwise(errors))
    assert errors[-1] < 0.004


def test_one_bit_of_gelu_is_a_thirty_second_and_errs_less_than_quantizing() -> None:
    made = nn.Sequential(nn.GELU())
    x = torch.randn(512, 64)
    exact = gradient(made, x, None)
    found, rounded = (gradient(made, x, mt.Policy.uniform(2, **given)) for given in ({"store": "levels"}, {}))
    assert 4 * (found - exact).square().sum() < (rounded - exact).square().sum()
    model = mt.convert(copy.deepcopy(made), mt.Policy.uniform(2, store="levels"))
    node = model((x * 1).requires_grad_() * 1).grad_fn
    assert node is not None
    stored = sum(tensor.untyped_storage().nbytes() for tensor in node.saved_tensors)
    assert stored == x.numel() // 8 + 4


def test_too_many_levels_are_refused() -> None:
    with pytest.raises(ValueError, match="`store: levels` has 2 to 16 levels, but got level 17"):
        LayerSettings(level=17, store="levels")
    policy = policy_of("on gelu:\n  by_index: all\n  store: levels\n")
    with pytest.raises(mt.PolicyError, match="2 to 16 levels"):
        policy.settings("gelu", 0, "act")


def test_other_functions_quantize_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notice, "_given", set())
    made, x = nn.LayerNorm(64), torch.randn(200, 64)
    rounded = gradient(made, x, mt.Policy.uniform(16))
    with pytest.warns(UserWarning, match="`store: levels` has no effect on 'layer_norm'"):
        found = gradient(made, x, mt.Policy.uniform(16, store="levels"))
    assert torch.equal(found, rounded)


class Gelu(nn.Module):
    """The activation of GPT-2, written by hand."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        return y


@pytest.mark.parametrize("made", [Gelu(), nn.GELU(), nn.SiLU(), nn.Mish(), nn.ELU(), nn.Softplus()], ids=str)
def test_errors_do_not_grow_without_bound_as_inputs_do(made: nn.Module) -> None:
    """In a training they do grow: a search decides before it."""
    for scale in (0.02, 1.0, 20.0):  # "pow" and "tanh" quantize
        x = scale * torch.randn(400, 64)
        exact = gradient(made, x, None)
        found = gradient(made, x, policy_of(FEW), seed=2)
        assert (found - exact).square().sum() < 0.7 * exact.square().sum(), scale


FEW = "on gelu silu pointwise:\n  by_index: all\n  level: 2\n  store: levels\n"
WORK = workload(
    lambda: nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 8)),
    lambda n: (torch.randn(n, 64), torch.randint(8, (n,))),
    batch_size=256,
)


@pytest.fixture(scope="module")
def profile() -> mt.Profile:
    options = [LayerSettings(level=level) for level in (2, 4, 16)]
    options += [LayerSettings(level=level, store="levels") for level in (2, 4, 16)]
    return mt.profile(WORK, options=options, seeds=2)


def test_a_profile_prices_them_for_activations_that_share_nothing(profile: mt.Profile) -> None:
    priced = {
        layer.name: {option.settings.level for option in layer.options if option.settings.store == "levels"}
        for layer in profile.layers
    }
    assert {name: levels for name, levels in priced.items() if levels} == {"1": {2, 4, 16}}
    two = profile.layer("1").options[profile.layer("1").positions[LayerSettings(level=4, store="levels")]]
    assert known(two.bias) == pytest.approx(known(two.gradient_error), rel=0.5), "the whole error is a bias"


@pytest.mark.parametrize("derives", [False, True])
def test_predicted_bytes_are_measured_bytes(profile: mt.Profile, derives: bool) -> None:
    text = "on fc:\n  by_index: all\n  level: 16\n" + "  store: derive\n" * derives
    policy = policy_of(text + "on gelu pointwise:\n  by_index: all\n  level: 4\n  store: levels\n")
    model = mt.convert(WORK.build(), policy, seed=0)
    memory = measure_step(model, WORK.make_batch(), WORK.compute_loss, WORK.make_optimizer(model))
    assert profile.predict(policy).saved_bytes == memory.saved_bytes


def test_a_search_takes_them_and_not_where_they_are_forbidden(profile: mt.Profile) -> None:
    limit = int(0.08 * profile.saved_bytes)
    plan = mt.search_policy(profile, "100%", max_saved=limit, objective="error", trials=0)
    stores = {name: settings.store for name, settings in profile.assignment(plan.policy).items()}
    assert stores["1"] == "levels"
    assert mt.Policy.parse(plan.policy.dumps()) == plan.policy
    other = mt.search_policy(profile, "100%", max_saved=limit, objective="error", trials=0, forbid=["levels"])
    assert "levels" not in {settings.store for settings in profile.assignment(other.policy).values()}
