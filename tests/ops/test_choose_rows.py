"""Choosing rows by their norms: the kernel chooses those of the reference, bit for bit."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mesa_tune.ops.codecs import RAW
from mesa_tune.ops.reference import sampling
from tests.cuda_cases import randn
from tests.ops.test_ops_kernels import needs_library, same_bytes


def assert_kernels_agree(norms: Tensor, count: int, key: int) -> None:
    given_rows = (norms, count, torch.tensor([key]))
    assert all(map(same_bytes, RAW.choose_rows(*given_rows), sampling.choose_rows(*given_rows)))


@needs_library
@given(st.data())
@settings(deadline=None, max_examples=100, derandomize=True)
def test_any_norms(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 2000))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    norms = torch.randn(rows, generator=generator).abs() ** data.draw(st.sampled_from([0.0, 1.0, 9.0]))
    coarse = data.draw(st.sampled_from([0.0, 0.5, 4.0]))  # ties
    norms = (norms / coarse).round() * coarse if coarse else norms
    odd = data.draw(st.sampled_from([0, 1, rows // 2, rows]))
    norms[:odd] = data.draw(st.sampled_from([0.0, 1e-42, 3e38, math.inf, math.nan]))
    assert_kernels_agree(norms, data.draw(st.integers(1, rows)), data.draw(st.integers(-(2**63), 2**63 - 1)))


@needs_library
def test_many_rows() -> None:
    norms = randn(300_000).abs()
    for count in (1, 3_000, 299_999, 300_000):
        assert_kernels_agree(norms, count, 7)


@needs_library
def test_a_count_without_as_many_rows_is_refused() -> None:
    for count in (0, 6):
        with pytest.raises(RuntimeError, match="expected 1 to 5 rows to choose"):
            RAW.choose_rows(torch.ones(5), count, torch.zeros(1, dtype=torch.int64))
