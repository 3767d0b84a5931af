"""Prices of rows that are left out: the expectation over samples, not the luck of one."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn

import mesa_tune as mt
from mesa_tune.codecs import Spec, rows
from mesa_tune.codecs.rows import expected_square
from mesa_tune.policy.settings import LayerSettings
from tests.builders import known, workload

pytestmark = pytest.mark.usefixtures("without_variants")

ROWS, WIDTH = 64, 64


def spec_of(settings: LayerSettings) -> Spec:
    return known(Spec.of(settings, 0)).along(-1)


def decoded(x: Tensor, spec: Spec, seed: int) -> Tensor:
    parts = rows.encode(x, spec, torch.tensor([seed]))
    return rows.decode(parts, x.shape, x.dtype, spec)


@pytest.mark.parametrize("store", ["exact", "quantize"])
def test_it_is_the_mean_over_samples(store: str) -> None:
    torch.manual_seed(0)
    spec = spec_of(LayerSettings(level=4, group_size=WIDTH, rows=0.25, store=store))
    x = torch.diag(torch.rand(ROWS) + 0.1) @ torch.linalg.qr(torch.randn(WIDTH, WIDTH))[0]  # orthogonal rows
    grad = torch.randn(ROWS, 3)
    squares, expected = [], []
    for seed in range(500):
        copy = decoded(x, spec, seed)
        squares.append(float((grad.t() @ (copy - x)).square().sum()))
        expected.append(expected_square(x, copy, grad, spec))
    assert sum(squares) == pytest.approx(sum(expected), rel=0.05)


def test_two_rows_by_hand() -> None:
    spec = spec_of(LayerSettings(rows=0.5, store="exact"))
    x, grad = torch.tensor([[3.0, 0.0], [0.0, 3.0]]), torch.tensor([[1.0], [10.0]])
    # Equal norms have equal probabilities, 1/2: (2 - 1) (1 · 9 + 100 · 9).
    assert expected_square(x, decoded(x, spec, 0), grad, spec) == pytest.approx(909.0, rel=1e-6)


def test_the_price_of_a_batch_does_not_depend_on_the_sample() -> None:
    torch.manual_seed(0)
    x = torch.randn(256, 32)
    scale = torch.ones(256, 1)
    scale[7] = 300.0  # one row makes most of the gradient, and its norm does not tell

    def build() -> nn.Module:
        return nn.Sequential(OrderedDict(first=nn.Linear(32, 32), second=nn.Linear(32, 8)))

    work = workload(build, lambda _: x, lambda model, x: (scale * model(x)).square().mean(), batch_size=256)
    sampled, rounded = LayerSettings(level=16, rows=0.1), LayerSettings(level=4)
    profile = mt.profile(work, options=[sampled, rounded], seeds=4)
    options = {option.settings: option for option in profile.layer("second").options}
    price = options[sampled].price_ratios
    assert max(price) == pytest.approx(min(price), rel=0.02)
    assert price[0] > 1  # without row 7, nine tenths of the samples err by about 1
    assert len(set(options[rounded].price_ratios)) > 1
