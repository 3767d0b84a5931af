"""Quantization in given ranges, and the extents it begins with: kernels, and clamping."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mesa_tune.ops import reference
from mesa_tune.ops.codecs import RAW
from mesa_tune.ops.reference import codecs as reference_codecs
from tests.cuda_cases import Sizes
from tests.ops.test_ops_kernels import needs_library, quant_groups, same_bytes, same_numbers, tensors

SEED = torch.tensor([3])
GROUPS = (
    *((256, 0, torch.float16), (4097, 0, torch.bfloat16), (10**6, 0, torch.float16)),
    *((10**6, 0, torch.float32), (1, 3, torch.float32), (1, 3, torch.bfloat16)),
)
"""group_size, quant_groups and the dtype of a tensor."""


def ranges_near(x: torch.Tensor, levels: int, group_size: int, groups: int, narrower: float) -> torch.Tensor:
    own = reference_codecs.extents(x, group_size, groups)
    low, width = own[:, 0], (own[:, 1] - own[:, 0]).nan_to_num(1.0, 1.0, 1.0)
    low = low.nan_to_num(0.0, 0.0, 0.0) + narrower * width
    return reference.ranges_of(low, low + (1 - 2 * narrower) * width, levels)


Within = tuple[torch.Tensor, Sizes, torch.Tensor, int | None]


@st.composite
def given_ranges(draw: st.DrawFn) -> Within:
    """A finite tensor, its settings, ranges near those of its groups, and a seed or None."""
    x = draw(tensors()).nan_to_num(0.0, 0.0, 0.0)  # what is not finite is stored with ranges that are not
    bits = draw(st.integers(1, 8))
    levels = draw(st.integers(2, 2**bits))
    groups = draw(quant_groups(x))
    group_size = draw(st.sampled_from([1, 7, 64, 256, 5000, 10**6]))
    ranges = ranges_near(x, levels, group_size, groups, draw(st.sampled_from([-0.3, 0.0, 0.2])))
    return x, (bits, levels, group_size, groups), ranges, draw(st.none() | st.integers(0, 2**63 - 1))


@needs_library
@given(given_ranges())
@settings(deadline=None, max_examples=100, derandomize=True)
def test_kernels_give_the_references_bytes(case: Within) -> None:
    x, sizes, ranges, seed = case
    assert same_numbers(RAW.extents(x, *sizes[2:]), reference_codecs.extents(x, *sizes[2:]))
    arguments = (x, ranges, *sizes, seed is not None, torch.tensor([seed or 0]))
    assert same_bytes(RAW.quantize_within(*arguments), reference_codecs.quantize_within(*arguments))


@needs_library
@pytest.mark.parametrize(("group_size", "groups", "dtype"), GROUPS, ids=str)
def test_kernels_on_groups_of_every_kind(group_size: int, groups: int, dtype: torch.dtype) -> None:
    x = torch.randn(2, 6, 37, 41, generator=torch.Generator().manual_seed(2)).to(dtype)
    x[0, 0, 0, :4] = torch.tensor([float("nan"), float("inf"), float("-inf"), -0.0])
    for layout in (x, x.to(memory_format=torch.channels_last)):
        own = RAW.extents(layout, group_size, groups)
        assert same_numbers(own, reference_codecs.extents(layout, group_size, groups))
        finite = layout.nan_to_num(0.0, 0.0, 0.0)
        ranges = ranges_near(finite, 8, group_size, groups, 0.1)
        ranges[0] = torch.nan
        arguments = (finite, ranges, 3, 8, group_size, groups, True, SEED)
        assert same_bytes(RAW.quantize_within(*arguments), reference_codecs.quantize_within(*arguments))


@pytest.mark.parametrize("stochastic", [True, False])
def test_values_outside_take_the_nearest_end(stochastic: bool) -> None:
    x = torch.tensor([-5.0, -1.0, 0.0, 1.0, 2.0, 7.0])
    ranges = reference.ranges_of(torch.tensor([-1.0]), torch.tensor([2.0]), 4)
    data = RAW.quantize_within(x, ranges, 2, 4, 6, 0, stochastic, SEED)
    decoded = torch.ops.mesa_tune.dequantize(data, ranges, x.shape, x.dtype, 2, 4, 6, 0)
    assert decoded.tolist() == [-1.0, -1.0, 0.0, 1.0, 2.0, 2.0]


@needs_library
def test_ranges_of_another_number_of_groups_are_refused() -> None:
    with pytest.raises(RuntimeError, match="expected contiguous ranges of 4 elements"):
        RAW.quantize_within(torch.zeros(512), torch.zeros(3, 2), 4, 16, 256, 0, True, SEED)
