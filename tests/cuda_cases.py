"""What the CUDA kernels are tried on, on a GPU and without one."""

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

Sizes = tuple[int, int, int, int]  # bits, levels, group_size, quant_groups


class Case(NamedTuple):
    """A tensor, its settings, and the seed; None rounds to the nearest level."""

    x: Tensor
    sizes: Sizes
    seed: int | None


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def one_pass(bits: int, dtype: torch.dtype) -> Iterator[Case]:
    """Every group size that takes one pass, and its neighbours; a partial group at the end."""
    for group_size in (32, 64, 128, 256, 512, 1024, 2048, 192):
        x = randn(3 * group_size + 17, seed=bits).to(dtype)
        yield Case(x, (bits, 2**bits, group_size, 0), bits - 4)
        yield Case(x, (bits, max(2, 2**bits - 1), group_size, 0), None)
    yield Case(randn(700 * 64 + 9).to(dtype), (bits, 2**bits, 64, 0), 5)  # more threads than two blocks have


def layouts(dtype: torch.dtype) -> Iterator[Case]:
    """Strides, and groups of all kinds and sizes, larger than what a warp measures, too."""
    x = randn(2, 6, 5, 41).to(dtype)
    tensors = (x, x.to(memory_format=torch.channels_last), x[..., ::3], x[:1, :, :1].expand(2, 6, 3, 41))
    for tensor, sizes in itertools.product(tensors, ((256, 0), (7, 0), (5000, 0), (0, 3), (0, 1))):
        yield Case(tensor, (3, 7, *sizes), 2**40 + 1)
    yield Case(randn(1001).to(dtype)[1:], (4, 16, 64, 0), 1)  # no 16-byte accesses at this address
    for empty in (torch.empty(0, dtype=dtype), torch.empty(0, 6, dtype=dtype)):
        yield Case(empty, (4, 16, 256, 0), 1)
    yield Case(torch.empty(0, 6, dtype=dtype), (4, 16, 0, 3), 1)


def extremes(dtype: torch.dtype) -> Iterator[Case]:
    """Ranges at the ends of what numbers can be, and beyond."""
    largest = torch.finfo(dtype).max
    groups = [
        [largest, -largest, 1.0, 0.0],
        [largest * 0.75, -largest, 3e-39, -0.0],
        [1e-45, 0.0, 3e-45, 1e-38],
        [-0.0, 0.0, -0.0, 0.0],
        [1.0, 1.0000001, 1.0, 1.0],
        [math.nan, 1.0, 2.0, 3.0],
        [-math.nan, -1.0, 2.0, 3.0],
        [math.inf, 1.0, 2.0, 3.0],
        [-math.inf, math.inf, 2.0, 3.0],
    ]
    x = torch.tensor(groups).repeat(1, 16).to(dtype)
    for bits, group_size in itertools.product((1, 4, 8), (64, 60)):
        yield Case(x, (bits, 2**bits, group_size, 0), bits)
