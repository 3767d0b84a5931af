"""The native kernels give the reference's bytes: every width, type and layout."""

import itertools
import math
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mesa_tune import ops
from mesa_tune.ops import reference
from tests import cuda_cases
from tests.cuda_cases import Sizes, randn

REFERENCE_ONLY = os.environ.get("MESA_TUNE_REFERENCE") == "1"
needs_library = pytest.mark.skipif(REFERENCE_ONLY, reason="MESA_TUNE_REFERENCE=1 leaves the library out")
LARGEST = torch.finfo(torch.float32).max


def test_the_library_is_loaded_unless_told_otherwise() -> None:
    assert ops.native() is not REFERENCE_ONLY


def same_bytes(one: Tensor, two: Tensor) -> bool:
    flat = [t.contiguous().view(-1).view(torch.uint8) for t in (one, two)]
    return one.shape == two.shape and one.dtype == two.dtype and torch.equal(*flat)


def same_numbers(one: Tensor, two: Tensor) -> bool:
    """The same bytes, where NaN is NaN whatever its payload (torch's own depends on the instruction set)."""
    nans = one.isnan()
    return torch.equal(nans, two.isnan()) and same_bytes(one.masked_fill(nans, 0), two.masked_fill(nans, 0))


def assert_kernels_agree(x: Tensor, sizes: Sizes, *, stochastic: bool, seed: int) -> None:
    noise = torch.tensor([seed])
    data, ranges = torch.ops.mesa_tune.quantize(x, *sizes, stochastic, noise)
    expected = reference.quantize(x, *sizes, stochastic, noise)
    assert same_bytes(ranges, expected[1])
    assert same_bytes(data, expected[0])
    for dtype in ops.DTYPES:
        decoded = torch.ops.mesa_tune.dequantize(data, ranges, x.shape, dtype, *sizes)
        assert same_numbers(decoded, reference.dequantize(data, ranges, x.shape, dtype, *sizes))


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(0, 12), max_size=5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    every = draw(st.integers(1, 3))
    x = torch.randn([*shape[:-1], shape[-1] * every] if shape else [], generator=generator)
    x = x[..., ::every].permute(draw(st.permutations(range(len(shape))))) if shape else x
    scale = 10.0 ** draw(st.integers(-44, 38))
    return (x * scale + draw(st.sampled_from([0.0, 1.0, -1e4]))).to(draw(st.sampled_from(ops.DTYPES)))


def quant_groups(x: Tensor) -> st.SearchStrategy[int]:
    """0, or a number of groups that the channels or heads of x can be divided into."""
    extent = (x.shape or (1,))[1 if x.dim() in (4, 5) else -1]
    return st.sampled_from([0, *(d for d in range(1, extent + 1) if extent % d == 0)])


@needs_library
@given(st.data())
@settings(deadline=None, max_examples=120, derandomize=True)
def test_any_tensor(data: st.DataObject) -> None:
    x = data.draw(tensors())
    bits = data.draw(st.integers(1, 8))
    levels = data.draw(st.integers(2, 2**bits))
    groups = data.draw(quant_groups(x))
    group_size = data.draw(st.sampled_from([1, 5, 8, 64, 100, 256, 10**6]))
    stochastic, seed = data.draw(st.booleans()), data.draw(st.integers(-(2**63), 2**63 - 1))
    assert_kernels_agree(x, (bits, levels, group_size, groups), stochastic=stochastic, seed=seed)


@needs_library
@pytest.mark.parametrize(("group_size", "groups"), [(4096, 0), (4097, 0), (9001, 0), (10**6, 0), (256, 2)])
def test_groups_larger_than_a_tile(group_size: int, groups: int) -> None:
    for number, (bits, dtype) in enumerate(itertools.product((1, 4, 5, 8), ops.DTYPES)):
        x = randn(2, 6, 37, 41, seed=bits).to(dtype)
        layouts = (x, x.to(memory_format=torch.channels_last), x[:1, :, :1].expand(2, 6, 37, 41), x)
        layout = layouts[(number + number // 4) % 4]
        sizes = (bits, 2**bits, group_size, groups)
        assert_kernels_agree(layout, sizes, stochastic=number % 4 != 3, seed=bits)


EXTREMES = (
    *([3e38, -3e38, 0.0, 1e38], [LARGEST, -LARGEST, 1.0, 2.0], [1e-45, 0.0, 3e-45, 1e-38]),
    *([-0.0, 0.0, -0.0, 0.0], [1.0, 1.0000001, 1.0, 1.0], [1e8, 1e8 + 8, 1e8 + 16, 1e8]),
    *([math.nan, 1.0, 2.0, 3.0], [math.inf, -math.inf, 2.0, 3.0]),
)


@needs_library
@pytest.mark.parametrize("bits", range(1, 9))
def test_extreme_values(bits: int) -> None:
    for values, group_size in itertools.product(EXTREMES, (4, 7, 64, 6000)):
        x = torch.tensor(values).repeat(2000 if group_size == 6000 else 40)
        assert_kernels_agree(x, (bits, 2**bits, group_size, 0), stochastic=True, seed=bits)


@needs_library
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_16_bit_number_is_read_and_written(dtype: torch.dtype) -> None:
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    q = ops.quantize(x, 1, 1, seed=0)  # a group of one is its own zero point
    assert torch.equal(q.ranges[:, 0].nan_to_num(7, 8, 9), x.float().nan_to_num(7, 7, 7))
    assert torch.equal(ops.dequantize(q)[x.isfinite()], x[x.isfinite()])


@needs_library
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_float32_is_rounded_to_16_bits_as_torch_does(dtype: torch.dtype) -> None:
    patterns = torch.randint(-(2**31), 2**31, (200_000,), generator=torch.Generator().manual_seed(0))
    edges = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).float().view(torch.int32)
    halfway = edges.long() + torch.tensor([[0], [0x7FFF], [0x8000], [0x8001], [0xFFF], [0x1000], [0x1001]])
    wanted = torch.cat([patterns, halfway.flatten()]).to(torch.int32).view(torch.float32)
    ranges = torch.stack([wanted, torch.zeros_like(wanted)], 1)
    data = torch.zeros(wanted.numel(), dtype=torch.uint8)
    decoded = torch.ops.mesa_tune.dequantize(data, ranges, wanted.shape, dtype, 1, 2, 1, 0)
    assert same_numbers(decoded, (wanted + 0.0).to(dtype))


@needs_library
def test_ranges_in_given_memory_are_float32() -> None:
    x = torch.ones(300).half()
    data, ends = torch.ops.mesa_tune.quantize_ends(x, 4, 16, 64, 0, False, None)
    with pytest.raises(RuntimeError, match="expected ranges of float32"):
        torch.ops.mesa_tune.quantize_out(x, 4, 16, 64, 0, False, None, data, ends)


@needs_library
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_ends_in_16_bits(dtype: torch.dtype) -> None:
    for x, sizes, seed in cuda_cases.ends(dtype):
        settings = (*sizes, seed is not None, torch.tensor([seed or 0]))
        data, ends = torch.ops.mesa_tune.quantize_ends(x, *settings)
        wanted = reference.quantize_ends(x, *settings)
        assert ends.dtype == dtype
        assert same_bytes(data, wanted[0])
        assert same_numbers(ends, wanted[1])
        for out in ops.DTYPES:
            decoded = torch.ops.mesa_tune.dequantize(data, ends, x.shape, out, *sizes)
            assert same_numbers(decoded, reference.dequantize(data, ends, x.shape, out, *sizes))


@pytest.mark.parametrize("dtype", ops.DTYPES, ids=str)
def test_rows_of_zeros(dtype: torch.dtype) -> None:
    for x in cuda_cases.rows_of_zeros(dtype):
        packed = torch.ops.mesa_tune.pack_zero_rows(x)
        found = [bool((row == 0).all()) for row in x.reshape(-1, x.shape[-1])]
        assert ops.unpack_bits(packed, (len(found),)).tolist() == found
        # The same, packed together with their tensor; then decoded as zeros.
        settings = (4, 16, 64, True, torch.tensor([5]))
        parts = torch.ops.mesa_tune.quantize_rows(x, *settings)
        for part, wanted in zip(parts, reference.quantize_rows(x, *settings), strict=True):
            assert same_numbers(part, wanted)
        data, ranges, zero_rows = parts
        decoded = torch.ops.mesa_tune.dequantize(data, ranges, x.shape, dtype, 4, 16, 64, 0)
        cleared = torch.ops.mesa_tune.dequantize(data, ranges, x.shape, dtype, 4, 16, 64, 0, zero_rows)
        zeros = (x == 0).all(-1, keepdim=True)
        assert same_numbers(cleared, decoded.masked_fill(zeros, 0))


@needs_library
def test_bits_of_zero_rows_must_be_one_per_row() -> None:
    q = ops.quantize(torch.randn(20, 50), 4)
    bits = torch.zeros(2, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="bits of zero rows of 3"):
        torch.ops.mesa_tune.dequantize(q.data, q.ranges, q.shape, q.dtype, 4, 16, 256, 0, bits)


@needs_library
def test_masks() -> None:
    for numel in (0, 1, 8, 1003, 2**20 + 3):
        mask = torch.rand(numel) > 0.5
        packed = ops.pack_bits(mask)
        assert torch.equal(packed, reference.pack_bits(mask))
        assert torch.equal(reference.unpack_bits(packed, mask.shape), mask)


@needs_library
def test_more_than_2_to_the_31_elements_end_as_they_begin() -> None:
    row = torch.randn(1, 2**16)
    rows = 2**15 + 3
    q = ops.quantize(row.expand(rows, -1), 1, 2**16, stochastic=False)  # 2**31 elements and three rows
    one = ops.quantize(row, 1, 2**16, stochastic=False)
    planes = q.data.view(rows, -1)
    assert (planes == one.data).all()
    assert torch.equal(q.ranges, one.ranges.expand(rows, 2))


@needs_library
def test_noise_past_element_2_to_the_32_of_one_group() -> None:
    row = torch.linspace(0, 1, 2**16)
    numel = 2**32 + 2**17
    q = ops.quantize(row.expand(numel // 2**16, -1), 1, numel, seed=9)
    plane = numel // 8
    element = torch.arange(2**32 - 1000, 2**32 + 1000)
    found = (q.data[element % plane] >> (element // plane)) & 1
    noise = reference.noise(torch.tensor([9]), 0, q.ranges, element)[0]
    assert torch.equal(found, reference.round_up(row[element % 2**16], noise).to(torch.uint8))
