"""What PyTorch's sums over rows take on CUDA besides their tensors: two numbers of float32 per element.

What is hard: a sum with few results and much to add is divided among thread blocks, each of which writes a
partial sum for each of its threads. So the gradient of a bias takes more memory than the gradient that it
sums, and often this is the moment of the peak. The rules are those of `setReduceConfig`
(aten/src/ATen/native/cuda/Reduce.cuh); benchmarks/results/gpu.jsonl has the bytes that an H100 takes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

_ATEN = torch.ops.aten
_SUMS = {_ATEN.sum.dim_IntList, _ATEN.mean.dim}
_THREADS, _WARP, _VECTOR = 512, 32, 4
_FEWEST_VALUES, _MOST_VALUES = 16, 256
"""Per thread: fewer are not divided among thread blocks, more are."""


class Processor(NamedTuple):
    """Multiprocessors of a GPU, and how many threads each of them runs."""

    multiprocessors: int = 132
    threads: int = 2048


H100 = Processor()


@cache
def this_processor() -> Processor:
    """Return the first GPU of this machine; an H100 where there is none."""
    if not torch.cuda.is_available():
        return H100
    facts = torch.cuda.get_device_properties(0)
    return Processor(facts.multi_processor_count, facts.max_threads_per_multi_processor)


def reduction_bytes(func: Any, args: tuple[Any, ...], processor: Processor) -> int:
    """Return the bytes that a call takes on CUDA besides its tensors, if it is a sum or a mean; else 0."""
    if func not in _SUMS or args[0].layout is not torch.strided or not args[0].numel():
        return 0
    x, dims = args[0], [dim % args[0].dim() for dim in args[1] or range(args[0].dim())]
    summed = math.prod(x.shape[dim] for dim in dims)
    return _partial_sums(x, dims, x.numel() // summed, summed, processor)


def _partial_sums(x: Tensor, dims: Sequence[int], outputs: int, summed: int, processor: Processor) -> int:
    """Return the bytes of the partial sums; 0 if one thread block makes each result."""
    kept = [dim for dim in range(x.dim()) if dim not in dims]
    inner_kept, inner_summed = (
        min((x.stride(dim) for dim in some if x.shape[dim] > 1), default=math.inf) for some in (kept, dims)
    )
    along_summed = inner_summed < inner_kept
    vector = _vector(x, kept) if inner_kept == 1 else 1
    across, down = (summed, outputs) if along_summed else (outputs // vector, summed)
    width, height = _block(across, down, _THREADS // vector)
    width_of_results = 1 if along_summed else width
    values = math.ceil(summed / width) if along_summed else summed
    if values < min(16 * height, _MOST_VALUES):
        return 0  # other results, not further values, are for the rest of the block
    values = math.ceil(values / height)
    blocks = math.ceil(outputs // vector / width_of_results)
    most = processor.multiprocessors * (processor.threads // (width * height))
    if values < _MOST_VALUES or blocks > most:
        return 0
    parts = max(
        min(math.ceil(most / blocks), math.ceil(values / _FEWEST_VALUES)), math.ceil(values / _MOST_VALUES)
    )
    per_result = 1 if along_summed else width * vector
    return 4 * outputs * parts * per_result if parts > 1 else 0


def _vector(x: Tensor, kept: Sequence[int]) -> int:
    """Return how many neighbouring results a thread makes: as many as divide their dimension."""
    inner = min((dim for dim in kept if x.shape[dim] > 1), key=x.stride)
    return math.gcd(_VECTOR, x.shape[inner])


def _block(across: int, down: int, threads: int) -> tuple[int, int]:
    """Return width and height of a thread block."""
    across, down = (min(threads, 1 << max(1, size).bit_length() - 1) for size in (across, down))
    height = min(down, threads // min(across, _WARP))
    return min(across, threads // height), height
