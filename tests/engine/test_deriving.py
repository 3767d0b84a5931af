"""`store: derive`: outputs made again from what their producers keep, in place of being stored."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mesa_tune as mt
from mesa_tune import ops
from mesa_tune.engine.formula import Ingredients
from mesa_tune.formulas import relu
from mesa_tune.measure.memory.meter import Meter
from mesa_tune.policy import Policy
from tests.builders import conversion
from tests.compat_measures import error
from tests.step_memory import Composed

WIDTH, ROWS = 64, 256
NARROW, WIDE = ROWS * WIDTH, ROWS * 4 * WIDTH


def other(function: Callable[[Any, Tensor], Any]) -> nn.Module:
    """The layers of `mlp`, called by a function of them and the input."""
    layers = {"first": nn.Linear(WIDTH, 4 * WIDTH), "second": nn.Linear(4 * WIDTH, WIDTH)}
    return Composed(function, norm=nn.LayerNorm(WIDTH), **layers)


def mlp(activation: Callable[[Tensor], Tensor] = F.gelu, dropout: float = 0.0) -> nn.Module:
    """LayerNorm, Linear, GELU, Linear, and the way around them."""
    return other(lambda m, x: x + m.second(F.dropout(activation(m.first(m.norm(x))), dropout)))


def gated() -> nn.Module:
    """A gated perceptron after an RMS norm written by hand, as Llama has it."""

    def forward(m: Any, x: Tensor) -> Any:
        h = m.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
        return x + m.down(F.silu(m.gate(h)) * m.up(h))

    layers = {"gate": nn.Linear(WIDTH, 4 * WIDTH), "up": nn.Linear(WIDTH, 4 * WIDTH)}
    weight = nn.Parameter(torch.rand(WIDTH) + 0.5)
    return Composed(forward, weight=weight, **layers, down=nn.Linear(4 * WIDTH, WIDTH))


def convolutions(in_place: bool) -> nn.Module:
    """Convolution, batch norm, ReLU, twice."""
    parts = [(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(in_place)) for _ in range(2)]
    return nn.Sequential(*(part for three in parts for part in three), nn.Conv2d(8, 8, 1))


def rows() -> Tensor:
    return torch.randn(ROWS, WIDTH)


def feature_maps() -> Tensor:
    return torch.randn(4, 8, 16, 16)


def model(middle: nn.Module, width: int = WIDTH) -> nn.Sequential:
    first = nn.Conv2d(width, width, 1) if width == 8 else nn.Linear(width, width)
    return nn.Sequential(first, middle)


def policy(store: str, level: int = 256) -> Policy:
    return Policy.uniform(level=level, store=store)


def converted(plain: nn.Module, store: str, level: int = 256) -> Any:
    return mt.convert(copy.deepcopy(plain), policy(store, level), seed=1, min_elements=1024)


def step(model: Callable[[Tensor], Tensor], x: Tensor, weights: list[nn.Parameter]) -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    y = model(x)
    weight = torch.linspace(-1, 1, y.numel()).view(y.shape)
    for each in weights:
        each.grad = None
    (y * weight).sum().backward()
    return y.detach(), torch.cat([each.grad.flatten() for each in weights if each.grad is not None])


def gradient_error(plain: nn.Module, x: Tensor, *names: str) -> tuple[float, Any]:
    """The larger error of the gradients of `names` in two steps with `derive`; and the converted model."""
    _, exact = step(plain, x, [plain.get_parameter(name) for name in names])
    network = converted(plain, "derive")
    weights = [network.get_parameter(name) for name in names]
    return max(error(step(network, x, weights)[1], exact) for _ in range(2)), network


def saved(network: nn.Module, x: Tensor) -> int:
    """Bytes alive for backward after a forward."""
    network(x)  # who makes whose output again shows in the first forward
    with Meter() as meter:
        y = network(x)
        return int(meter.live_bytes) - int(y.untyped_storage().nbytes())


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], int]] = {
    "gelu": (lambda: model(mlp()), rows, NARROW + WIDE),
    "dropout": (lambda: model(mlp(F.gelu, 0.1)), rows, NARROW + WIDE),
    "silu": (lambda: model(mlp(F.silu)), rows, NARROW + WIDE),
    "relu": (lambda: model(mlp(F.relu)), rows, NARROW),
    "gated": (lambda: model(gated()), rows, 2 * NARROW + 2 * WIDE),
    "groups": (lambda: model(nn.Sequential(nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 1)), 8), feature_maps, 8192),
    "convolutions": (lambda: model(convolutions(False), 8), feature_maps, 2 * 8192),
    "convolutions-in-place": (lambda: model(convolutions(True), 8), feature_maps, 2 * 8192),
}


MORE_RANGES = {"gated": 8 * (ROWS - NARROW // 256)}
"""Groups of a product with a norm's weight end with rows."""


@pytest.mark.parametrize("name", list(CASES))
def test_outputs_are_not_stored_and_the_gradient_is_as_good(name: str) -> None:
    make, batch, elements = CASES[name]
    plain, x = make(), batch()
    stored, derived = (saved(converted(plain, store), x) for store in ("quantize", "derive"))
    assert stored - derived == ops.packed_bytes(elements, 8) + MORE_RANGES.get(name, 0)
    expected, exact = step(plain, x, list(plain.parameters()))
    for level, allowed in ((256, 1e-3), (16, 0.1)):
        network = converted(plain, "derive", level)
        for _ in range(2):
            y, found = step(network, x, list(network.parameters()))
            assert torch.equal(y, expected)
            assert 0 < error(found, exact) < allowed


TRACED = [pytest.param(name, marks=() if name == "gelu" else pytest.mark.slow("compile")) for name in CASES]


@pytest.mark.parametrize("name", TRACED)
def test_one_graph(name: str) -> None:
    make, batch, _ = CASES[name]
    plain, x = make(), batch()
    expected, exact = step(plain, x, list(plain.parameters()))
    network = converted(plain, "derive")
    compiled = torch.compile(network, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        y, found = step(compiled, x, list(network.parameters()))
        torch.testing.assert_close(y, expected)
        assert 0 < error(found, exact) < 1e-3


@pytest.mark.parametrize("reentrant", [False, True], ids=["plain", "reentrant"])
@pytest.mark.parametrize("name", ["gelu", "convolutions-in-place"])
def test_checkpointed_parts(name: str, reentrant: bool) -> None:
    make, batch, _ = CASES[name]
    plain, x = make().eval(), batch()
    _, exact = step(plain, x, list(plain.parameters()))
    network = converted(plain, "derive")
    first, second = network
    for _ in range(2):
        _, found = step(
            lambda x: checkpoint(second, first(x), use_reentrant=reentrant), x, [*network.parameters()]
        )
        assert 0 < error(found, exact) < 1e-3


def changed(mlp: Any, x: Tensor) -> Any:
    """The output of the norm changes before it is used."""
    h = mlp.norm(x)
    with torch.no_grad():
        h.mul_(3)
    return mlp.first(h)


def test_an_output_that_changed_is_stored() -> None:
    assert gradient_error(model(other(changed)), rows(), "1.first.weight")[0] < 1e-3


def test_views_are_made_again_as_views() -> None:
    def heads(mlp: Any, x: Tensor) -> Any:
        h = mlp.norm(x).view(16, 16, 4, 16).permute(0, 2, 1, 3)
        return h @ h.mT

    plain, x = model(other(heads)), rows()
    assert 0 < gradient_error(plain, x, "1.norm.weight", "1.norm.bias")[0] < 1e-3
    stored, derived = (saved(converted(plain, store), x) for store in ("quantize", "derive"))
    assert stored - derived == ops.packed_bytes(NARROW, 8)


def test_without_a_producer_to_derive_from_the_layer_stores() -> None:
    plain, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), rows()
    assert saved(converted(plain, "quantize"), x) == saved(converted(plain, "derive"), x)


def test_small_parts_of_an_output_are_stored_exactly() -> None:
    plain = model(other(lambda mlp, x: mlp.first(mlp.norm(x)[:8])))
    assert gradient_error(plain, rows(), "1.first.weight")[0] == 0


def test_only_layers_that_ask_derive() -> None:
    every = "    by_index: all\n    level: 256\n"
    text = f"# mesa-tune policy 1\non layernorm gelu:\n{every}\non fc:\n{every}"
    text += "\n    by_index: 2\n    store: derive\n"
    plain, x = model(mlp()), rows()
    derived, stored = (
        saved(mt.convert(copy.deepcopy(plain), Policy.parse(each), min_elements=1024), x)
        for each in (text, text.replace("store: derive", "store: quantize"))
    )
    assert stored - derived == ops.packed_bytes(WIDE, 8)


def test_zeros_of_relu_stay_where_they_were() -> None:
    x = torch.randn(640)
    zeros = ops.pack_bits(x <= 0)
    y = relu.masked(Ingredients(("relu", False, ()), (), (zeros,), (), (x + 10,)))
    assert torch.equal(y == 0, x <= 0)


def test_a_second_backward_gives_the_same() -> None:
    network, x = converted(model(mlp()), "derive"), rows()
    y, weights = network(x).square().sum(), list(network.parameters())
    first = torch.autograd.grad(y, weights, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, torch.autograd.grad(y, weights), strict=True))


class Nothing(torch.autograd.Function):
    """Passes its input on, and no gradient back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        return None


def test_an_output_without_a_gradient_gives_none() -> None:
    plain = model(other(lambda mlp, x: Nothing.apply(mlp.norm(x)) + x))  # type: ignore[no-untyped-call]
    found, network = gradient_error(plain, rows(), "0.weight")
    assert found < 1e-3
    norm = network.get_parameter("1.norm.weight").grad
    assert norm is None or not norm.any()


def test_backward_makes_no_zeros_for_the_parts_given_out() -> None:
    plain, x = model(mlp()), rows()
    peaks = []
    for store in ("quantize", "derive"):
        network = converted(plain, store)
        network(x)
        y = network(x)
        with Meter() as meter:
            y.sum().backward()
        peaks.append(meter.tensor_peak)
    assert peaks[1] - peaks[0] <= 8 * WIDE  # the decoded input and what is made of it again, and no more


def test_compiled_code_stores_an_output_that_changed_in_a_model_inside_another() -> None:
    plain, x = model(other(changed)), rows()
    _, exact = step(plain, x, [plain.get_parameter("1.first.weight")])
    network = converted(plain, "derive")
    mt.convert(network[1], policy("derive"), min_elements=1024)
    compiled = torch.compile(network, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        _, found = step(compiled, x, [network.get_parameter("1.first.weight")])
        assert 0 < error(found, exact) < 1e-3


def test_compiled_code_derives_from_a_reshaped_output() -> None:
    network = converted(model(other(lambda mlp, x: mlp.first(mlp.norm(x).view(16, -1, WIDTH)))), "derive")
    compiled = torch.compile(network, fullgraph=True, backend="aot_eager")
    step(compiled, rows(), list(network.parameters()))
    assert "1.norm" in conversion(network).producers
