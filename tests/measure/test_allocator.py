"""The simulated caching allocator: its pools, splitting, best fit, merging; and the high water of a step."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from mesa_tune.measure.cuda.allocator import MIB, AllocatorMeter, Block, CachingAllocator


@pytest.mark.parametrize(
    ("sizes", "reserved"),
    [
        ((100,), 2 * MIB),
        ((MIB, MIB), 2 * MIB),
        ((MIB, MIB, 1), 4 * MIB),
        ((MIB + 1,), 20 * MIB),
        ((9 * MIB, 11 * MIB), 20 * MIB),
        ((10 * MIB,), 10 * MIB),
        ((11 * MIB + 1,), 12 * MIB),
        ((11 * MIB, 12 * MIB), 24 * MIB),
    ],
    ids=str,
)
def test_segments_have_the_sizes_of_their_pools(sizes: tuple[int, ...], reserved: int) -> None:
    allocator = CachingAllocator()
    for size in sizes:
        allocator.allocate(size)
    assert allocator.reserved == reserved


def test_requests_are_rounded_to_512_bytes() -> None:
    allocator = CachingAllocator()
    allocator.allocate(1)
    allocator.allocate(513)
    assert allocator.allocated == 3 * 512


def test_the_best_fit_is_reused() -> None:
    allocator = CachingAllocator()
    large, small = allocator.allocate(40 * MIB), allocator.allocate(30 * MIB)
    allocator.release(large)
    allocator.release(small)
    assert allocator.allocate(29 * MIB + 1) is small
    assert allocator.reserved == 70 * MIB


def test_a_rest_of_at_most_a_mebibyte_stays_with_a_large_block() -> None:
    allocator = CachingAllocator()
    allocator.release(allocator.allocate(30 * MIB))
    allocator.allocate(29 * MIB)
    assert allocator.allocated == 30 * MIB


def test_free_neighbours_become_one_block() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(6 * MIB) for _ in range(3)]
    for block in blocks[::2] + blocks[1::2]:
        allocator.release(block)
    allocator.allocate(9 * MIB)
    allocator.allocate(9 * MIB)
    assert allocator.reserved == 20 * MIB


def test_blocks_in_use_never_overlap() -> None:
    generator, allocator, used = random.Random(0), CachingAllocator(), list[Block]()
    for _ in range(2000):
        if used and generator.random() < 0.5:
            allocator.release(used.pop(generator.randrange(len(used))))
        else:
            size = generator.choice([100, 5000, 600_000, 2 * MIB, 9 * MIB, 30 * MIB])
            used.append(allocator.allocate(size))
        ends = sorted((block.address, block.address + block.size) for block in used)
        assert all(first[1] <= second[0] for first, second in pairwise(ends))
        assert allocator.allocated == sum(block.size for block in used) <= allocator.reserved


def test_the_meter_passes_births_and_deaths() -> None:
    older = torch.zeros(MIB // 4)
    with AllocatorMeter() as meter:
        meter.count_older([older])
        first = torch.zeros(MIB // 4)
        view = first[:8]
        del first
        assert meter.allocator.allocated == 2 * MIB
        del view
        assert meter.allocator.allocated == MIB
        assert (meter.allocator.peak_allocated, meter.allocator.reserved) == (2 * MIB, 2 * MIB)
