"""CUDA's caching allocator, simulated: how much memory PyTorch reserves for the bytes that live.

What is hard: reserved memory depends on the order in which storages are born and die. Blocks are cut from
segments, freed blocks are reused for what fits best, and a segment stays reserved. The rules are those of
c10/cuda/CUDACachingAllocator.cpp with its default settings.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import Any

from mesa_tune.measure.cuda.reductions import reduction_bytes, this_processor
from mesa_tune.measure.memory.meter import Meter

MIB = 1 << 20
ROUNDING = 512
_SMALL = MIB
"""Largest request that is served from the pool of small segments."""
_SMALL_SEGMENT, _LARGE_SEGMENT, _OWN_SEGMENT = 2 * MIB, 20 * MIB, 10 * MIB
"""Segments of small requests, of large ones, and the least request with a segment of its own size."""


def rounded(size: int, unit: int = ROUNDING) -> int:
    """Return `size` rounded up to a multiple of `unit`; at least one unit."""
    return max(unit, -(-size // unit) * unit)


@dataclass(eq=False)
class Block:
    """A part of a segment; its neighbours in the segment are linked."""

    address: int
    size: int
    small: bool
    free: bool = False
    before: Block | None = None
    after: Block | None = None


class CachingAllocator:
    """Serves requests from segments. `reserved`: bytes of all segments, which are never given back.

    `allocated`: bytes of the blocks in use; `peak_allocated`: the most that this has been.
    """

    def __init__(self) -> None:
        self.reserved = self.allocated = self.peak_allocated = 0
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}

    def allocate(self, size: int) -> Block:
        """Return a block for `size` bytes: the smallest free one that fits, or one of a new segment."""
        size = rounded(size)
        small = size <= _SMALL
        blocks = self._free[small]
        index = bisect.bisect_left(blocks, (size, 0), key=lambda entry: entry[:2])
        block = blocks.pop(index)[2] if index < len(blocks) else self._segment(size, small)
        block.free = False
        self._split(block, size)
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def release(self, block: Block) -> None:
        """Free a block, and merge it with free neighbours."""
        self.allocated -= block.size
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.free:
                self._forget(neighbour)
                block = _merged(*sorted((block, neighbour), key=lambda each: each.address))
        self._remember(block)

    def _segment(self, size: int, small: bool) -> Block:
        large = _LARGE_SEGMENT if size < _OWN_SEGMENT else rounded(size, 2 * MIB)
        total = _SMALL_SEGMENT if small else large
        block = Block(self.reserved, total, small)
        self.reserved += total
        return block

    def _split(self, block: Block, size: int) -> None:
        rest = block.size - size
        if rest >= ROUNDING if block.small else rest > _SMALL:
            remainder = Block(block.address + size, rest, block.small, before=block, after=block.after)
            if block.after is not None:
                block.after.before = remainder
            block.size, block.after = size, remainder
            self._remember(remainder)

    def _remember(self, block: Block) -> None:
        block.free = True
        bisect.insort(self._free[block.small], (block.size, block.address, block), key=lambda each: each[:2])

    def _forget(self, block: Block) -> None:
        blocks = self._free[block.small]
        del blocks[bisect.bisect_left(blocks, (block.size, block.address), key=lambda entry: entry[:2])]


def _merged(first: Block, second: Block) -> Block:
    merged = Block(
        first.address, first.size + second.size, first.small, before=first.before, after=second.after
    )
    if merged.before is not None:
        merged.before.after = merged
    if merged.after is not None:
        merged.after.before = merged
    return merged


class AllocatorMeter(Meter):
    """A meter that passes every birth and death of a storage, and partial sums, to a simulated allocator."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = CachingAllocator()
        self._blocks: dict[int, Block] = {}

    def _called(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        size = reduction_bytes(func, args, this_processor())
        if size:
            self.allocator.release(self.allocator.allocate(size))

    def _resize(self, birth: Any, size: int) -> None:
        if size != birth.bytes:
            self._drop(birth.number)
            if size:
                self._blocks[birth.number] = self.allocator.allocate(size)
        super()._resize(birth, size)

    def _record_death(self, key: int) -> None:
        self._drop(self._births[key].number)
        super()._record_death(key)

    def _drop(self, number: int) -> None:
        block = self._blocks.pop(number, None)
        if block is not None:
            self.allocator.release(block)
