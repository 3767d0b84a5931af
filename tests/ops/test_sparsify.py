"""The largest magnitudes and their places: kernels, ties, and bitmaps that do not fit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mesa_tune.ops.codecs import RAW
from mesa_tune.ops.reference import codecs as reference_codecs
from tests.cuda_cases import SPARSE_DTYPES, randn
from tests.ops.test_ops_kernels import needs_library, same_bytes


def assert_kernels_agree(x: Tensor, count: int) -> None:
    bitmap, survivors = parts = RAW.sparsify(x, count)
    assert all(map(same_bytes, parts, reference_codecs.sparsify(x, count)))
    found, right = (dense(bitmap, survivors, x.shape) for dense in (RAW.densify, reference_codecs.densify))
    assert same_bytes(found, right)


@needs_library
@given(st.data())
@settings(deadline=None, max_examples=100, derandomize=True)
def test_any_tensor(data: st.DataObject) -> None:
    numel = data.draw(st.integers(0, 3000))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    x = torch.randn(numel, generator=generator) * 10.0 ** data.draw(st.integers(-42, 36))
    coarse = data.draw(st.sampled_from([0.0, 0.5, 4.0]))  # ties
    x = (x / coarse).round() * coarse if coarse else x
    assert_kernels_agree(x.to(data.draw(st.sampled_from(SPARSE_DTYPES))), data.draw(st.integers(0, numel)))


@needs_library
@pytest.mark.parametrize("dtype", SPARSE_DTYPES, ids=str)
def test_tensors_of_many_blocks(dtype: torch.dtype) -> None:
    x = (randn(5, 20_011) * 40).to(dtype)
    for number, share in enumerate((0.0, 0.01, 0.5, 1.0)):
        assert_kernels_agree((x, x.t())[number % 2], int(share * x.numel()))
        assert_kernels_agree(torch.ones_like(x), int(share * x.numel()))


@needs_library
def test_nan_and_infinity_are_the_largest() -> None:
    x = torch.randn(1000)
    x[[17, 500, 999]] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    assert_kernels_agree(x, 1)
    assert_kernels_agree(x, 3)
    assert RAW.sparsify(x, 3)[1].isfinite().sum() == 0


@needs_library
def test_a_bitmap_of_another_number_of_bits_is_refused() -> None:
    bitmap, survivors = RAW.sparsify(torch.randn(100), 30)
    with pytest.raises(RuntimeError, match="a survivor for each of the bitmap's 30 bits, but got 29"):
        RAW.densify(bitmap, survivors[:29], (100,))
    with pytest.raises(RuntimeError, match="expected 0 to 100 survivors, but got 101"):
        RAW.sparsify(torch.randn(100), 101)
