"""Calls that run by a cached plan: when they do, and that it makes no difference."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mesa_tune as mt
from mesa_tune.codecs import quantize
from mesa_tune.engine import cache
from mesa_tune.engine.plan import CallPlan
from tests.builders import Calling, Patch, conversion, known, policy_of
from tests.cached_calls import X, check_step, refuse, refusing, same, step, twins, uncached
from tests.step_memory import Composed


class Net(nn.Module):
    """Calls of many functions; their arguments can be changed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 24)
        self.no_bias = nn.Linear(24, 12, bias=False)
        self.norm = nn.LayerNorm(12)
        self.rms = nn.RMSNorm(12)
        self.groups = nn.GroupNorm(4, 16)
        self.conv = nn.Conv1d(16, 16, 3, padding=1)
        self.weight = nn.Parameter(torch.randn(12, 12))
        self.detached = self.in_place = self.spread = False
        self.eps = 1e-5
        self.shape: Any = (12,)

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.weight[0]
        y = y.detach() if self.detached else y
        y = y.mT.contiguous().mT if self.spread else y
        y = self.no_bias(F.gelu(self.linear(y)))
        y = F.layer_norm(self.norm(y), self.shape, self.weight[0], eps=self.eps)
        y = F.silu(y * 1.0, inplace=self.in_place)
        y = self.conv(self.groups(self.rms(y)))
        y = torch.addmm(self.weight[0], y.flatten(0, 1), self.weight).view_as(y) @ self.weight
        return torch.bmm(y, y.mT) + torch.mm(y[0], self.weight).sum()


FUNCTIONS = (
    *(F.linear, F.gelu, F.layer_norm, F.silu, F.rms_norm, F.group_norm, F.conv1d),
    *(torch.addmm, Tensor.__matmul__, torch.bmm, torch.mm),
)


def converted(**settings: Any) -> Net:
    torch.manual_seed(0)
    made = mt.convert(Net(), mt.Policy.uniform(level=16, **settings), seed=1, min_elements=0)
    assert isinstance(made, Net)
    return made


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("guards", [True, False], ids=["", "without guards"])
def test_a_step_like_the_last_one_asks_no_route(autocast: bool, guards: bool, monkeypatch: Patch) -> None:
    if not guards:
        monkeypatch.setattr(cache, "TensorGuards", None)
    model, twin = converted(), converted()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for turn in range(4):
            check_step(model, twin, refused=FUNCTIONS if turn > 1 else ())
        with refusing(*FUNCTIONS), uncached(), pytest.raises(AssertionError, match="asked again"):
            twin(X)


def freeze(model: Net) -> None:
    for layer in (model.linear, model.norm, model.conv):
        layer.requires_grad_(False)


def widen(model: Net) -> None:
    model.linear.weight.data = torch.ones(48, 12)
    model.linear.bias.data = torch.ones(48)
    model.no_bias.weight.data = torch.ones(12, 48)


CHANGES: dict[str, Callable[[Net], Any]] = {
    "frozen": freeze,
    "wider": widen,
    "16 bits": lambda model: model.bfloat16(),
    "64 bits": lambda model: model.double(),
    "no gradient of the input": lambda model: setattr(model, "detached", True),
    "other strides": lambda model: setattr(model, "spread", True),
    "in place": lambda model: setattr(model, "in_place", True),
    "a list": lambda model: setattr(model, "shape", [12]),
    "another number": lambda model: setattr(model, "eps", 0.5),
}


@pytest.mark.parametrize("guards", [True, False], ids=["", "without guards"])
@pytest.mark.parametrize("name", list(CHANGES))
def test_what_changes_is_seen(name: str, guards: bool, monkeypatch: Patch) -> None:
    if not guards:
        monkeypatch.setattr(cache, "TensorGuards", None)
    model, twin = converted(), converted()
    for turn in range(5):
        if turn == 2:
            for each in (model, twin):
                CHANGES[name](each)
        check_step(model, twin, X[: 4 if turn == 3 else 6].to(model.weight.dtype))


def test_autocast_is_seen() -> None:
    model, twin = converted(), converted()
    half, brain = torch.float16, torch.bfloat16
    for each in (model, twin):
        each.weight.data *= 0.1  # or its products are too large for 16 bits
    for dtype in (None, brain, brain, half, half, None, None, half):
        with torch.autocast("cpu", dtype or half, enabled=dtype is not None):
            check_step(model, twin)


def test_the_batch_is_not_packed_where_the_last_input_was() -> None:
    linear = nn.Linear(12, 5)
    model = Composed(lambda m, x, times: m.linear(x if times == 1 else x * times), linear=linear)
    mt.convert(model, mt.Policy.uniform(level=2), seed=0, min_elements=0)
    for times in (2, 2, 1, 1, 2):
        model.zero_grad()
        model(X, times).sum().backward()
        exact = (X * times).sum((0, 1)).expand(5, 12)
        assert torch.allclose(known(linear.weight.grad), exact, atol=1e-3) == (times == 1)


@pytest.mark.parametrize("settings", [{"ema_decay": 0.9}, {"drop": 0.9}, {"group_size": 64}], ids=str)
def test_other_codecs_give_the_same(settings: dict[str, Any]) -> None:
    model, twin = converted(**settings), converted(**settings)
    for _ in range(4):
        check_step(model, twin)


def test_how_tensors_are_stored_is_decided_once(monkeypatch: Patch) -> None:
    model, twin = converted(), converted()
    for turn in range(5):
        if turn == 3:
            monkeypatch.setattr(CallPlan, "decided", refuse)
        assert same(step(model), step(twin))
    with pytest.raises(AssertionError, match="asked again"):
        step(model, X[:4])


def test_a_tensor_is_packed_once_for_all_cached_calls() -> None:
    def product(model: Any, x: Tensor) -> Tensor:
        y = x * model.q.bias
        return torch.mm(model.q(y).flatten(0, 1).T, model.k(y).flatten(0, 1))

    counts, shared = [], Composed(product, q=nn.Linear(12, 12), k=nn.Linear(12, 12))
    model = mt.convert(shared, mt.Policy.uniform(level=16), seed=1, min_elements=0)
    for _ in range(4):
        with mock.patch.object(quantize, "encode", wraps=quantize.encode) as encode:
            step(model)
        counts.append(encode.call_count)
    assert counts == [counts[0]] * 4
    assert counts[0] < 5  # y once, and the two factors of the product; not y for each layer


def test_several_shapes_are_cached() -> None:
    model, twin = converted(), converted()
    for turn in range(9):
        check_step(model, twin, X[: 4 + turn % 3], refused=FUNCTIONS if turn > 5 else ())


def test_shapes_that_differ_from_step_to_step_are_not_cached() -> None:
    model = converted()
    for size in range(2, 7):
        step(model, X[:size])
    calls = conversion(model).calls.calls
    assert {name for name in calls if calls[name]} <= {"mm.0"}  # of one sample


def test_a_tensor_that_is_passed_twice() -> None:
    def normed(model: Any, x: Tensor) -> Tensor:
        bias = model.scale if model.same else model.scale * 1
        return F.layer_norm(x * model.scale, (12,), model.scale, bias)

    model, twin = twins(Composed(normed, scale=nn.Parameter(torch.randn(12)), same=True))
    for turn in range(5):
        model.same = twin.same = turn != 3
        check_step(model, twin, refused=(F.layer_norm,) if turn == 4 else ())


def test_what_a_function_does_beside_its_formula_is_done_each_time() -> None:
    plain = nn.InstanceNorm1d(16, track_running_stats=True)
    model = mt.convert(copy.deepcopy(plain), mt.Policy.uniform(level=16), seed=1, min_elements=0)
    for turn in range(4):
        for each in (plain, model):
            each((X * turn).requires_grad_())
        for one, other in zip(plain.buffers(), model.buffers(), strict=True):
            assert torch.equal(one, other)


def test_copies_have_caches_of_their_own() -> None:
    model = converted()
    for _ in range(3):
        step(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not conversion(other).calls.calls
        assert same(step(other), step(copy.deepcopy(model)))


def test_how_a_small_view_is_stored_does_not_depend_on_the_calls_before() -> None:
    def cut(model: Any, x: Tensor, is_view: bool) -> Any:
        """Some rows as a view of many, or as a tensor of their own."""
        return model.few(model.many(x)[:8] if is_view else model.many(x[:8]))

    plain = Composed(cut, many=nn.Linear(32, 32), few=nn.Linear(32, 32))
    model = mt.convert(plain, mt.Policy.uniform(level=16))
    x = torch.randn(4096, 32)
    copied = {True: "ApplyBackward", False: "AddmmBackward0"}
    for is_view in (True, True, True, False, True, False, False, False, True):
        assert type(model(x, is_view).grad_fn).__name__ == copied[is_view]


def _many_times(model: Any, x: Tensor) -> Any:
    """One activation, called so often that its calls are alike before its index is known."""
    y = model.before(model.linear(x))
    for _ in range(4):
        y = model.often(y * 1.5)
    return y


def test_settings_that_change_after_the_first_forward_are_those_of_the_next() -> None:
    text = "on gelu:\n    by_index: all\n    level: 256\n\n    by_index: 1\n    level: 4\n"
    layers = {"before": Calling(F.gelu), "linear": nn.Linear(12, 12), "often": Calling(F.gelu)}
    plain, steps = Composed(_many_times, **layers), []
    for alike in (nullcontext, uncached):
        model = mt.convert(copy.deepcopy(plain), policy_of(text), seed=1, min_elements=0)
        with alike():
            first = step(model)
            assert ("often.gelu.0" in conversion(model).calls.calls) == (alike is nullcontext)
            steps.append([first, step(model), step(model)])
    assert all(same(one, other) for one, other in zip(*steps, strict=True))
    early, late, _ = (
        sum((known(a) - known(b)).square().sum().item() for a, b in zip(found, step(plain), strict=True))
        for found in steps[0]
    )
    assert late > 100 * early


def test_tensors_in_place_of_numbers_are_read_in_every_call() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        model.step += 1
        y = F.hardtanh(model.linear(x), -1 / model.step, 1 / model.step)
        return F.leaky_relu(F.dropout(y, 0.0 / model.step) - 0.1, 1 / model.step)

    plain = Composed(forward, linear=nn.Linear(12, 12), step=nn.Buffer(torch.tensor(1.0)))
    model = mt.convert(copy.deepcopy(plain), mt.Policy.uniform(level=16), seed=1, min_elements=0)
    for _ in range(5):
        assert torch.equal(model(X), plain(X))


@pytest.mark.parametrize("size", [128, 8])
def test_an_output_is_exposed_though_no_input_can_be_made_again(size: int) -> None:
    parts = {"linear": nn.Linear(size, size), "mix": nn.Parameter(torch.randn(size, size))}
    plain = Composed(lambda m, x: F.linear(m.linear(x), torch.softmax(m.mix, -1)), **parts)
    x = torch.randn(64, size)
    model = mt.convert(copy.deepcopy(plain), mt.Policy.uniform(level=256, store="derive"), min_elements=16)
    for _ in range(6):
        y = model(x)
        assert torch.equal(y, plain(x))
        y.sum().backward()


def test_calls_without_guards_stay_planned() -> None:
    weight = nn.Parameter(torch.randn(12, 12))
    products = Composed(lambda m, x: torch.mm(x, m.weight), weight=weight)
    model = mt.convert(products, mt.Policy.uniform(level=16), min_elements=0)
    rows = torch.eye(12).to_sparse_csr()
    for _ in range(4):
        assert torch.equal(model(rows), torch.mm(rows, weight))
