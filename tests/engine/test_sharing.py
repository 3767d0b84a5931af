"""What several layers keep is encoded once, and is theirs to the end (Rule 3)."""

from __future__ import annotations

import copy
import gc
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mesa_tune as mt
import mesa_tune.nn as mesa_nn
from mesa_tune import ops
from mesa_tune.codecs import CODECS, quantize
from mesa_tune.engine import registry
from mesa_tune.measure.memory.meter import Meter
from mesa_tune.policy import Policy
from tests.builders import Block, gradients, known
from tests.conformance.running import relative_error, saved_bytes
from tests.step_memory import Composed


class _Counting:
    def __init__(self) -> None:
        self.encoded: list[tuple[int, ...]] = []

    def encode(self, x: Tensor, *rest: Any) -> list[Tensor]:
        self.encoded.append(tuple(x.shape))
        return quantize.encode(x, *rest)

    decode = staticmethod(quantize.decode)
    packed_bytes = staticmethod(quantize.packed_bytes)


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> _Counting:
    counter = _Counting()
    monkeypatch.setitem(CODECS, "quantize", counter)
    return counter


def _convert(model: nn.Module, policy: Policy | None = None) -> nn.Module:
    return mt.convert(copy.deepcopy(model), policy or Policy.uniform(level=16), seed=1, min_elements=0)


def test_a_block_encodes_each_tensor_once(counting: _Counting) -> None:
    block = _convert(nn.Sequential(nn.Linear(64, 64), Block(64)))
    block(torch.randn(4, 32, 64))
    wide, narrow = (4, 32, 128), (4, 32, 64)
    # x̂ twice, the norms' outputs (one for q, k and v), attention's output; GELU's input and output; q, k, v.
    assert counting.encoded.count(narrow) == 5
    assert counting.encoded.count(wide) == 2
    assert len(counting.encoded) == 5 + 2 + 3


def test_softmax_shares_its_output_with_the_product_after_it(counting: _Counting) -> None:
    class Model(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            v = super().forward(input)
            return F.softmax(v @ v.transpose(1, 2), dim=-1) @ v

    _convert(Model(64, 64))(torch.randn(4, 32, 64))
    assert counting.encoded.count((4, 32, 32)) == 1


def test_a_view_of_other_strides_is_another_tensor() -> None:
    class Model(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            h = super().forward(input)
            return F.gelu(h) + F.gelu(h.transpose(0, 1)).transpose(0, 1)

    plain, x = Model(64, 64), torch.randn(32, 32, 64)
    found, right = (gradients(each, x) for each in (_convert(plain, Policy.uniform(level=256)), plain))
    assert 0 < relative_error(found, right) < 1e-3


def test_an_in_place_change_between_two_keepers_gives_each_its_own_values() -> None:
    def forward(model: Any, x: Tensor) -> Any:
        h = model.lift(x)
        q = model.q(h)
        h = h * 3 if model.clone else h.mul_(3)
        return q + model.k(h)

    torch.manual_seed(0)
    layers = {name: nn.Linear(64, 64) for name in ("lift", "q", "k")}
    right, model = (Composed(forward, **layers, clone=clone) for clone in (True, False))
    x = torch.randn(4, 32, 64)
    coded = _convert(model, Policy.uniform(level=256))
    assert torch.equal(coded(x), right(x))
    assert 0 < relative_error(gradients(coded, x), gradients(right, x)) < 1e-3


def test_memory_goes_with_the_graph() -> None:
    model, x = _convert(nn.Sequential(nn.Linear(64, 64), Block(64))), torch.randn(4, 32, 64)
    assert saved_bytes(model, x) == saved_bytes(model, x)
    with Meter() as meter:
        model(x).sum().backward()
        model.zero_grad(set_to_none=True)
        gc.collect()
        assert meter.live_since(0) == 0


def test_other_settings_make_their_own_copy_in_any_order() -> None:
    base = "# mesa-tune policy 1\non fc:\n    by_index: all\n    level: 16\n\n    by_name: {}\n    level: 4\n"
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 64), Block(64))
    x = torch.randn(4, 32, 64)
    q, k, v, both, one = (
        saved_bytes(_convert(plain, Policy.parse(base.format(names))), x)
        for names in ("1.q", "1.k", "1.v", "1.[qkv]", "none.*")
    )
    four, two = (ops.packed_bytes(x.shape, bits) for bits in (4, 2))
    assert q == k == v == one + two
    assert both == one - four + two


def test_views_of_all_of_a_storage_share_a_copy(counting: _Counting) -> None:
    def loss_of(model: Any, x: Tensor) -> Any:
        x = x * 2
        image = x.permute(0, 2, 1).view(2, 64, 16, 16)
        return model.query(x).sum() + model.reduce(image).square().mean()

    torch.manual_seed(0)
    plain = Composed(loss_of, query=nn.Linear(64, 64), reduce=nn.Conv2d(64, 64, 2, 2))
    x = torch.randn(2, 256, 64, requires_grad=True)
    model = _convert(plain, Policy.uniform(level=256))
    loss = model(x)
    assert [shape for shape in counting.encoded if math.prod(shape) == x.numel()] == [(2, 256, 64)]
    found = torch.autograd.grad(loss, list(model.parameters()))
    for one, other in zip(found, torch.autograd.grad(plain(x), list(plain.parameters())), strict=True):
        assert (one - other).norm() <= 0.02 * other.norm()


def test_layers_that_stand_alone_leave_no_trace_of_dead_tensors() -> None:
    registry.registry.clear()
    layer = mesa_nn.Linear(8, 8)
    for _ in range(3 * registry._FIRST_LIMIT):
        layer(torch.randn(4, 8, requires_grad=True))
    assert len(registry.registry._records) <= registry._FIRST_LIMIT


def kept(output: Tensor) -> Any:
    """The input that the linear layer of `output` keeps."""
    return known(output.grad_fn).saved_tensors[0]  # type: ignore[attr-defined]


def test_a_small_view_of_a_large_storage_is_copied_once() -> None:
    def two_heads(model: Any, x: Tensor) -> Any:
        token = (x * 1.0)[:, 0]
        return model.first(token), model.second(token)

    plain = Composed(two_heads, first=nn.Linear(32, 4), second=nn.Linear(32, 4))
    model = mt.convert(plain, mt.Policy.uniform(16))
    x = torch.randn(8, 64, 32, requires_grad=True)
    first, second = (kept(output) for output in model(x))
    assert first.untyped_storage().nbytes() == 8 * 32 * 4
    assert first.data_ptr() == second.data_ptr()
    assert torch.equal(first, x[:, 0])
