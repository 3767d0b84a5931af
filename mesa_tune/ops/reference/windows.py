"""A max pool's indices as offsets in their windows, in few bits: the reference in plain PyTorch.

Along each dimension, window i starts at i · stride − padding, and its positions are `dilation` apart. The
windows of an adaptive pool start at ⌊i · input size / output size⌋. An offset counts the positions of its
window in row-major order. Offsets are stored as bit planes, the lowest bit first, each packed by `pack_bits`.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mesa_tune.ops import reference


class Windows(NamedTuple):
    """The windows along one dimension of `size`: `number` windows of `extent` positions, `step` apart."""

    size: int
    number: int
    extent: int
    step: int
    stride: int
    padding: int

    def starts(self, device: torch.device) -> Tensor:
        """Return the first position of each window; stride 0 means an adaptive pool."""
        window = torch.arange(self.number, device=device)
        return window * self.stride - self.padding if self.stride else window * self.size // self.number


def flattened(windows: Sequence[Windows]) -> list[int]:
    """Return the windows of all dimensions as one list of integers, the argument of the ops."""
    return [number for axis in windows for number in axis]


def offset_bits(windows: Sequence[int]) -> int:
    """Return the bits of an offset in flattened `windows`."""
    return max(1, (math.prod(windows[2 :: len(Windows._fields)]) - 1).bit_length())


def to_offsets(indices: Tensor, windows: Sequence[Windows]) -> Tensor:
    """Return the offsets of indices, which count the input's positions over its last dimensions."""
    offset = torch.zeros_like(indices)
    rest = indices
    for dim, axis in reversed(list(enumerate(windows))):
        position, rest = rest % axis.size, rest.div(axis.size, rounding_mode="floor")
        step = (position - _along(axis.starts(indices.device), dim, windows)) // axis.step
        offset += step * math.prod([inner.extent for inner in windows[dim + 1 :]])
    return offset


def to_indices(offset: Tensor, windows: Sequence[Windows]) -> Tensor:
    """Return the indices from the result of `to_offsets`."""
    indices = torch.zeros_like(offset)
    for dim, axis in enumerate(windows):
        step = offset // math.prod([inner.extent for inner in windows[dim + 1 :]]) % axis.extent
        position = step * axis.step + _along(axis.starts(offset.device), dim, windows)
        indices = indices * axis.size + position
    return indices


def _along(values: Tensor, dim: int, windows: Sequence[Windows]) -> Tensor:
    """Return a vector as a tensor that broadcasts along dimension `dim` of the windows."""
    return values.view([-1] + [1] * (len(windows) - 1 - dim))


def pack_windows(indices: Tensor, windows: Sequence[int]) -> Tensor:
    """Pack indices, which count the input's positions over its last dimensions, as bit planes of offsets."""
    offset = to_offsets(indices, _parsed(windows)).reshape(1, -1)
    bit = torch.arange(offset_bits(windows), device=offset.device)[:, None]
    return torch.cat([reference.pack_bits(plane) for plane in (offset >> bit) & 1 == 1])


def unpack_windows(data: Tensor, windows: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Return the indices (int64, `shape`) that `pack_windows` packed into `data`."""
    offset = torch.zeros(tuple(shape), dtype=torch.int64, device=data.device)
    for bit, plane in enumerate(data.view(offset_bits(windows), -1)):
        offset += reference.unpack_bits(plane, shape).to(torch.int64) << bit
    return to_indices(offset, _parsed(windows))


def _parsed(windows: Sequence[int]) -> list[Windows]:
    fields = len(Windows._fields)
    return [Windows(*windows[first : first + fields]) for first in range(0, len(windows), fields)]
