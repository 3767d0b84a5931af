"""Storing some rows: which, with what probability, and that gradients are unbiased in fewer than 1 bit."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import mesa_tune as mt
from mesa_tune import notice
from mesa_tune.codecs import Spec, rows
from mesa_tune.ops.reference.sampling import UNIT, probabilities, weights_of
from mesa_tune.policy.settings import LayerSettings
from tests.builders import Calling, spec, workload

pytestmark = pytest.mark.usefixtures("without_variants")

KEYS = 400
UNBIASED = 4
"""Largest squared error of a mean over its variance: all of it comes from one random number per key."""


def sampled(share: float, **settings: Any) -> Spec:
    return spec(rows=share, **settings).along(-1)


def decoded(x: Tensor, one: Spec, key: int) -> Tensor:
    return rows.decode(rows.encode(x, one, torch.tensor([key])), x.shape, x.dtype, one)


def test_a_small_matrix_by_hand() -> None:
    """Norms 4, 1, 1, 2 and a mean of 2: weights 4.2, 1.2, 1.2, 2.2 of 8.8; 2 rows of 4."""
    x = torch.tensor([[4.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 2.0]])
    chances = torch.tensor([4.2, 1.2, 1.2, 2.2]) * 2 / 8.8
    drawn = torch.stack([decoded(x, sampled(0.5, store="exact"), key) for key in range(KEYS)])
    stored = drawn.abs().sum(-1) > 0
    assert (stored.sum(1) == 2).all()
    assert (stored.float().mean(0) - chances).abs().max() < 4 * math.sqrt(0.25 / KEYS)
    torch.testing.assert_close(drawn, torch.where(stored[..., None], x / chances[:, None], 0.0))


@pytest.mark.parametrize("shape", [(), (9,)], ids=str)
def test_a_vector_is_one_row(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    assert torch.equal(decoded(x, sampled(0.7, store="exact"), 3), x)


def test_rows_that_are_large_enough_are_stored_for_certain_and_as_they_are() -> None:
    x = torch.randn(50, 8)
    x[[7, 31]] *= 1000
    for key in range(20):
        copy_of_x = decoded(x, sampled(0.1, store="exact"), key)
        assert torch.equal(copy_of_x[[7, 31]], x[[7, 31]])
        assert int((copy_of_x.abs().sum(1) > 0).sum()) == 5


@pytest.mark.parametrize("share", [0.004, 0.5, 0.999])
@pytest.mark.parametrize("kind", ["random", "equal", "zero", "few", "wide"])
def test_as_many_rows_as_asked_each_once(kind: str, share: float) -> None:
    norms = {
        "random": torch.rand(777),
        "equal": torch.full((777,), 0.3),
        "zero": torch.zeros(777),
        "few": torch.rand(777) * (torch.rand(777) < 0.02),
        "wide": torch.randn(777).mul(20).exp().nan_to_num(),
    }[kind]
    one = sampled(share, store="exact")
    for key in range(30):
        index, values = rows.encode(norms[:, None], one, torch.tensor([key]))
        assert index.numel() == math.ceil(777 * share - 1e-6) == len(index.unique())
        assert torch.equal(index, index.sort().values)
        assert values.isfinite().all()


def test_probabilities_sum_to_the_number_of_rows() -> None:
    weights = weights_of(torch.rand(1000) ** 4).sort(descending=True).values
    for count in (1, 10, 500, 1000):
        chances = probabilities(weights, count)
        assert chances.max() <= UNIT
        assert 0 <= int(chances.sum()) - count * UNIT <= 3 * 1000
        ratio = chances / weights  # equal for all that are below 1
        assert torch.allclose(ratio[chances < UNIT], ratio[-1], rtol=1e-6)


def test_more_rows_with_nan_than_are_stored_show_some_of_them() -> None:
    x = torch.randn(64, 4)
    x[::2, 1] = math.nan
    copy_of_x = decoded(x, sampled(0.25, store="exact"), 3)
    assert copy_of_x.isnan().any(1).sum() == 16
    assert decoded(torch.randn(64, 4), sampled(0.25, store="exact"), 3).isfinite().all()


def test_equal_tensors_store_equal_rows_and_no_generator_moves() -> None:
    def encode(x: Tensor, key: int = 5) -> list[Tensor]:
        return rows.encode(x, sampled(0.1), torch.tensor([key]))

    x, state = torch.randn(300, 16), torch.get_rng_state()
    one = encode(x)
    assert all(map(torch.equal, one, encode(x.clone())))
    assert torch.equal(torch.get_rng_state(), state)
    for other_key in (6, 5 + (1 << 40)):
        assert not torch.equal(one[0], encode(x, other_key)[0])
    assert not torch.equal(one[0], encode(x + 1e-3)[0]), "draws are shared"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_tenth_of_the_rows_in_four_bits_takes_less_than_half_a_bit(dtype: torch.dtype) -> None:
    x = torch.randn(32, 64, 128).to(dtype)
    parts = rows.encode(x, sampled(0.1, level=16), torch.tensor([1]))
    stored = sum(part.untyped_storage().nbytes() for part in parts)
    assert stored == rows.packed_bytes(x.shape, sampled(0.1, level=16), x.element_size())
    assert 8 * stored / x.numel() < 0.46


def sides(weights: Tensor, count: int) -> Iterator[tuple[float, Tensor]]:
    """Each set of rows that systematic sampling can choose, and how likely it is, from the definition."""
    ordered, order = weights.sort(descending=True, stable=True)
    ends = (probabilities(ordered, count) / UNIT).cumsum(0)
    cuts = sorted({0.0, 1.0, *(ends % 1).tolist()})
    for low, high in pairwise(cuts):
        points = (low + high) / 2 + torch.arange(count)
        yield high - low, order[torch.searchsorted(ends, points)]


def test_every_row_is_as_likely_as_its_weight_says() -> None:
    weights = weights_of(torch.rand(40))
    likely = torch.zeros(40)
    for share, chosen in sides(weights, 10):
        likely[chosen] += share
    order = weights.argsort(descending=True, stable=True)
    assert torch.allclose(likely[order], probabilities(weights[order], 10) / UNIT, atol=1e-6)


def test_the_gradient_of_a_linear_layer_has_the_mean_and_the_variance_of_the_formula() -> None:
    x, grad, share = torch.randn(40, 6) * torch.rand(40, 1).exp(), torch.randn(40, 3), 0.25
    exact = grad.T @ x
    weights = weights_of(x.norm(dim=1))
    ordered, order = weights.sort(descending=True, stable=True)
    chances = torch.empty(40).scatter_(0, order, (probabilities(ordered, 10) / UNIT).float())
    variance = sum(
        likely * float(((grad[chosen] / chances[chosen, None]).T @ x[chosen] - exact).square().sum())
        for likely, chosen in sides(weights, 10)
    )
    one = sampled(share, store="exact")
    drawn = torch.stack([grad.T @ decoded(x, one, key) for key in range(4 * KEYS)])
    errors = (drawn - exact).square().sum((1, 2))
    assert (drawn.mean(0) - exact).square().sum() < 3 * variance / len(drawn)
    assert float(errors.mean()) == pytest.approx(variance, rel=0.15)
    independent = ((1 / chances - 1) * grad.square().sum(1) * x.square().sum(1)).sum()
    assert variance == pytest.approx(float(independent), rel=0.3)


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(24, 16), (4, 20, 24)),
    "conv1d": (lambda: Conv1D(16, 24), (4, 20, 24)),  # type: ignore[no-untyped-call]
    "conv2d": (lambda: nn.Conv2d(8, 6, 3, stride=2, padding=1), (4, 8, 9, 9)),
    "conv2d-unbatched": (lambda: nn.Conv2d(8, 6, 3), (8, 9, 9)),
    "transposed": (lambda: nn.ConvTranspose1d(8, 6, 3), (4, 8, 15)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_of_layers_are_unbiased_and_those_of_inputs_exact(name: str) -> None:
    make, shape = LAYERS[name]
    plain = make()
    x = torch.randn(shape)
    g = torch.randn_like(plain(x))
    wanted = layer_gradients(plain, x, g)
    layer = mt.convert(copy.deepcopy(plain), mt.Policy.uniform(16, rows=0.3), min_elements=0, seed=1)
    drawn = []
    for _ in range(KEYS):
        weight, *others = layer_gradients(layer, x, g)
        drawn.append(weight)
        for one, other in zip(others, wanted[1:], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    weights = torch.stack(drawn)
    assert 0 < (weights.mean(0) - wanted[0]).square().sum() < UNBIASED * weights.var(0).sum() / KEYS


def layer_gradients(layer: nn.Module, x: Tensor, g: Tensor) -> list[Tensor]:
    """Gradients of weight, bias and input."""
    x = x.clone().requires_grad_()
    parameters = dict(layer.named_parameters())
    return list(torch.autograd.grad(layer(x), [parameters["weight"], parameters["bias"], x], g))


def test_products_of_computed_matrices_are_unbiased() -> None:
    a, b, g = torch.randn(3, 10, 8), torch.randn(3, 8, 12), torch.randn(3, 10, 12)
    wanted = (g @ b.mT, a.mT @ g)
    drawn = []
    model = mt.convert(Calling(torch.matmul), mt.Policy.uniform(16, rows=0.5), min_elements=0, seed=1)
    for _ in range(KEYS):
        leaves = a.clone().requires_grad_(), b.clone().requires_grad_()
        drawn.append(torch.autograd.grad(model(*(leaf * 1 for leaf in leaves)), leaves, g))
    for exact, found in zip(wanted, zip(*drawn, strict=True), strict=True):
        stacked = torch.stack(found)
        assert 0 < (stacked.mean(0) - exact).square().sum() < UNBIASED * stacked.var(0).sum() / KEYS


@pytest.mark.slow("compile")
def test_compiled_code_of_any_batch_size_stores_the_same_rows() -> None:
    model = mt.convert(nn.Sequential(nn.Linear(64, 32)), mt.Policy.uniform(16, rows=0.25), seed=1)
    other = copy.deepcopy(model)
    compiled: Any = torch.compile(other, fullgraph=True, backend="aot_eager", dynamic=True)
    for size in (512, 300):
        x = torch.randn(size, 64).requires_grad_()
        found, right = (
            torch.autograd.grad(run(x).square().mean(), list(run.parameters())) for run in (compiled, model)
        )
        torch.testing.assert_close(found, right)


def test_functions_that_are_not_linear_store_all_rows_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notice, "_given", set())
    made = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64))
    x = (torch.randn(256, 64) * 1).requires_grad_()

    def found(policy: mt.Policy) -> list[Tensor]:
        model = mt.convert(copy.deepcopy(made), policy, seed=1)
        return list(torch.autograd.grad(model(x).square().sum(), list(model.parameters())))

    all_rows, *same = found(mt.Policy.uniform(16))
    with pytest.warns(UserWarning, match="`rows` has no effect on 'layer_norm'"):
        some_rows, *others = found(mt.Policy.uniform(16, rows=0.1))
    assert not torch.equal(all_rows, some_rows)
    torch.testing.assert_close(others, same)


def test_layers_that_share_an_input_share_its_rows() -> None:
    class Twins(nn.ModuleList):
        def forward(self, x: Tensor) -> list[Tensor]:
            return [layer(x) for layer in self]

    twins = Twins([nn.Linear(64, 32), nn.Linear(64, 48)])
    model = mt.convert(twins, mt.Policy.uniform(16, rows=0.25), seed=1)
    nodes = [output.grad_fn for output in model(torch.randn(512, 64).requires_grad_() * 1)]
    first, second = ([part.data_ptr() for part in node.saved_tensors[:3]] for node in nodes)
    assert first == second


def test_a_search_takes_rows_where_nothing_else_fits_and_not_where_they_are_forbidden() -> None:
    work = workload(
        lambda: nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 128), nn.Linear(128, 8)),
        lambda n: (torch.randn(n, 64), torch.randint(8, (n,))),
        batch_size=256,
    )
    options = [LayerSettings(level=level) for level in (2, 16)]
    options += [LayerSettings(level=16, rows=share) for share in (0.1, 0.25)]
    profile = mt.profile(work, options=options, seeds=2)
    uniform = profile.predict(mt.Policy.uniform(2)).saved_bytes
    limit = uniform - int(0.3 * 2 * 256 * 128 / 8)
    plan = mt.search_policy(profile, "100%", max_saved=limit, objective="error")
    assert plan.predicted.saved_bytes <= limit
    assert any(settings.rows < 1 for settings in profile.assignment(plan.policy).values())
    assert mt.Policy.parse(plan.policy.dumps()) == plan.policy
    withouts: list[dict[str, Any]] = [{"forbid": ["rows"]}, {"only": ["level"]}]
    for without in withouts:
        with pytest.raises(mt.BudgetError):
            mt.search_policy(profile, "100%", max_saved=limit, **without)
