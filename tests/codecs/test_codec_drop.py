"""Dropping the smallest magnitudes: DropIT's choice and gradients, in bits that pay."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

import mesa_tune as mt
from mesa_tune.codecs import drop, vrandom
from tests.builders import spec

KEY = torch.tensor([5], dtype=torch.int64)


def min_k(x: Tensor, gamma: float) -> Tensor:
    """DropIT's sparsification from its formula: all but the int(n · (1 - γ)) largest magnitudes are zero."""
    flat = x.detach().reshape(-1)
    order = flat.abs().argsort(descending=True, stable=True)[: int(flat.numel() * (1 - gamma))]
    return torch.zeros_like(flat).index_copy(0, order, flat[order]).view(x.shape)


@pytest.mark.parametrize(
    ("gamma", "ties", "bits"),
    [(0.1, False, 1.0), (0.5, True, 1.0), (0.9, True, 0.525), (0.97, False, 0.212), (0.99, False, 0.086)],
)
def test_exact_survivors_are_the_largest_magnitudes(gamma: float, ties: bool, bits: float) -> None:
    """Few of them are marked in less than a bit."""
    x, settings = torch.randn(64, 1000), spec(drop=gamma, store="exact")
    x = (x * 2).round() if ties else x
    marks, values = drop.encode(x, settings, KEY)
    assert torch.equal(drop.decode([marks, values], x.shape, x.dtype, settings), min_k(x, gamma))
    assert values.numel() == drop.survivors(x.numel(), gamma) == int(x.numel() * (1 - gamma))
    assert 8 * marks.numel() / x.numel() == pytest.approx(bits, rel=0.01)


def test_random_elements_are_chosen_independently() -> None:
    x, settings = torch.ones(1024), spec(drop=0.5, store="exact")._replace(codec="vrandom")
    keys = torch.randint(-(2**62), 2**62, (200, 1))
    packed = [vrandom.encode(x, settings, key) for key in keys]
    chosen = torch.stack([vrandom.decode(parts, x.shape, x.dtype, settings) for parts in packed])
    assert torch.equal(chosen.sum(1), torch.full((200,), 512.0))
    together = chosen.T @ chosen / len(keys)
    for distance in (1, 2, 4):
        assert together.diagonal(distance).mean() == pytest.approx(0.25, abs=0.01)


@pytest.mark.parametrize("bit", [0, 40])
def test_both_halves_of_the_key_choose_the_elements(bit: int) -> None:
    x, settings = torch.ones(1024), spec(drop=0.5, store="exact")._replace(codec="vrandom")
    one, other = (vrandom.encode(x, settings, torch.tensor([key]))[0] for key in (0, 1 << bit))
    assert not torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_four_bit_survivors_at_ninety_percent_take_less_than_1_6_bits(dtype: torch.dtype) -> None:
    x, settings = torch.randn(32, 64, 128).to(dtype), spec(drop=0.9, level=16)
    parts = drop.encode(x, settings, KEY)
    stored = sum(part.untyped_storage().nbytes() for part in parts)
    assert stored == drop.packed_bytes(x.shape, settings, x.element_size())
    assert 8 * stored / x.numel() < 1.6
    decoded = drop.decode(parts, x.shape, x.dtype, settings)
    wanted = min_k(x, 0.9)
    assert torch.equal(decoded == 0, wanted == 0)
    assert (decoded - wanted).norm() < 0.2 * wanted.norm()


def test_survivors_of_zero_of_all_equal_and_of_too_few_elements() -> None:
    for x, gamma in ((torch.zeros(100), 0.5), (torch.full((100,), -2.5), 0.5), (torch.ones(3), 0.9)):
        parts = drop.encode(x, spec(drop=gamma), KEY)
        assert torch.equal(drop.decode(parts, x.shape, x.dtype, spec(drop=gamma)), min_k(x, gamma))


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
    "conv1d": (lambda: Conv1D(32, 48), (8, 20, 48), by_conv1d),  # type: ignore[no-untyped-call]
    "conv2d": (lambda: nn.Conv2d(6, 8, 3, stride=2, padding=1), (4, 6, 17, 17), by_conv2d),
}


@pytest.mark.parametrize(
    ("name", "gamma"), [("linear", 0.5), ("conv1d", 0.9), ("conv2d", 0.5), ("conv2d", 0.9)]
)
def test_gradients_are_dropits(name: str, gamma: float) -> None:
    make, shape, formula = CASES[name]
    plain = make()
    layer = mt.convert(copy.deepcopy(plain), mt.Policy.uniform(drop=gamma, store="exact"), min_elements=0)
    x = torch.randn(shape).requires_grad_()
    y, wanted = layer(x), plain(x)
    assert torch.equal(y, wanted)
    g = torch.randn_like(y)
    found, *others = torch.autograd.grad(y, [*map(layer.get_parameter, ("weight", "bias")), x], g)
    right = torch.autograd.grad(wanted, [plain.get_parameter("bias"), x], g)
    torch.testing.assert_close(others, list(right), rtol=1e-6, atol=1e-6)
    exact = formula(min_k(x, gamma).double(), g.double())
    assert (found.double() - exact).norm() / exact.norm() < 1e-6
