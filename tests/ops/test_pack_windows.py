"""Where maxima lie in their windows, in few bits: what returns, its size, and the kernels."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mesa_tune.ops.codecs import RAW
from mesa_tune.ops.reference import windows as reference_windows
from mesa_tune.ops.reference.windows import Windows, flattened, offset_bits, to_indices, to_offsets
from tests.ops.test_ops_kernels import needs_library

POOLS: tuple[Any, ...] = (F.max_pool1d, F.max_pool2d, F.max_pool3d)
ADAPTIVE: tuple[Any, ...] = (F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d)


def assert_returns(indices: Tensor, windows: list[Windows]) -> None:
    flat = flattened(windows)
    packed = RAW.pack_windows(indices, flat)
    assert packed.numel() == offset_bits(flat) * -(-indices.numel() // 8)
    assert torch.equal(packed, reference_windows.pack_windows(indices, flat))
    for unpack in (RAW.unpack_windows, reference_windows.unpack_windows):
        assert torch.equal(unpack(packed, flat, indices.shape), indices)


@given(st.data())
@settings(deadline=None, max_examples=60, derandomize=True)
def test_positions_return(data: st.DataObject) -> None:
    places = data.draw(st.integers(1, 3))
    kernel, stride = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    dilation, padding = data.draw(st.integers(1, 3)), data.draw(st.integers(0, kernel // 2))
    least = dilation * (kernel - 1) + 1
    sizes = [data.draw(st.integers(least, least + 9)) for _ in range(places)]
    x = torch.randn(2, 3, *sizes, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    y, indices = POOLS[places - 1](x, kernel, stride, padding, dilation, return_indices=True)
    axes = ((*axis, kernel, dilation, stride, padding) for axis in zip(sizes, y.shape[2:], strict=True))
    assert_returns(indices, [Windows(*axis) for axis in axes])


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 9)), min_size=1, max_size=3))
@settings(deadline=None, max_examples=40, derandomize=True)
def test_positions_in_adaptive_windows_return(sizes: list[tuple[int, int]]) -> None:
    x = torch.randn(2, 3, *(size for size, _ in sizes))
    _, indices = ADAPTIVE[len(sizes) - 1](x, [number for _, number in sizes], return_indices=True)
    windows = [Windows(size, number, -(-size // number) + 1, 1, 0, 0) for size, number in sizes]
    assert_returns(indices, windows)


def test_positions_of_many_blocks_return() -> None:
    x = torch.randn(3, 7, 61, 67).to(memory_format=torch.channels_last)
    y, indices = F.max_pool2d(x, 3, 2, 1, return_indices=True)
    shape = zip(x.shape[2:], y.shape[2:], strict=True)
    assert_returns(indices, [Windows(size, number, 3, 1, 2, 1) for size, number in shape])


def test_offsets_stay_within_adaptive_windows() -> None:
    windows = (Windows(9, 4, 3, 1, 0, 0),)
    _, indices = F.adaptive_max_pool1d(torch.randn(3, 9), 4, return_indices=True)
    offsets = to_offsets(indices, windows)
    assert 0 <= int(offsets.min()) <= int(offsets.max()) < 3
    assert torch.equal(to_indices(offsets, windows), indices)


@needs_library
def test_windows_of_another_shape_are_refused() -> None:
    indices = torch.zeros(2, 4, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="expected as many windows as outputs"):
        RAW.pack_windows(indices, flattened([Windows(9, 5, 3, 1, 2, 0)]))
    with pytest.raises(RuntimeError, match="expected contiguous data of 2 elements"):
        RAW.unpack_windows(torch.zeros(3, dtype=torch.uint8), flattened([Windows(9, 4, 3, 1, 2, 0)]), (2, 4))
