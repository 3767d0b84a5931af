"""Store randomly chosen elements: DropIT's `vrandom`, the baseline for its choice by magnitude.

As many elements as `drop` would store are chosen, all equally likely. They are marked as `drop` marks
survivors, and their values are stored exactly; DropIT stores the zeros, too. The choice depends on the key
alone, so encoding twice gives the same result.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mesa_tune import ops
from mesa_tune.codecs import drop
from mesa_tune.codecs.spec import Memory, Spec
from mesa_tune.ops import reference


def encode(x: Tensor, spec: Spec, key: Tensor, memory: Memory | None = None) -> list[Tensor]:
    """Return the marks (uint8), then the chosen elements in the dtype of x, in order."""
    chosen = _chosen(x.numel(), drop.survivors(x.numel(), spec.drop), key.to(x.device))
    mask = torch.zeros(x.numel(), dtype=torch.bool, device=x.device).index_fill(0, chosen, True)
    return [drop.marks_of(ops.pack_bits(mask), x.numel(), spec.drop), x.reshape(-1)[chosen]]


def decode(parts: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype, spec: Spec) -> Tensor:
    """Return the tensor with the chosen elements, zero elsewhere."""
    return drop.decode(parts, shape, dtype, spec)


def packed_bytes(shape: Sequence[int], spec: Spec, element_size: int = 4) -> int:
    """Return the bytes of marks and elements."""
    return drop.packed_bytes(shape, spec, element_size)


refuses = drop.refuses


def _chosen(numel: int, count: int, key: Tensor) -> Tensor:
    """Return the indices of `count` random elements out of `numel`, in order."""
    low, high = key & reference.MASK, (key >> 32) & reference.MASK
    scores = reference.mix(reference.mix(torch.arange(numel, device=key.device) ^ low) ^ high)
    return scores.topk(count, sorted=False).indices.sort().values
