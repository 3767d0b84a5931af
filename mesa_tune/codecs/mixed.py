"""Mixed precision, by sample and by layer: ActNN (arXiv 2104.14129), section 4; `allocation: sample`.

Stochastic rounding of a group of n elements with range R to b bits has a variance of about n · R² / (6 · (2ᵇ
- 1)²). Within a tensor every sample (dimension 0) gets 1 to 8 bits. They minimize the sum of all groups'
variances; `level` fixes the average. In a sample of 1 bit, a group that contains NaN or Inf decodes to NaN as
a whole, because no code is left for NaN. `allocate` does the same between layers, from the effect of each
layer's variance on the gradient.
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
    """Return the packed codes, the groups' ranges (float32, `[groups, 2]`), and every sample's bits (uint8).

    `memory["sensitivity"]`, if it has one number per sample, weights the samples' variances.
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
    """Return the tensor from `parts`: packed codes, ranges and bits."""
    result: Tensor = codec_ops.RAW.dequantize_samples(
        *parts, shape, dtype, spec.group_size, spec.quant_groups
    )
    return result


def packed_bytes(shape: Sequence[int], spec: Spec, element_size: int = 4) -> int:
    """Return the bytes of packed codes, ranges and the samples' bits."""
    ranges = 8 * reference_codecs.sample_rows(shape, spec.group_size, spec.quant_groups)
    return codec_ops.sample_bytes(shape, spec.bits) + ranges + reference_codecs.sample_shape(shape)[0]


def allocate(sensitivities: Sequence[float], sizes: Sequence[int], average: float) -> list[int]:
    """Return bits (1 to 8) per layer that minimize Σ sensitivity / (2ᵇ - 1)² at `average` bits per element.

    `sizes`: elements of each layer. Greedy: the next bit goes to the layer where it gains most per element,
    as long as it fits. Raises ValueError unless `1 <= average <= 8`.
    """
    if not 1 <= average <= MOST_BITS:
        raise ValueError(f"`1 <= average <= {MOST_BITS}` must hold, but got average={average}")
    bits = [1] * len(sizes)
    remaining = average * sum(sizes) - sum(sizes)
    pairs = list(zip(sensitivities, sizes, strict=True))
    queue = [(-_gain(*pair, 1), layer) for layer, pair in enumerate(pairs)]
    heapq.heapify(queue)
    while queue:
        _, layer = heapq.heappop(queue)
        if sizes[layer] > remaining or bits[layer] == MOST_BITS:
            continue
        bits[layer] += 1
        remaining -= sizes[layer]
        heapq.heappush(queue, (-_gain(*pairs[layer], bits[layer]), layer))
    return bits


def _gain(sensitivity: float, size: int, bits: int) -> float:
    """Return the decrease of the error per element from one bit more than `bits`."""
    top, next_top = float(2**bits - 1), float(2 ** (bits + 1) - 1)
    return sensitivity / max(size, 1) * (1 / top**2 - 1 / next_top**2)
