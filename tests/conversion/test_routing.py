"""Names, tags and indices of layers; what is encoded and what never is; states that an exception leaves
behind.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mesa_tune as mt
from mesa_tune import notice
from mesa_tune.conversion.layers import named_layers
from mesa_tune.engine.routing import state
from mesa_tune.formulas.table import own_route
from mesa_tune.policy import Policy
from tests.builders import (
    Branching,
    Calling,
    Checkpointed,
    Fixed,
    Functions,
    Product,
    Reused,
    ViT,
    conversion,
    encodings,
    gradients,
    policy_of,
    renamed,
)
from tests.conformance.running import relative_error
from tests.step_memory import Composed

X = torch.randn(4, 24, 64, generator=torch.Generator().manual_seed(1))
TOKENS = X[..., :16]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    notice._given.clear()
    yield
    assert state.frames == []
    assert not state.active
    assert not state.paused


def convert(model: nn.Module, rules: str | None = None, level: int = 256) -> nn.Module:
    policy = Policy.uniform(level=level) if rules is None else policy_of(rules)
    return mt.convert(model, policy, seed=1, min_elements=0)


def layers(model: nn.Module) -> dict[str, tuple[str, int | None]]:
    return {name: (tag, index) for tag, index, name in conversion(model).catalog.layers()}


def specs(model: nn.Module) -> dict[str, int | None]:
    return {name: None if spec is None else spec.levels for name, spec in conversion(model).specs.items()}


@pytest.mark.parametrize("kind", [Functions, Product, Reused, Branching, ViT], ids=lambda kind: kind.__name__)
def test_class_names_mean_nothing(kind: type[nn.Module]) -> None:
    x = TOKENS if kind is ViT else X
    plain = kind()
    ours, other = convert(copy.deepcopy(plain)), convert(renamed(copy.deepcopy(plain)))
    assert torch.equal(ours(x), plain(x))
    assert torch.equal(other(x), plain(x))
    assert layers(ours) == layers(other)
    assert relative_error(gradients(other, x), gradients(plain, x)) < 1e-2


def test_functions_called_directly_are_numbered_by_function() -> None:
    model = convert(Functions())
    model(X)
    assert " ".join(layers(model)) == "linear.0 gelu.0 linear.1 matmul.0 softmax.0 matmul.1 gelu.1"
    assert layers(model)["gelu.1"] == ("gelu", 1)


def test_a_module_used_twice_is_one_layer_and_a_shared_one_has_its_first_name() -> None:
    model = convert(Reused())
    model(X)
    assert {name for name, (tag, _) in layers(model).items() if tag == "fc"} == {"first", "tied"}
    plain = mt.revert(copy.deepcopy(model))
    assert relative_error(gradients(model, X), gradients(plain, X)) < 1e-3


def test_branches_take_the_next_index_and_keep_it() -> None:
    model = convert(Branching())
    model(X, True)
    before = layers(model)
    model(X, False)
    new = {"right.lerp.0": ("other", 0), "right.lerp.1": ("other", 1)}
    assert layers(model) == {**before, **new}


def test_other_entrances_than_forward_work() -> None:
    plain = ViT()
    model = convert(copy.deepcopy(plain))
    assert torch.equal(model.get_features(TOKENS), plain.get_features(TOKENS))  # type: ignore[operator]
    assert "blocks.1.gelu.0" in layers(model)
    found, right = (gradients(each, TOKENS, run=each.get_features) for each in (model, plain))  # type: ignore[arg-type]
    assert 0 < relative_error(found, right) < 1e-2


def test_indices_are_the_count_over_modules() -> None:
    model = convert(ViT())
    expected: dict[str, int] = {}
    counts: dict[str, int] = {}
    for name, module in model.named_modules():
        route = own_route(module)
        if route is not None:
            expected[name] = counts.get(route.tag, 0)
            counts[route.tag] = expected[name] + 1
    for _ in range(2):
        assert {name: layers(model)[name][1] for name in expected} == expected
        model(TOKENS)
    assert layers(model)["blocks.1.gelu.0"] == ("gelu", 1)


def test_freezing_shifts_no_index() -> None:
    model = ViT()
    convert(model)(TOKENS)
    before = layers(model)
    for part in (model.blocks[0], model.embed):
        part.requires_grad_(False)
    convert(model)(TOKENS)
    assert layers(model) == before


def test_a_module_of_ones_own_called_module_is_no_wrapper() -> None:
    holder = nn.ModuleDict({"module": nn.Linear(4, 4)})
    assert [name for name, _ in named_layers(holder)] == ["", "module"]


def test_until_one_forward_has_ended_the_finest_settings_apply() -> None:
    rules = "on gelu:\n    by_index: all\n    level: 256\n\n    by_index: 1\n    level: 4\n"
    model = convert(Functions(), rules)
    model(X)
    assert specs(model)["gelu.0"] == specs(model)["gelu.1"] == 256
    model(X)
    assert (specs(model)["gelu.0"], specs(model)["gelu.1"]) == (256, 4)


def parted(reentrant: bool) -> nn.Module:
    """A model of checkpointed parts."""

    def forward(model: Any, x: Tensor) -> Any:
        h = model.lift(x)
        for part in model.parts:
            h = model.back(h + part(h))
        return h

    parts = nn.ModuleList(Checkpointed(Functions(), reentrant) for _ in range(2))
    return Composed(forward, lift=nn.Linear(64, 64), back=nn.Linear(64, 64), parts=parts)


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_indices_and_settings_under_checkpointing(reentrant: bool) -> None:
    rules = "on gelu:\n    by_index: all\n    level: 256\n\n    by_index: 1 2\n    level: 16\n"
    model = convert(parted(reentrant), rules)
    plain = mt.revert(copy.deepcopy(model))
    for _ in range(3):
        loss = model(X).square().sum() + model(2 * X).square().sum()  # two forwards before the backward
        loss.backward()
    assert relative_error(gradients(model, X), gradients(plain, X)) < 0.1
    assert [layers(model)[f"parts.{i}.part.gelu.{j}"][1] for i in (0, 1) for j in (0, 1)] == [0, 1, 2, 3]
    assert [specs(model)[f"parts.{i}.part.gelu.{j}"] for i in (0, 1) for j in (0, 1)] == [256, 16, 16, 256]


@pytest.mark.parametrize(
    "of", ["batch", "view of batch", "buffer", "detached", "view of detached", "parameter"]
)
def test_batch_buffers_and_parameters_are_never_encoded(of: str) -> None:
    model = convert(Fixed(of))
    assert [n for n in encodings(model, torch.randn(64, 64)) if n > 64] == []


def test_a_second_batch_and_a_moved_buffer_are_known_too() -> None:
    model = convert(Fixed("buffer"))
    model(torch.randn(64, 64))
    model.fixed = torch.randn(64, 64)
    assert [n for n in encodings(model, torch.randn(64, 64)) if n > 64] == []


def test_hooks_store_what_no_function_reaches_in_8_bits() -> None:
    plain = Product()
    model = convert(copy.deepcopy(plain), level=2)
    h = X.clone().requires_grad_()  # no batch: it wants a gradient
    assert torch.equal(model(h), plain(h))
    assert {"lerp.0": ("other", 0), "lerp.1": ("other", 1)}.items() <= layers(model).items()
    only = convert(copy.deepcopy(plain), "on other:\n    by_index: all\n    level: 2\n")
    assert 0 < relative_error(gradients(only, h), gradients(plain, h)) < 1e-3
    assert sorted(encodings(only, h)) == [X.numel()] * 3


def test_hooks_leave_the_insides_of_attention_alone() -> None:
    model = convert(ViT(), "on other:\n    by_index: all\n    level: 256\n")
    model(TOKENS)
    assert not [name for name in layers(model) if "attention" in name and layers(model)[name][0] == "other"]
    assert not encodings(model, TOKENS)


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        return 2 * g * ctx.saved_tensors[0]


def test_somebody_elses_function_keeps_its_tensors() -> None:
    model = nn.Sequential(nn.Linear(64, 64), Calling(_Square.apply))
    convert(model, "on other:\n    by_index: all\n    level: 256\n")
    assert not encodings(model, X)


@pytest.mark.parametrize("change", ["mul_", "view"], ids=str)
def test_what_a_hook_keeps_as_it_is_must_not_change(change: str) -> None:
    def changed(x: Tensor) -> Tensor:
        y = x.exp()  # keeps its output
        (y if change == "mul_" else y[:1]).mul_(2)
        return y

    plain = nn.Sequential(nn.Linear(64, 64), Calling(changed))
    for model in (plain, convert(copy.deepcopy(plain), "on fc:\n    by_index: all\n    level: 256\n")):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            model(X).sum().backward()


def test_an_exception_leaves_nothing_behind() -> None:
    def fail(x: Tensor) -> Tensor:
        if len(x) == 3:
            raise ValueError("three")
        return x

    model = convert(nn.Sequential(nn.Linear(64, 64), Calling(fail), nn.Linear(64, 64)))
    with pytest.raises(ValueError, match="three"):
        model(X[:3])
    assert state.frames == []
    with pytest.raises(RuntimeError, match="shapes"):
        model(X[..., :5])
    assert model(X).shape == X.shape
    assert torch.overrides._get_current_function_mode_stack() == []


def test_two_models_in_two_threads() -> None:
    plain = Functions()
    right = gradients(plain, X)

    def train(_: int) -> None:
        model = convert(copy.deepcopy(plain))
        for _ in range(8):
            assert 0 < relative_error(gradients(model, X), right) < 1e-2
            assert not state.frames

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(train, range(2)))


def test_a_thread_beside_a_converted_forward_is_not_routed() -> None:
    seen: list[bool] = []

    def spawn(x: Tensor) -> Tensor:
        thread = threading.Thread(target=lambda: seen.append(state.active))
        thread.start()
        thread.join()
        return x.exp()

    convert(nn.Sequential(nn.Linear(64, 64), Calling(spawn)))(X)
    assert seen == [False]


def test_backward_in_the_body_of_compress_saved_is_not_routed() -> None:
    plain = Functions()
    model = convert(copy.deepcopy(plain))
    with mt.compress_saved(Policy.uniform(level=256)):
        checkpointed = checkpoint(model, X.clone().requires_grad_(), use_reentrant=False)
        F.mse_loss(checkpointed, torch.zeros_like(checkpointed), reduction="sum").backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert 0 < relative_error(found, gradients(plain, X)) < 1e-2
