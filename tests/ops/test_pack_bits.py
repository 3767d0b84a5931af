"""Masks at one bit an element, against numpy's own packing."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mesa_tune import ops


@given(st.lists(st.integers(0, 12), max_size=4), st.integers(0, 2**31))
@settings(deadline=None, max_examples=60, derandomize=True)
def test_masks_return_and_lie_as_numpy_packs_them(shape: list[int], seed: int) -> None:
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) > 0.4
    packed = ops.pack_bits(mask)
    assert packed.dtype == torch.uint8
    assert np.array_equal(packed.numpy(), np.packbits(mask.flatten().numpy(), bitorder="little"))
    assert torch.equal(ops.unpack_bits(packed, mask.shape), mask)


def test_strides_do_not_matter() -> None:
    mask = torch.rand(33, 70) > 0.5
    assert torch.equal(ops.pack_bits(mask.t()), ops.pack_bits(mask.t().contiguous()))
    assert torch.equal(ops.pack_bits(mask[:, ::3]), ops.pack_bits(mask[:, ::3].contiguous()))


def test_other_dtypes_and_data_of_another_size_are_refused() -> None:
    with pytest.raises(TypeError, match=r"bool tensor.*float32"):
        ops.pack_bits(torch.zeros(3))
    with pytest.raises(RuntimeError):
        ops.unpack_bits(torch.zeros(3, dtype=torch.uint8), (100,))
