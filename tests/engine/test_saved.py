"""Saved tensors that are decoded in another dtype than they had: under autocast, in that of the products."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import mesa_tune as mt
from mesa_tune.engine.saved import SavedTensor
from mesa_tune.engine.storage import decided, store
from mesa_tune.formulas import linear
from mesa_tune.ops.devices import as_on_cuda
from tests.builders import Dispatched, known, spec

KEY = torch.tensor([5], dtype=torch.int64)
LARGE = 1 << 16


@pytest.fixture
def lower_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of `LARGE` elements are decoded in pieces, as much larger ones are outside of tests."""
    monkeypatch.setattr("mesa_tune.engine.saved.LARGE", LARGE)


def saved(x: Tensor, axis: int = 0, **settings: Any) -> SavedTensor:
    along = spec(**{"level": 16, **settings}).along(axis)
    packing = decided(x, along)
    return SavedTensor(store(x, packing, along, KEY), packing, along)


STORED = [{}, {"quant_groups": 4}, {"drop": 0.5}, {"allocation": "sample"}, {"store": "offload"}]


@pytest.mark.parametrize("settings", STORED, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, None], ids=str)
def test_a_tensor_in_another_dtype_is_the_decoded_copy_cast(
    settings: dict[str, Any], dtype: torch.dtype | None
) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 200) * 3
    x[3, 4], x[5] = float("inf"), 0.0
    tensor = saved(x, **settings)
    expected = tensor.whole() if dtype is None else tensor.whole().to(dtype)
    for found in (tensor.whole(dtype), tensor.narrowed(dtype).whole(dtype)):
        assert found.dtype == expected.dtype
        assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))


def test_a_wider_dtype_decodes_the_same_numbers() -> None:
    tensor = saved(torch.randn(64, 200).bfloat16())
    assert torch.equal(tensor.whole(torch.float32), tensor.whole().float())


@pytest.mark.parametrize("share", [1e-6, 0.1, 0.9])
@pytest.mark.parametrize("shape", [(5, 8, LARGE // 40 + 1), (7, 16, 20, 30), (6, LARGE // 48 + 1, 8)])
@pytest.mark.usefixtures("lower_limit")
def test_rows_are_decoded_some_samples_at_a_time(shape: tuple[int, ...], share: float) -> None:
    torch.manual_seed(0)
    axis = -1 if shape[-1] == 8 else 1 - len(shape)
    tensor = saved(torch.randn(shape).exp(), axis, rows=share)
    found, largest = torch.full(shape, torch.nan), 0
    for part, piece in known(tensor.slices(torch.float32)):
        found[part] = piece
        largest = max(largest, len(piece))
    assert torch.equal(found, tensor.whole())
    assert largest == 2  # of 5 to 7 samples


@pytest.mark.usefixtures("lower_limit")
@pytest.mark.parametrize(("least", "pieces"), [(None, 1), (LARGE, 4)], ids=["whole", "beyond the limit"])
def test_on_cuda_only_the_largest_tensors_are_decoded_in_pieces(
    least: int | None, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if least is not None:
        monkeypatch.setattr("mesa_tune.engine.saved.LARGE_ON_CUDA", least)
    tensor = saved(torch.zeros(64, LARGE // 64))
    with as_on_cuda():
        for parts in (tensor.rows(torch.float32), tensor.slices(torch.float32)):
            assert (1 if parts is None else len(list(parts))) == pieces


@pytest.mark.usefixtures("lower_limit")
@pytest.mark.parametrize("kind", ["linear", "linear in pieces", "conv"])
def test_a_large_input_is_never_whole_under_autocast(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer = nn.Conv1d(256, 8, 1) if kind == "conv" else nn.Linear(256, 8)
    if kind == "linear in pieces":  # as one of a large weight
        monkeypatch.setattr(linear, "LARGEST_WEIGHT", 0)
    x = torch.randn(8, LARGE // (8 * 256), 256).requires_grad_()
    model = nn.Sequential(layer)
    gradients = []
    for policy in (mt.Policy.parse(""), mt.Policy.uniform(256)):
        mt.convert(model, policy)
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(2 * (x.mT if kind == "conv" else x)).float().square().mean()
        with Dispatched("dequantize_out") as decoded:
            loss.backward()
        gradients.append(cast(Tensor, layer.weight.grad))
    targets: list[Tensor] = [target for *_, target in decoded.calls]
    assert {target.dtype for target in targets} == (set() if kind == "linear" else {torch.bfloat16})
    assert max((target.numel() for target in targets), default=0) <= LARGE // 2
    torch.testing.assert_close(*gradients, rtol=0.02, atol=0.02 * float(gradients[0].abs().max()))
