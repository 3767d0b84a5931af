"""Every kind of call runs by a cached plan, and gives the same."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mesa_tune as mt
from tests.builders import Calling, policy_of
from tests.cached_calls import X, check_step, refusing, same, twins, uncached
from tests.conformance.cases import Direct
from tests.functional_cases import CASES, fresh, gradients
from tests.step_memory import Composed


def scaled(function: Callable[..., Any], **parts: Any) -> nn.Module:
    """A function of this module and its inputs; its `scale` has 12 elements."""
    return Composed(function, scale=nn.Parameter(torch.ones(12)), **parts)


def test_masked_attention_is_cached_by_what_its_mask_is() -> None:
    def attend(model: Any, x: Tensor, masks: tuple[Tensor, ...]) -> Tensor:
        q = (x * model.scale).view(6, 16, 2, 6).transpose(1, 2)
        mask = torch.add(*masks) if len(masks) == 2 else next(iter(masks), None)
        return F.scaled_dot_product_attention(q, q + 1, q + 2, mask)

    model, twin = twins(scaled(attend))
    rows, columns = torch.randn(16, 1), torch.randn(1, 16)
    kinds: list[tuple[Tensor, ...]] = [(), (rows + columns,), (rows, columns)]
    for turn in range(4):
        for masks in kinds:
            check_step(model, twin, X, masks, refused=(F.scaled_dot_product_attention,) if turn > 1 else ())


def test_derived_calls_are_cached_by_what_can_be_derived() -> None:
    def deriving(model: Any, x: Tensor) -> Any:
        y = model.norm(x * model.scale)
        y = y * 1.5 if model.exact else y
        y = model.second(torch.relu(model.first(y)))
        return F.softmax(y, -1) @ model.scale

    parts = {"norm": nn.LayerNorm(12), "first": nn.Linear(12, 24), "second": nn.Linear(24, 12)}
    model, twin = twins(scaled(deriving, **parts, exact=False), store="derive")
    for turn in range(9):
        model.exact = twin.exact = turn in (4, 5)
        functions = (F.linear, F.layer_norm, F.softmax) if turn in (3, 6, 7, 8) else ()
        check_step(model, twin, refused=functions)


def test_parts_of_multi_head_attention_are_cached() -> None:
    model, twin = twins(nn.MultiheadAttention(12, 2, batch_first=True))
    x, mask = X.clone().requires_grad_(), torch.randn(16, 16)
    for turn in range(5):
        outputs = []
        refused = refusing(F.linear, torch.baddbmm, torch.bmm) if turn > 2 else nullcontext()
        for layer, way in ((model, refused), (twin, uncached())):
            with way:
                layer.zero_grad()
                y, weights = layer(x, x, x, attn_mask=mask)
                (y.square().sum() + weights.sum()).backward()
            outputs.append([y.detach(), *[parameter.grad for parameter in layer.parameters()]])
        assert same(*outputs)


@pytest.mark.parametrize("settings", [{}, {"ema_decay": 0.9}], ids=str)
def test_the_loss_under_compress_saved_is_cached(settings: dict[str, Any]) -> None:
    policy, target = mt.Policy.uniform(level=16, **settings), torch.arange(6)
    head, x = nn.Linear(200, 2000), torch.randn(6, 200, requires_grad=True)
    for turn in range(5):
        refused = refusing(F.linear, F.cross_entropy) if turn > 2 else nullcontext()
        with mt.compress_saved(policy, seed=turn), refused:
            loss = F.cross_entropy(F.linear(x, head.weight), target)
        plain = F.cross_entropy(F.linear(x, head.weight), target)
        assert torch.equal(loss, plain)
        found, right = (torch.autograd.grad(value, head.weight)[0] for value in (loss, plain))
        assert 0 < (found - right).norm() < 0.5 * right.norm()


def called() -> Calling:
    """A module that calls the function it is given."""
    return Calling(lambda function, args, kwargs: function(*args, **kwargs))


def test_lists_are_compared_by_their_elements() -> None:
    def of_lists(model: Any, x: Tensor) -> Tensor:
        y = F.layer_norm(x * model.scale, model.sizes)
        return torch.einsum("abc,dbc->ad", [y, y * 1.0])

    model, twin = twins(scaled(of_lists, sizes=[12]))
    for turn in range(8):
        if turn == 4:
            for module in (model, twin):
                module.sizes.insert(0, 16)
        check_step(model, twin, refused=(F.layer_norm, torch.einsum) if turn in (3, 7) else ())


def test_calls_that_stay_plain_are_cached() -> None:
    plain = Direct(lambda h, scale: torch.tanh(h * scale), scale=(12,))
    model, x = mt.convert(plain, mt.Policy.uniform(level=16)), X.clone()
    for turn in range(4):
        with refusing(torch.tanh, Tensor.__mul__) if turn > 1 else nullcontext():
            assert type(model(x).grad_fn).__name__ == "TanhBackward0"
    large = torch.randn(5000, 12)
    assert type(model(large).grad_fn).__name__ == "ApplyBackward"


def test_in_place_calls_are_cached_by_what_may_be_changed() -> None:
    def in_place(model: Any, x: Tensor) -> Any:
        y = x * model.scale
        part = y[:3] if model.view else y
        torch.relu_(part)
        return y.sum() * 1.0 + part.square().sum()

    model, twin = twins(scaled(in_place, view=False))
    for turn in range(8):
        model.view = twin.view = turn in (3, 4, 5, 7)
        check_step(model, twin, refused=(torch.relu_,) if turn in (2, 6, 7) else ())


@pytest.mark.parametrize(("first", "then"), [(0.0, -0.0), (0, False), (1, 1.0), (0.5, 0.25)])
def test_numbers_that_are_equal_may_differ(first: Any, then: Any) -> None:
    model = mt.convert(called(), mt.Policy.uniform(level=16), seed=1, min_elements=0)
    x = torch.randn(6, 20, requires_grad=True) * 1.0
    for number in (first, first, then, then, first):
        found, right = model(Tensor.masked_fill, [x, x < 0, number], {}), x.masked_fill(x < 0, number)
        assert torch.equal(found.signbit(), right.signbit())
        assert torch.equal(found, right)


CAST = (
    *("linear", "addmm", "conv2d", "conv_transpose1d", "batch_norm", "layer_norm", "gelu", "mul", "einsum"),
    *("softmax", "matmul", "baddbmm", "attention_float_mask", "cross_entropy"),
    *("mse_loss", "cosine_similarity"),
)
"""Functions whose inputs or outputs autocast casts, each in another way."""


@pytest.mark.parametrize(
    ("name", "autocast"),
    [*((name, False) for name in sorted(CASES)), *((name, True) for name in CAST)],
    ids=lambda each: each if isinstance(each, str) else "autocast" * each,
)
def test_every_function_gives_the_same_again(name: str, autocast: bool) -> None:
    """The first call is planned, the second cached, the third runs by what is cached."""
    case = CASES[name]
    model, twin = twins(called())
    for turn in range(3):
        found = []
        for each, way in ((model, nullcontext()), (twin, uncached())):
            args = fresh(case, torch.float32, seed=turn)
            torch.manual_seed(turn)
            with way, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                y = each(case.function, args, case.kwargs)
            found.append([y.detach(), *gradients(y, args)])
        assert same(*found)


def test_another_function_of_the_same_name_is_another() -> None:
    model = mt.convert(called(), mt.Policy.uniform(level=16), seed=1, min_elements=0)
    x = torch.randn(4, 4, requires_grad=True)
    for function in (torch.clamp_min, torch.clamp_min, torch.clamp_min, torch.clamp_max, torch.clamp_min):
        assert torch.equal(model(function, [x, 0.5], {}), function(x, 0.5))


def test_what_a_loss_saves_does_not_depend_on_the_losses_before() -> None:
    text = "on loss:\n    by_index: 0\n    level: 256\n\n    by_index: 1\n    level: 2\n"
    policy, x = policy_of(text), torch.randn(64, 100, requires_grad=True)
    found = []
    for before in (False, True, False):
        if before:
            with mt.compress_saved(policy, seed=1):
                _ = F.cross_entropy(x * 1.0, torch.arange(64)) + F.mse_loss(x * 1.0, torch.zeros(64, 100))
            continue
        with mt.compress_saved(policy, seed=1):
            loss = F.mse_loss(x * 1.0, torch.zeros(64, 100))
        found.append(torch.autograd.grad(loss, x)[0])
    assert torch.equal(*found)
