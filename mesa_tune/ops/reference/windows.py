"""Where in its window a max pool's maximum lies, in few bits, in plain PyTorch: what the ops of windows mean.

Along each dimension window i starts at i s − p and has steps of the dilation; those of an adaptive pool start
at ⌊i in / out⌋. A position's offset counts through its window in row-major order; offsets are stored as
`pack_bits` stores each of their bits, the lowest first.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mesa_tune.ops import reference


class Windows(NamedTuple):
    """The windows along one dimension of `size`: `number` of them, each `extent` positions, `step` apart."""

    size: int
    number: int
    extent: int
    step: int
    stride: int
    padding: int

    def starts(self, device: torch.device) -> Tensor:
        """The first position of each window; an adaptive pool (stride 0) shares the input out evenly."""
        each = torch.arange(self.number, device=device)
        return each * self.stride - self.padding if self.stride else each * self.size // self.number


def flattened(windows: Sequence[Windows]) -> list[int]:
    """The windows of all dimensions as the ops take them."""
    return [number for each in windows for number in each]


def offset_bits(windows: Sequence[int]) -> int:
    """Bits of an offset in flattened `windows`."""
    return max(1, (math.prod(windows[2 :: len(Windows._fields)]) - 1).bit_length())


def to_offsets(indices: Tensor, windows: Sequence[Windows]) -> Tensor:
    """Positions in the input, flattened over its last dimensions, as offsets in each one's window."""
    offset = torch.zeros_like(indices)
    rest = indices
    for place, each in reversed(list(enumerate(windows))):
        position, rest = rest % each.size, rest.div(each.size, rounding_mode="floor")
        within = (position - _along(each.starts(indices.device), place, windows)) // each.step
        offset += within * math.prod([later.extent for later in windows[place + 1 :]])
    return offset


def to_indices(offset: Tensor, windows: Sequence[Windows]) -> Tensor:
    """What `to_offsets` took."""
    indices = torch.zeros_like(offset)
    for place, each in enumerate(windows):
        within = offset // math.prod([later.extent for later in windows[place + 1 :]]) % each.extent
        position = within * each.step + _along(each.starts(offset.device), place, windows)
        indices = indices * each.size + position
    return indices


def _along(values: Tensor, place: int, windows: Sequence[Windows]) -> Tensor:
    return values.view([-1] + [1] * (len(windows) - 1 - place))


def pack_windows(indices: Tensor, windows: Sequence[int]) -> Tensor:
    """Positions in the input, flattened over its last dimensions, as planes of their offsets' bits."""
    offset = to_offsets(indices, _parsed(windows)).reshape(1, -1)
    places = torch.arange(offset_bits(windows), device=offset.device)[:, None]
    return torch.cat([reference.pack_bits(plane) for plane in (offset >> places) & 1 == 1])


def unpack_windows(data: Tensor, windows: Sequence[int], shape: Sequence[int]) -> Tensor:
    """The positions (int64, `shape`) that `pack_windows` took."""
    offset = torch.zeros(tuple(shape), dtype=torch.int64, device=data.device)
    for place, plane in enumerate(data.view(offset_bits(windows), -1)):
        offset += reference.unpack_bits(plane, shape).to(torch.int64) << place
    return to_indices(offset, _parsed(windows))


def _parsed(windows: Sequence[int]) -> list[Windows]:
    fields = len(Windows._fields)
    return [Windows(*windows[first : first + fields]) for first in range(0, len(windows), fields)]
