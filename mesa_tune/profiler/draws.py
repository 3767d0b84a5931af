"""The batches that a workload draws: whether they can be made again, and which of them is the longest.

What is hard: batches padded to their longest sample differ in length from draw to draw, and the memory that a
training needs is that of the longest. So the longest of the first draws stands for all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from mesa_tune.notice import warn_once
from mesa_tune.profiler.memory.meter import tensors_in
from mesa_tune.workload.user_code import located
from mesa_tune.workload.workload import Workload

DRAWS = 8
"""How many draws are made to find the longest."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class LongestBatch:
    """The batch with the most elements among the first `DRAWS`: its draw, itself, and notes on all of them.

    `differ`: the draws differ in length.
    """

    draw: int
    batch: Any
    differ: bool
    notes: tuple[str, ...]

    def notes_on(self, smaller: Any, size: int, smaller_size: int) -> tuple[str, ...]:
        """Return a note if `smaller`, the same draw with fewer samples, has other lengths than `batch`."""
        scaled = [tuple(smaller_size if n == size else n for n in shape) for shape in _shapes(self.batch)]
        if not self.differ or scaled == _shapes(smaller):
            return ()
        what = f"draw {self.draw} of {smaller_size} samples has other lengths"
        return (f"{what}: bytes at other batch sizes are estimates",)


def longest_batch(workload: Workload) -> LongestBatch:
    """Make the first `DRAWS` batches of `workload`, and return the longest; the first one of equals.

    Make the first one twice, and warn if the two are not equal bit for bit.
    """
    draw, batch = 0, workload.make_batch()
    notes = _irreproducible(workload, batch)
    shapes = [_shapes(batch)]
    for number in range(1, DRAWS):
        other = workload.make_batch(draw=number)
        shapes.append(_shapes(other))
        if _elements(shapes[number]) > _elements(shapes[draw]):
            draw, batch = number, other
    differ = any(drawn != shapes[0] for drawn in shapes)
    return LongestBatch(draw, batch, differ, (*notes, *(_lengths(shapes, draw) if differ else ())))


def _irreproducible(workload: Workload, batch: Any) -> tuple[str, ...]:
    first, second = tensors_in(batch), tensors_in(workload.make_batch())
    if len(first) == len(second) and all(map(_same_bits, first, second)):
        return ()
    text = (
        f"{located(workload.batch, workload.path)}: batch() makes another batch under the same seed, so no "
        "measurement can be repeated: use the global generators of torch, NumPy or random, or seed its own"
    )
    warn_once(text)
    return (text,)


def _lengths(shapes: list[list[Shape]], longest: int) -> tuple[str, ...]:
    counts = [_elements(drawn) for drawn in shapes]
    ends = shapes[counts.index(min(counts))], shapes[longest]
    low, high = (max(drawn, key=lambda shape: _elements([shape])) for drawn in ends)
    what = f"batches differ in length: the largest tensor of the first {len(shapes)} draws is"
    return (f"{what} {_text(low)} to {_text(high)}; draw {longest}, the longest, was traced",)


def _shapes(batch: Any) -> list[Shape]:
    return [tuple(tensor.shape) for tensor in tensors_in(batch)]


def _elements(shapes: list[Shape]) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes)


def _text(shape: Shape) -> str:
    return " × ".join(map(str, shape))


def _same_bits(first: Tensor, second: Tensor) -> bool:
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    if isinstance(first, FakeTensor):  # it has no values
        return True
    return torch.equal(_bytes(first), _bytes(second))


def _bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of all elements, by which NaN equals itself."""
    dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
    return dense.detach().contiguous().view(-1).view(torch.uint8)
