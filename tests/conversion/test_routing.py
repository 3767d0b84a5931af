"""Names, tags and indices of layers; what is encoded and what never is; states that an exception leaves
behind.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import mesa_tune as mt
from mesa_tune import notice
from mesa_tune.conversion.layers import Catalog, named_layers
from mesa_tune.conversion.model import conversion_of
from mesa_tune.engine.routing import state
from mesa_tune.formulas.table import own_route
from mesa_tune.policy import Policy
from tests.builders import Branching, Functions, Product, Reused, ViT, renamed
from tests.conformance.running import relative_error

X = torch.randn(4, 24, 64, generator=torch.Generator().manual_seed(1))
TOKENS = X[..., :16]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    notice._given.clear()
    torch.manual_seed(0)
    yield
    assert state.frames == []
    assert not state.active
    assert not state.paused


def convert(model: nn.Module, policy: Policy | str | None = None) -> nn.Module:
    if isinstance(policy, str):
        policy = Policy.parse("# mesa-tune policy 1\n" + policy)
    return mt.convert(model, policy or Policy.uniform(level=256), seed=1, min_elements=0)


def layers(model: nn.Module) -> dict[str, tuple[str, int | None]]:
    conversion = conversion_of(model)
    assert conversion is not None
    return {name: (tag, index) for tag, index, name in conversion.catalog.layers()}


def grads(model: nn.Module, *args: object, call: Callable[..., Tensor] | None = None) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    (call or model)(*args).square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def specs(model: nn.Module) -> dict[str, int | None]:
    conversion = conversion_of(model)
    assert conversion is not None
    return {name: None if spec is None else spec.levels for name, spec in conversion.specs.items()}


@pytest.mark.parametrize("kind", [Functions, Product, Reused, Branching, ViT], ids=lambda kind: kind.__name__)
def test_class_names_mean_nothing(kind: type[nn.Module]) -> None:
    x = TOKENS if kind is ViT else X
    plain = kind()
    ours, other = convert(copy.deepcopy(plain)), convert(renamed(copy.deepcopy(plain)))
    assert torch.equal(ours(x), plain(x))
    assert torch.equal(other(x), plain(x))
    assert layers(ours) == layers(other)
    assert relative_error(grads(other, x), grads(plain, x)) < 1e-2


def test_functions_called_directly_are_numbered_by_function() -> None:
    model = convert(Functions())
    model(X)
    assert list(layers(model)) == [
        *("linear.0", "gelu.0", "linear.1", "matmul.0", "softmax.0", "matmul.1", "gelu.1"),
    ]
    assert layers(model)["gelu.1"] == ("gelu", 1)


def test_a_module_used_twice_is_one_layer_and_a_shared_one_has_its_first_name() -> None:
    model = convert(Reused())
    model(X)
    assert {name for name, (tag, _) in layers(model).items() if tag == "fc"} == {"first", "tied"}
    plain = mt.revert(copy.deepcopy(model))
    assert relative_error(grads(model, X), grads(plain, X)) < 1e-3


def test_branches_take_the_next_index_and_keep_it() -> None:
    model = convert(Branching())
    model(X, True)
    before = layers(model)
    model(X, False)
    after = layers(model)
    assert {name: after[name] for name in before} == before
    fresh = {name: value for name, value in after.items() if name not in before}
    assert sorted(fresh) == ["right.asinh.0", "right.lerp.0"]
    assert sorted(index for _, index in fresh.values() if index is not None) == [0, 1]


def test_other_entrances_than_forward_work() -> None:
    plain = ViT()
    model = convert(copy.deepcopy(plain))
    assert torch.equal(model.get_features(TOKENS), plain.get_features(TOKENS))  # type: ignore[operator]
    assert "blocks.1.gelu.0" in layers(model)
    found, right = (grads(each, TOKENS, call=each.get_features) for each in (model, plain))  # type: ignore[arg-type]
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
    assert {name: layers(model)[name][1] for name in expected} == expected
    model(TOKENS)
    assert {name: layers(model)[name][1] for name in expected} == expected
    assert layers(model)["blocks.1.gelu.0"] == ("gelu", 1)


def test_freezing_shifts_no_index() -> None:
    model = ViT()
    convert(model)(TOKENS)
    before = layers(model)
    model.blocks[0].requires_grad_(False)
    model.embed.requires_grad_(False)
    convert(model)(TOKENS)
    assert layers(model) == before


class _Compiled(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._orig_mod = inner


class _Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._checkpoint_wrapped_module = inner

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self._checkpoint_wrapped_module(x)
        return y


@pytest.mark.parametrize(
    "wrap",
    [nn.DataParallel, _Compiled, _Checkpointed, lambda m: _Compiled(nn.DataParallel(_Checkpointed(m)))],
    ids=["DataParallel", "compiled", "checkpointed", "all three"],
)
def test_wrappers_count_neither_in_names_nor_in_the_fingerprint(
    wrap: Callable[[nn.Module], nn.Module],
) -> None:
    plain = ViT()
    assert {name for name, _ in named_layers(wrap(plain))} == {name for name, _ in named_layers(plain)}
    assert Catalog.of(wrap(plain)).fingerprint == Catalog.of(plain).fingerprint
    assert Catalog.of(wrap(plain)).layers() == Catalog.of(plain).layers()


def test_a_module_of_ones_own_called_module_is_no_wrapper() -> None:
    holder = nn.ModuleDict({"module": nn.Linear(4, 4)})
    assert [name for name, _ in named_layers(holder)] == ["", "module"]


BY_INDEX = "on gelu:\n    by_index: all\n    level: 256\n\n    by_index: 1\n    level: 4\n"


def test_until_one_forward_has_ended_the_finest_settings_apply() -> None:
    model = convert(Functions(), BY_INDEX)
    model(X)
    assert specs(model)["gelu.0"] == specs(model)["gelu.1"] == 256
    model(X)
    assert (specs(model)["gelu.0"], specs(model)["gelu.1"]) == (256, 4)


class _Parts(nn.Module):
    """Each part of it checkpointed."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.lift = nn.Linear(64, 64)
        self.parts = nn.ModuleList([Functions(), Functions()])
        self.back = nn.Linear(64, 64)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        h = self.lift(x)
        for part in self.parts:
            h = self.back(h + checkpoint(part, h, use_reentrant=self.reentrant))
        out: Tensor = h
        return out


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_indices_and_settings_under_checkpointing(reentrant: bool) -> None:
    rules = "on gelu:\n    by_index: all\n    level: 256\n\n    by_index: 1 2\n    level: 16\n"
    model = convert(_Parts(reentrant), rules)
    plain = mt.revert(copy.deepcopy(model))
    for _ in range(3):
        loss = model(X).square().sum() + model(2 * X).square().sum()  # two forwards before the backward
        loss.backward()
    assert relative_error(grads(model, X), grads(plain, X)) < 0.1
    assert [layers(model)[f"parts.{i}.gelu.{j}"][1] for i in (0, 1) for j in (0, 1)] == [0, 1, 2, 3]
    assert [specs(model)[f"parts.{i}.gelu.{j}"] for i in (0, 1) for j in (0, 1)] == [256, 16, 16, 256]


def _kept_numels(model: nn.Module, *args: Tensor) -> list[int]:
    """Elements of what was encoded in one forward."""
    seen: list[int] = []
    right = torch.ops.mesa_tune.quantize.default

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func is right:
                seen.append(args[0].numel())
            return func(*args, **(kwargs or {}))

    with Counting():  # type: ignore[no-untyped-call]
        model(*args)
    return seen


class _Fixed(nn.Module):
    """Multiplies, by a matrix product and by elements, with what is no activation."""

    def __init__(self, of: str) -> None:
        super().__init__()
        self.of = of
        self.scale = nn.Parameter(torch.ones(64))
        self.matrix = nn.Parameter(torch.randn(64, 64))
        self.register_buffer("fixed", torch.randn(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(64) + self.scale
        other = {
            "batch": x,
            "view of batch": x.t()[:, :64],
            "buffer": self.fixed,
            "detached parameter": self.matrix.detach(),
            "view of detached parameter": self.matrix.detach().t(),
            "parameter": self.matrix,
        }[self.of]
        assert isinstance(other, Tensor)
        return (h * other).sum() + (h @ other).sum()


@pytest.mark.parametrize(
    "of",
    ["batch", "view of batch", "buffer", "detached parameter", "view of detached parameter", "parameter"],
)
def test_batch_buffers_and_parameters_are_never_encoded(of: str) -> None:
    model = convert(_Fixed(of))
    assert [n for n in _kept_numels(model, torch.randn(64, 64)) if n > 64] == []


def test_a_second_batch_and_a_moved_buffer_are_known_too() -> None:
    model = convert(_Fixed("buffer"))
    model(torch.randn(64, 64))
    model.fixed = torch.randn(64, 64)
    assert [n for n in _kept_numels(model, torch.randn(64, 64)) if n > 64] == []


def test_hooks_store_what_no_function_reaches_in_8_bits() -> None:
    plain = Product()
    model = convert(copy.deepcopy(plain), Policy.uniform(level=2))
    h = X.clone().requires_grad_()  # no batch: it wants a gradient
    assert torch.equal(model(h), plain(h))
    assert {"lerp.0": ("other", 1), "asinh.0": ("other", 0)}.items() <= layers(model).items()
    only = convert(copy.deepcopy(plain), "on other:\n    by_index: all\n    level: 2\n")
    assert 0 < relative_error(grads(only, h), grads(plain, h)) < 1e-3
    assert sorted(_kept_numels(only, h)) == [X.numel()] * 3


def test_hooks_leave_the_insides_of_attention_alone() -> None:
    model = convert(ViT(), "on other:\n    by_index: all\n    level: 256\n")
    model(TOKENS)
    assert not [name for name in layers(model) if "attention" in name and layers(model)[name][0] == "other"]
    assert not _kept_numels(model, TOKENS)


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        return 2 * g * ctx.saved_tensors[0]


def test_somebody_elses_function_keeps_its_tensors() -> None:
    class Model(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            y: Tensor = _Square.apply(super().forward(input))  # type: ignore[no-untyped-call]
            return y

    model = convert(Model(64, 64), "on other:\n    by_index: all\n    level: 256\n")
    assert not _kept_numels(model, X)


@pytest.mark.parametrize("change", ["mul_", "view"], ids=str)
def test_what_a_hook_keeps_as_it_is_must_not_change(change: str) -> None:
    class Model(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            y = super().forward(input).exp()  # exp keeps its output
            (y if change == "mul_" else y[:1]).mul_(2)
            return y

    for model in (Model(64, 64), convert(Model(64, 64), "on fc:\n    by_index: all\n    level: 256\n")):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            model(X).sum().backward()


def test_an_exception_leaves_nothing_behind() -> None:
    class Fails(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            if len(input) == 3:
                raise ValueError("three")
            return super().forward(input)

    model = convert(nn.Sequential(nn.Linear(64, 64), Fails(64, 64)))
    with pytest.raises(ValueError, match="three"):
        model(X[:3])
    assert state.frames == []
    with pytest.raises(RuntimeError, match="shapes"):
        model(X[..., :5])
    assert model(X).shape == X.shape
    assert torch.overrides._get_current_function_mode_stack() == []


def test_two_models_in_two_threads() -> None:
    plain = Functions()
    right = grads(plain, X)
    errors: list[object] = []

    def train() -> None:
        model = convert(copy.deepcopy(plain))
        for _ in range(8):
            error = relative_error(grads(model, X), right)
            if not 0 < error < 1e-2 or state.frames:
                errors.append(error)

    threads = [threading.Thread(target=train) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_a_thread_beside_a_converted_forward_is_not_routed() -> None:
    seen: list[bool] = []

    class Spawns(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            thread = threading.Thread(target=lambda: seen.append(state.active))
            thread.start()
            thread.join()
            return super().forward(input)

    convert(Spawns(64, 64))(X)
    assert seen == [False]


def test_backward_in_the_body_of_compress_saved_is_not_routed() -> None:
    plain = Functions()
    policy = Policy.uniform(level=256)
    model = convert(copy.deepcopy(plain))
    with mt.compress_saved(policy):
        checkpointed = checkpoint(model, X.clone().requires_grad_(), use_reentrant=False)
        F.mse_loss(checkpointed, torch.zeros_like(checkpointed), reduction="sum").backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert 0 < relative_error(found, grads(plain, X)) < 1e-2
