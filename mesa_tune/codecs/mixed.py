"""Bits by sample and bits by layer: ActNN (arXiv 2104.14129), section 4; `allocation: sample`.

Stochastic rounding of a group of n elements with range R to b bits has a variance of about
n · R² / (6 · (2ᵇ - 1)²). Within a tensor every sample (dimension 0) gets 1 to 8 bits so that the sum of its
groups' variances is least at the same total: `level` says the average. A sample of one bit cannot tell NaN
and Inf from the rest of their group, which becomes NaN with them. Between layers `allocate` does the
same, given what each layer's variance does to the gradient.
"""

import heapq
from collections.abc import Sequence

import torch
from torch import Tensor

from mesa_tune.codecs.spec import Memory, Spec
from mesa_tune.ops import codecs as codec_ops
from mesa_tune.ops.reference import codecs as reference_codecs

MOST_BITS = reference_codecs.MOST_BITS


def encode(x: Tensor, spec: Spec, key: Tensor, memory: Memory | None = None) -> list[Tensor]:
    """Packed levels, the groups' ranges (float32, `[groups, 2]`), and the bits of every sample (uint8).

    `memory["sensitivity"]`, if there with one number a sample, weights the samples' variances.
    """
    sensitivity = None if memory is None else memory.get("sensitivity")
    if sensitivity is not None and sensitivity.numel() != reference_codecs.sample_shape(x.shape)[0]:
        sensitivity = None
    return list(
        codec_ops.RAW.quantize_samples(
            x, spec.bits, spec.group_size, spec.quant_groups, spec.stochastic, key, sensitivity
        )
    )


def decode(parts: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype, spec: Spec) -> Tensor:
    """The tensor whose packed levels, ranges and bits `parts` hold."""
    result: Tensor = codec_ops.RAW.dequantize_samples(
        *parts, shape, dtype, spec.group_size, spec.quant_groups
    )
    return result


def packed_bytes(shape: Sequence[int], spec: Spec, element_size: int = 4) -> int:
    """Bytes of packed levels, ranges and the samples' bits."""
    ranges = 8 * reference_codecs.sample_rows(shape, spec.group_size, spec.quant_groups)
    return codec_ops.sample_bytes(shape, spec.bits) + ranges + reference_codecs.sample_shape(shape)[0]


def allocate(sensitivities: Sequence[float], sizes: Sequence[int], average: float) -> list[int]:
    """Bits (1 to 8) for each layer, least in Σ sensitivity / (2ᵇ - 1)² at `average` bits an element.

    `sizes`: elements of each layer. One bit after the other goes where it gains most an element, as long as
    it fits. Raises ValueError unless `1 <= average <= 8`.
    """
    if not 1 <= average <= MOST_BITS:
        raise ValueError(f"`1 <= average <= {MOST_BITS}` must hold, but got average={average}")
    bits = [1] * len(sizes)
    left = average * sum(sizes) - sum(sizes)
    pairs = list(zip(sensitivities, sizes, strict=True))
    queue = [(-_gain(*pair, 1), layer) for layer, pair in enumerate(pairs)]
    heapq.heapify(queue)
    while queue:
        _, layer = heapq.heappop(queue)
        if sizes[layer] > left or bits[layer] == MOST_BITS:
            continue
        bits[layer] += 1
        left -= sizes[layer]
        heapq.heappush(queue, (-_gain(*pairs[layer], bits[layer]), layer))
    return bits


def _gain(sensitivity: float, size: int, bits: int) -> float:
    """What one bit more than `bits` gains, an element."""
    here, next_one = float(2**bits - 1), float(2 ** (bits + 1) - 1)
    return sensitivity / max(size, 1) * (1 / here**2 - 1 / next_one**2)
