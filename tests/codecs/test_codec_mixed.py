"""ActNN's bits by sample and by layer: the formula against simulation, and the best choice at equal bytes."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from mesa_tune.codecs import Spec, mixed, quantize
from mesa_tune.ops.reference import codecs as reference_codecs
from tests.builders import spec

KEY = torch.tensor([5], dtype=torch.int64)
sampled = partial(spec, allocation="sample")


def stored(x: Tensor, one: Spec, seed: int = 0) -> Tensor:
    parts = mixed.encode(x, one, torch.tensor([seed]))
    return mixed.decode(parts, x.shape, x.dtype, one)


def costs(x: Tensor, group_size: int) -> Tensor:
    rows = x.reshape(x.shape[0], -1)
    groups = torch.nn.functional.pad(rows, (0, -rows.shape[1] % group_size)).view(x.shape[0], -1, group_size)
    return (group_size * (groups.amax(2) - groups.amin(2)).double() ** 2).sum(1)


def unequal(samples: int = 16) -> Tensor:
    scale = torch.logspace(-2, 2, samples, base=2)
    return torch.randn(samples, 24, 64) * scale[:, None, None]


@pytest.mark.parametrize(("bits", "equal"), [(2, True), (2, False), (3, False), (4, False), (8, True)])
def test_the_variance_formula_holds_in_simulation(bits: int, equal: bool) -> None:
    x = torch.rand(16, 24, 64) if equal else unequal()
    one = sampled(level=2**bits)
    widths = mixed.encode(x, one, KEY)[2]
    wide = widths > 1  # one bit has no fractions to be uniform over
    predicted = (costs(x, 256) / (6 * (2.0 ** widths.double() - 1) ** 2))[wide].sum()
    errors = [(stored(x, one, seed) - x)[wide].double().square().sum() for seed in range(20)]
    assert torch.stack(errors).mean().item() == pytest.approx(predicted.item(), rel=0.1)


@pytest.mark.parametrize("average", [1, 2, 3])
def test_bits_are_the_best_of_all_choices(average: int) -> None:
    cost = torch.tensor([1.0, 40.0, 0.01, 7.0], dtype=torch.float64)
    found = reference_codecs.sample_bits(cost, average).long()
    every = torch.cartesian_prod(*[torch.arange(1, 9)] * 4)
    best = (cost / (2.0 ** every[every.sum(1) == 4 * average] - 1) ** 2).sum(1).min()
    assert found.sum() == 4 * average
    assert (cost / (2.0**found - 1) ** 2).sum() == best


@pytest.mark.parametrize("cost", [torch.zeros(5), torch.ones(5), torch.tensor([1e30, 0, 0, 1, 1])])
def test_the_total_is_static(cost: Tensor) -> None:
    for average in range(1, 9):
        bits = reference_codecs.sample_bits(cost, average)
        assert bits.sum() == 5 * average
        assert bits.min() >= 1
        assert bits.max() <= 8


def test_unequal_samples_err_less_than_at_uniform_bits_in_nearly_the_same_bytes() -> None:
    x = unequal()
    one = sampled(level=16)
    uniform = quantize.decode(quantize.encode(x, one, KEY), x.shape, x.dtype, one)
    assert (stored(x, one) - x).square().sum() < 0.5 * (uniform - x).square().sum()
    parts = mixed.encode(x, one, KEY)
    assert sum(part.nbytes for part in parts) == quantize.packed_bytes(x.shape, one) + x.shape[0]
    assert parts[2].unique().numel() > 2


def test_sensitivities_move_bits_to_the_samples_that_matter() -> None:
    x = torch.randn(4, 512)
    parts = mixed.encode(x, sampled(level=16), KEY, {"sensitivity": torch.tensor([1e4, 1.0, 1.0, 1e-4])})
    bits = parts[2].tolist()
    assert sum(bits) == 16
    assert bits[0] > max(bits[1:3])
    assert min(bits[1:3]) > bits[3]


@pytest.mark.parametrize(
    ("shape", "groups"), [((5, 6, 5, 3), {"quant_groups": 1}), ((5, 2, 3, 5, 7), {"group_size": 16})], ids=str
)
def test_odd_sizes_round_trip(shape: tuple[int, ...], groups: dict[str, int]) -> None:
    x = torch.randn(shape)
    error = (stored(x, sampled(level=256, **groups)) - x).abs().max()
    assert error <= (x.max() - x.min()) / 100


def test_layers_get_bits_by_what_they_gain_an_element() -> None:
    sensitivities, sizes = [100.0, 1.0, 0.01], [1000, 1000, 1000]
    bits = mixed.allocate(sensitivities, sizes, 4)
    assert sum(bits) == 12
    assert bits[0] > bits[1] > bits[2]
    assert mixed.allocate(sensitivities, sizes, 8) == [8, 8, 8]
    assert mixed.allocate(sensitivities, sizes, 1) == [1, 1, 1]


def test_a_large_layer_pays_for_each_of_its_elements() -> None:
    bits = mixed.allocate([1.0, 1.0], [10_000, 10], 2)
    assert bits[1] == 8
    assert 10_000 * bits[0] + 10 * bits[1] <= 2 * 10_010


@pytest.mark.parametrize("average", [0.5, 8.5])
def test_an_impossible_average_is_refused(average: float) -> None:
    with pytest.raises(ValueError, match="1 <= average <= 8"):
        mixed.allocate([1.0], [1], average)
