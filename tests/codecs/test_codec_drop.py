"""Dropping the smallest magnitudes: DropIT's choice and gradients, in bits that pay."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mesa_tune as mt
from mesa_tune.codecs import Spec, drop, vrandom
from mesa_tune.policy.settings import LayerSettings

KEY = torch.tensor([5], dtype=torch.int64)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def spec(**given: object) -> Spec:
    made = Spec.of(LayerSettings.from_dict(given), 0)
    assert made is not None
    return made


def min_k(x: Tensor, gamma: float) -> Tensor:
    """DropIT's sparsification from its formula: all but the int(n · (1 - γ)) largest magnitudes are zero."""
    flat = x.detach().reshape(-1)
    order = flat.abs().argsort(descending=True, stable=True)[: int(flat.numel() * (1 - gamma))]
    return torch.zeros_like(flat).index_copy(0, order, flat[order]).view(x.shape)


@pytest.mark.parametrize("gamma", [0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
def test_exact_survivors_are_the_largest_magnitudes(gamma: float, ties: bool) -> None:
    x = torch.randn(7, 300)
    x = (x * 2).round() if ties else x
    parts = drop.encode(x, spec(drop=gamma, store="exact"), KEY)
    decoded = drop.decode(parts, x.shape, x.dtype, spec(drop=gamma, store="exact"))
    assert torch.equal(decoded, min_k(x, gamma))
    assert parts[1].numel() == int(x.numel() * (1 - gamma))


def test_random_elements_are_chosen_independently() -> None:
    x, settings = torch.ones(1024), spec(drop=0.5, store="exact")._replace(codec="vrandom")
    keys = torch.randint(-(2**62), 2**62, (200, 1))
    packed = [vrandom.encode(x, settings, key) for key in keys]
    chosen = torch.stack([vrandom.decode(parts, x.shape, x.dtype, settings) for parts in packed])
    assert torch.equal(chosen.sum(1), torch.full((200,), 512.0))
    together = chosen.T @ chosen / len(keys)
    for distance in (1, 2, 4):
        neighbours = together.diagonal(distance).mean()
        assert neighbours == pytest.approx(0.25, abs=0.01)


@pytest.mark.parametrize("bit", [0, 40])
def test_both_halves_of_the_key_choose_the_elements(bit: int) -> None:
    x, settings = torch.ones(1024), spec(drop=0.5, store="exact")._replace(codec="vrandom")
    one, other = (vrandom.encode(x, settings, torch.tensor([key]))[0] for key in (0, 1 << bit))
    assert not torch.equal(one, other)


def test_nothing_survives_of_a_tensor_that_is_too_small() -> None:
    parts = drop.encode(torch.ones(3), spec(drop=0.9), KEY)
    assert torch.equal(drop.decode(parts, (3,), torch.float32, spec(drop=0.9)), torch.zeros(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_four_bit_survivors_at_ninety_percent_take_less_than_1_6_bits(dtype: torch.dtype) -> None:
    x = torch.randn(32, 64, 128).to(dtype)
    parts = drop.encode(x, spec(drop=0.9, level=16), KEY)
    stored = sum(part.untyped_storage().nbytes() for part in parts)
    assert stored == drop.packed_bytes(x.shape, spec(drop=0.9, level=16), x.element_size())
    assert 8 * stored / x.numel() < 1.6
    decoded = drop.decode(parts, x.shape, x.dtype, spec(drop=0.9, level=16))
    wanted = min_k(x, 0.9)
    assert torch.equal(decoded == 0, wanted == 0)
    assert (decoded - wanted).norm() < 0.2 * wanted.norm()


def test_survivors_of_zero_and_of_all_equal_elements() -> None:
    for x in (torch.zeros(100), torch.full((100,), -2.5)):
        parts = drop.encode(x, spec(drop=0.5), KEY)
        decoded = drop.decode(parts, x.shape, x.dtype, spec(drop=0.5))
        assert torch.equal(decoded, min_k(x, 0.5))


class Conv1D(nn.Module):
    """A linear layer whose weight is stored the other way round, as GPT-2's is."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) * 0.1)
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        flat = torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight)
        return flat.view(*x.shape[:-1], -1)


def by_linear(x: Tensor, g: Tensor) -> Tensor:
    return torch.einsum("...o,...i->oi", g, x)


def by_conv1d(x: Tensor, g: Tensor) -> Tensor:
    return torch.einsum("...o,...i->io", g, x)


def by_conv2d(x: Tensor, g: Tensor) -> Tensor:
    """Every output's gradient times the 3 x 3 window that it saw: stride 2, one row of zeros around."""
    windows = F.unfold(x, 3, padding=1, stride=2)
    return torch.einsum("nol,nkl->ok", g.flatten(2), windows).view(g.shape[1], x.shape[1], 3, 3)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], Callable[..., Tensor]]] = {
    "linear": (lambda: nn.Linear(48, 32), (8, 20, 48), by_linear),
    "conv1d": (lambda: Conv1D(48, 32), (8, 20, 48), by_conv1d),
    "conv2d": (lambda: nn.Conv2d(6, 8, 3, stride=2, padding=1), (4, 6, 17, 17), by_conv2d),
}


@pytest.mark.parametrize("gamma", [0.5, 0.9])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_dropits(name: str, gamma: float) -> None:
    make, shape, formula = CASES[name]
    torch.manual_seed(1)
    plain = make()
    layer = mt.convert(copy.deepcopy(plain), mt.Policy.uniform(drop=gamma, store="exact"), min_elements=0)
    x = torch.randn(shape)
    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    y, wanted = layer(ours), plain(theirs)
    assert torch.equal(y, wanted)
    g = torch.randn_like(y)
    y.backward(g)
    wanted.backward(g)
    assert ours.grad is not None
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-6, atol=1e-6)
    biases = [dict(one.named_parameters())["bias"].grad for one in (layer, plain)]
    torch.testing.assert_close(*biases, rtol=1e-6, atol=1e-6)
    exact = formula(min_k(x, gamma).double(), g.double())
    found = dict(layer.named_parameters())["weight"].grad
    assert found is not None
    error = (found.double() - exact).norm() / exact.norm()
    assert error < 1e-6


@pytest.mark.parametrize(("share", "bits"), [(0.75, 1.0), (0.9, 0.525), (0.97, 0.212), (0.99, 0.086)])
def test_few_survivors_are_marked_in_less_than_a_bit(share: float, bits: float) -> None:
    spec = Spec.of(LayerSettings(store="exact", drop=share), 0)
    assert spec is not None
    x = torch.randn(64, 1000)
    marks, values = drop.encode(x, spec, torch.tensor([0]))
    assert 8 * marks.numel() / x.numel() == pytest.approx(bits, rel=0.01)
    assert values.numel() == drop.survivors(x.numel(), share)
    least = x.abs().flatten().sort(descending=True).values[values.numel() - 1]
    decoded = drop.decode([marks, values], x.shape, x.dtype, spec)
    assert torch.equal(decoded, torch.where(x.abs() >= least, x, 0))
