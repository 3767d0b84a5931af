"""The set bits of a bitmap as an Elias-Fano code: default kernels of `pack_positions` and `unpack_positions`.

`count` ascending positions below `numel` take about 2 + log2(numel / count) bits each. `low` planes hold the
lowest bits of each position. In one more plane, bit (position >> low) + index is set for each.
"""

import torch
from torch import Tensor

from mesa_tune.ops import reference


def position_bytes(numel: int, count: int, low: int) -> int:
    """Return the bytes of the code."""
    return low * reference.plane_bytes(count) + reference.plane_bytes(_high_bits(numel, count, low))


def pack_positions(bitmap: Tensor, numel: int, count: int, low: int) -> Tensor:
    """Return the code (uint8) of the `count` bits that are set in the bitmap of `numel` bits."""
    position = _set_bits(reference.unpack_bits(bitmap, (numel,)), count)
    planes = [reference.pack_bits((position >> bit & 1) == 1) for bit in range(low)]
    high = torch.zeros(_high_bits(numel, count, low), dtype=torch.bool, device=bitmap.device)
    high[(position >> low) + torch.arange(count, device=bitmap.device)] = True
    return torch.cat([*planes, reference.pack_bits(high)])


def unpack_positions(data: Tensor, numel: int, count: int, low: int) -> Tensor:
    """Return the bitmap of which `data` is the code."""
    size = reference.plane_bytes(count)
    high = reference.unpack_bits(data[low * size :], (_high_bits(numel, count, low),))
    position = (_set_bits(high, count) - torch.arange(count, device=data.device)) << low
    for bit in range(low):
        plane = reference.unpack_bits(data[bit * size : (bit + 1) * size], (count,))
        position |= plane.to(torch.int64) << bit
    mask = torch.zeros(numel, dtype=torch.bool, device=data.device)
    mask[position] = True
    return reference.pack_bits(mask)


def _high_bits(numel: int, count: int, low: int) -> int:
    return count + -(-numel // (1 << low))


def _set_bits(mask: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` elements that are True; unlike `nonzero`, wait for no device."""
    rank = mask.cumsum(0, dtype=torch.int32)
    ranks = torch.arange(1, count + 1, dtype=torch.int32, device=mask.device)
    return torch.searchsorted(rank, ranks)
