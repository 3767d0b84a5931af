"""Questions of the engine that few models ask: pieces, selective checkpoints, settings that became final."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import mesa_tune as mt
from mesa_tune import ops
from mesa_tune.codecs import CODECS, Spec
from mesa_tune.engine import registry, saved, storage
from mesa_tune.engine.cache import CallCache, cached_call
from mesa_tune.engine.call import Call, may_change
from mesa_tune.engine.saved import SavedTensor
from mesa_tune.engine.storage import is_too_small, packing_of, refusal
from mesa_tune.engine.tensors import is_small_view
from tests.builders import Calling, conversion, known, policy_of

SPEC = Spec("quantize", 8, 256, 64, 0, True, 0)


@pytest.mark.parametrize("shape", [(64, 30, 8), (63, 7, 11)], ids=["whole groups", "parts of groups"])
def test_pieces_make_up_the_whole(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved, "LARGE", 1000)
    x = torch.randn(shape)
    parts = CODECS["quantize"].encode(x, SPEC, torch.zeros(1, dtype=torch.int64))
    packed = SavedTensor(parts, packing_of(x, SPEC), SPEC)
    pieces = [(part, values.clone()) for part, values in known(packed.slices(torch.float32))]
    assert len(pieces) == saved.PIECES
    assert torch.equal(torch.cat([values for _, values in pieces]), packed.whole())
    assert [part.start for part, _ in pieces] == [0, 16, 32, 48]
    rows = [run.clone() for _, run in known(packed.rows(torch.float32, axes=2))]
    assert torch.equal(torch.cat(rows).view(x.shape), packed.whole())


def test_a_small_tensor_is_decoded_as_a_whole() -> None:
    x = torch.randn(64, 30, 8)
    packed = SavedTensor([x], packing_of(x, SPEC), SPEC)
    assert packed.slices(torch.float32) is None
    assert packed.rows(torch.float32) is None


def test_how_tensors_of_a_geometry_are_stored_is_decided_once() -> None:
    wide, tall = (packing_of(torch.randn(shape), SPEC) for shape in ((3, 500), (500, 3)))
    assert packing_of(torch.randn(3, 500), SPEC) is wide
    assert packing_of(torch.randn(500, 3), SPEC) is tall


def test_only_a_few_floating_point_numbers_are_too_small() -> None:
    few, many, integers = torch.ones(4), torch.ones(200), torch.ones(4, dtype=torch.int64)
    small = [is_too_small(tensor, SPEC._replace(min_elements=100)) for tensor in (few, many, integers)]
    assert small == [True, False, False]


@pytest.mark.parametrize("shape", [(2, 6), (5, 2, 6), (2, 6, 5, 5), (2, 6, 5, 5, 5)], ids=str)
def test_quant_groups_divide_channels_or_the_last_dimension(shape: tuple[int, ...]) -> None:
    x = torch.ones(shape)
    assert refusal(x, SPEC._replace(quant_groups=3)) is None
    assert refusal(x, SPEC._replace(quant_groups=5)) == "quant_groups 5 does not divide 6"


def test_a_small_view_is_at_most_an_eighth_of_its_storage() -> None:
    tensor = torch.ones(2)
    assert is_small_view(tensor, 8 * tensor.nbytes)
    assert not is_small_view(tensor, 8 * tensor.nbytes - 1)


def test_a_view_of_a_leaf_may_not_change() -> None:
    leaf: Any = torch.ones(4, requires_grad=True)
    assert not may_change(leaf, leaf)
    assert not may_change(leaf, leaf.view(2, 2))
    assert may_change(leaf, leaf * 2)
    assert may_change(leaf, (leaf * 2).view(2, 2))


def test_autocast_of_a_call_is_that_of_its_first_tensor() -> None:
    x, number, context = torch.ones(4, requires_grad=True), torch.ones((), device="meta"), None
    call = Call("mul.0", SPEC, context, lambda one, _: one * 2, (x, number), {})  # type: ignore[arg-type]
    with torch.autocast("cpu", torch.bfloat16):
        assert cached_call(call, call.plain()).autocast == ("cpu", torch.bfloat16)


@pytest.mark.parametrize(("levels", "gains"), [(0, True), (256, False)], ids=["exact run", "packed"])
def test_in_an_exact_run_every_call_gains(levels: int, gains: bool) -> None:
    x, context = torch.ones(2, requires_grad=True), None
    call = Call("sin.0", SPEC._replace(levels=levels), context, torch.sin, (x,), {})  # type: ignore[arg-type]
    assert call.gains(x) is gains


def test_a_call_that_went_by_a_tensor_of_its_own_is_not_cached() -> None:
    x, context, cache = torch.ones(4, requires_grad=True), None, CallCache()
    for asks in (False, True):
        call = Call("sin.0", SPEC, context, torch.sin, (x,), {})  # type: ignore[arg-type]
        if asks:
            call.ask(lambda _, tensor: tensor is not None, x * 2)
        output = call.plain()
        cache.clear()
        for _ in range(2):
            cache.note("sin.0", call, output)
        assert ("sin.0" in cache.calls) is not asks


def test_selective_checkpoints_are_recognized() -> None:
    assert not registry.is_selective()
    for context in create_selective_checkpoint_contexts([torch.ops.aten.mm.default]):
        with context:
            assert registry.is_selective()
    assert not registry.is_selective()


@pytest.mark.parametrize(("index", "changes"), [("all", False), ("1", True)])
def test_settings_are_final_when_they_do_not_change_again(index: str, changes: bool) -> None:
    """The indices of two calls are known when the first forward has ended."""
    policy = policy_of(f"on gelu:\n    by_index: {index}\n    level: 16\n")
    model = nn.Sequential(nn.Linear(8, 8), Calling(lambda x: F.gelu(F.gelu(x))))
    made = conversion(mt.convert(model, policy, min_elements=0))
    model(torch.randn(4, 8)).sum().backward()
    first = dict(made.specs)
    made.calls.calls["kept"] = ()
    assert made._make_final() == (first != made.specs) == changes
    assert ("kept" in made.calls.calls) == (not changes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_only_rows_of_zeros_count_as_such(dtype: torch.dtype) -> None:
    x = torch.zeros(8, 96, dtype=dtype)
    least = torch.finfo(dtype).smallest_normal
    for row, value in enumerate((0.0, -0.0, least, -least, torch.nan, torch.inf, -torch.inf)):
        x[row, 95] = value
    x[7, :2] = torch.tensor([1.0, -1.0])
    zero = ops.unpack_bits(storage.pack_zero_rows(x), (8,))
    assert zero.tolist() == [True, True, *[False] * 6]
