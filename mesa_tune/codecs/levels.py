"""Store an activation's derivative as one of a few fixed values: `store: levels` in policy.txt.

Few-bit Backward (arXiv 2202.00441, ICML 2023). The backward of y = f(x) needs f'(x) alone. A codebook has L
values and the L - 1 boundaries between them, the same for every tensor of a function, so no ranges are
stored: 1 to 4 bits per element, and 4 bytes per tensor, which say whether an element was NaN or Inf. Values
and boundaries minimize Σ w(x) (f'(x) - q(x))² by dynamic programming, as in the paper, with two differences.
w is the density of the standard normal distribution, not the same everywhere. And intervals are those of f',
which is what is saved, not of x, so that equal derivatives at different x have one level.

Rounding to the nearest level is deterministic, so the copy is biased. Its mean is right where x is standard
normal: each value is the mean of its interval.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mesa_tune.codecs import drop
from mesa_tune.codecs.spec import Codebook, Memory, Spec
from mesa_tune.ops import reference
from mesa_tune.ops.codecs import RAW
from mesa_tune.ops.maps import KINDS, Deferred

Floats = NDArray[np.float64]


def encode(x: Tensor, spec: Spec, key: Tensor, memory: Memory | None = None) -> list[Tensor]:
    """Return the bit planes of the codes (uint8), and 0 or NaN (float32, one element)."""
    assert spec.codebook is not None
    return [*RAW.pack_levels(x.detach().contiguous(), spec.codebook.boundaries, 0)]


def encode_deferred(deferred: Deferred, spec: Spec, key: Tensor) -> list[Tensor]:
    """Return `encode` of the derivative of an activation, computed while it is encoded."""
    if not deferred.is_dense:
        return encode(deferred.made(), spec, key)
    assert spec.codebook is not None
    return [*RAW.pack_levels(deferred.source, spec.codebook.boundaries, KINDS[deferred.kind])]


def decode(parts: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype, spec: Spec) -> Tensor:
    """Return the value of each element's level; all are NaN if an element was NaN or Inf."""
    assert spec.codebook is not None
    values: Tensor = RAW.unpack_levels(*parts, spec.codebook.values, shape, dtype)
    return values


def packed_bytes(shape: Sequence[int], spec: Spec, element_size: int = 4) -> int:
    """Return the bytes of the bit planes, and 4."""
    return spec.bits * reference.plane_bytes(torch.Size(shape).numel()) + 4


refuses = drop.refuses


def optimal_codebook(derivative: Floats, weight: Floats, levels: int) -> Codebook:
    """Return the codebook of the least Σ weight (derivative - value)²; `derivative` is ascending.

    The value of an interval is its weighted mean.
    """
    ends = _runs(derivative, weight, levels)
    parts = [slice(first, last) for first, last in pairwise(ends)]
    values = [float(np.average(derivative[part], weights=weight[part])) for part in parts]
    middles = [(derivative[end - 1] + derivative[end]) / 2 for end in ends[1:-1]]
    return Codebook(*[tuple(np.array(numbers, np.float32).tolist()) for numbers in (middles, values)])


def _runs(values: Floats, weight: Floats, count: int) -> list[int]:
    """Return the ends of the `count` runs with the least sum of weighted squared deviations."""
    zero = np.zeros(1)
    total, first, second = (np.concatenate([zero, np.cumsum(weight * values**k)]) for k in range(3))
    mass = np.maximum(total[None, :] - total[:, None], 1e-300)
    costs = second[None, :] - second[:, None] - (first[None, :] - first[:, None]) ** 2 / mass
    costs[np.tril_indices(len(total))] = np.inf  # no run is empty
    best, choices = costs[0], []
    for _ in range(count - 1):
        sums = best[:, None] + costs
        choices.append(sums.argmin(0))
        best = sums.min(0)
    ends = [len(values)]
    for choice in reversed(choices):
        ends.append(int(choice[ends[-1]]))
    return [0, *reversed(ends)]
