"""Elements as one of a few fixed levels: default kernels of `pack_levels` and `unpack_levels`.

Plane p holds bit p of all codes, the first element in the lowest bit of its first byte. Boundaries and values
are Python numbers: a tensor of them would be copied to the device at every call.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mesa_tune.ops import maps, reference


def level_bits(levels: int) -> int:
    """Return the bits per element of so many levels."""
    return (levels - 1).bit_length()


def pack_levels(x: Tensor, boundaries: Sequence[float], map: int) -> tuple[Tensor, Tensor]:
    """Return the planes of the number of boundaries below each element of map number `map` of x (0: of x).

    The second result, `offset`, is 0, or NaN if an element is not finite.
    """
    values = maps.apply(x, map, None, None, 1) if map else x.detach().to(torch.float32)
    codes = torch.zeros(values.shape, dtype=torch.uint8, device=x.device)
    for boundary in boundaries:
        codes += values > boundary
    bits = range(level_bits(len(boundaries) + 1))
    planes = [reference.pack_bits((codes & (1 << bit)) != 0) for bit in bits]
    offset = torch.where(torch.isfinite(values).all(), 0.0, torch.nan)
    return torch.cat(planes), offset.to(torch.float32).view(1)


def unpack_levels(
    data: Tensor, offset: Tensor, values: Sequence[float], shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """Return the value of each element's level, rounded to `dtype`; NaN if `offset` is."""
    codes = torch.zeros(tuple(shape), dtype=torch.uint8, device=data.device)
    planes = data.view(level_bits(len(values)), reference.plane_bytes(codes.numel()))
    for bit, plane in enumerate(planes):
        codes |= reference.unpack_bits(plane, shape).to(torch.uint8) << bit
    out = torch.full_like(codes, values[0], dtype=torch.float32)
    for code, value in enumerate(values[1:], 1):
        out.masked_fill_(codes == code, value)
    return (out + offset).to(dtype)
