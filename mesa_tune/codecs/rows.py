"""Store a part of the rows, chosen at random: fewer than 1 bit per element; `rows` in policy.txt.

The gradient of a weight is a sum over rows (tokens; for a convolution, positions): dW = Σ gᵢᵀ xᵢ. So a random
part of the terms, each divided by its probability, has the whole sum as expectation: WTA-CRS (arXiv
2305.15265), randomized automatic differentiation (2007.10412). Probabilities follow the norms of the rows
(`ops/reference/sampling.py`). Of independent choices, the gradient's variance would be Σ (1/pᵢ - 1) ‖gᵢ‖²
‖xᵢ‖². The stored rows, already divided, are quantized in groups, or stored exactly (`store: exact`).
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mesa_tune.codecs import drop, quantize
from mesa_tune.codecs.spec import Memory, Spec
from mesa_tune.ops.codecs import RAW, as_rows
from mesa_tune.ops.flags import counts_below
from mesa_tune.ops.reference.sampling import UNIT, row_probabilities


def encode(x: Tensor, spec: Spec, key: Tensor, memory: Memory | None = None) -> list[Tensor]:
    """Return the indices of the stored rows (int32), and the rows in the dtype of x or their packed parts."""
    count, _ = _stored(x.shape, spec)
    index, rows = RAW.sample_rows(x, _axis(spec), count, key)
    return [index, rows] if spec.exact else [index, *quantize.encode(rows, spec, key)]


def decode(parts: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype, spec: Spec) -> Tensor:
    """Return the tensor with its stored rows, zero elsewhere."""
    index, values = stored_rows(parts, shape, dtype, spec)
    result = values.new_zeros(tuple(shape))
    if index.numel():
        rows = as_rows(result, _axis(spec))
        rows[torch.unravel_index(index, rows.shape[:-1])] = values
    return result


def decode_samples(
    parts: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype, spec: Spec, size: int
) -> Iterator[Tensor]:
    """Yield what `decode` returns, `size` samples at a time; each piece overwrites the one before.

    Samples lie along dimension 0, and rows along another. The number of rows stored of each is read, which
    waits for a device.
    """
    index, values = stored_rows(parts, shape, dtype, spec)
    samples, rows = shape[0], math.prod(shape) // (shape[0] * values.shape[-1])
    ends = [min(first + size, samples) for first in range(0, samples, size)]
    buffer, first, begin = values.new_empty(min(size, samples), *shape[1:]), 0, 0
    for last, end in zip(
        ends, counts_below(index, [rows * last for last in ends], rows * samples), strict=True
    ):
        part = buffer[: last - first].zero_()
        positions = as_rows(part, _axis(spec))
        places = index[begin:end] - rows * first
        positions[torch.unravel_index(places, positions.shape[:-1])] = values[begin:end]
        first, begin = last, end
        yield part


def stored_rows(
    parts: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype, spec: Spec
) -> tuple[Tensor, Tensor]:
    """Return the indices of the stored rows (int64), and the rows, `[count, width]`."""
    index, *stored = parts
    values = stored[0] if spec.exact else quantize.decode(stored, _stored(shape, spec), dtype, spec)
    return index.to(torch.int64), values


def packed_bytes(shape: Sequence[int], spec: Spec, element_size: int = 4) -> int:
    """Return the bytes of indices and rows; `element_size`: bytes per element of the tensor."""
    count, width = _stored(shape, spec)
    stored = count * width * element_size
    if not spec.exact:
        stored = quantize.packed_bytes((count * width,), spec, element_size)
    return 4 * count + stored


def stored_count(shape: Sequence[int], spec: Spec) -> int:
    """Return how many rows of a tensor of this shape are stored."""
    return _stored(shape, spec)[0]


refuses = drop.refuses

_MILLION = 1_000_000


def _axis(spec: Spec) -> int:
    return spec.axis or -1


def _stored(shape: Sequence[int], spec: Spec) -> tuple[int, int]:
    """Return how many rows of a tensor of this shape are stored, at least one, and the elements of a row."""
    numel = math.prod(shape)
    width = numel if len(shape) < 2 else shape[_axis(spec)]
    if numel == 0:
        return 0, width
    # Of integers: compiled code takes no float of a symbolic size.
    share = max(1, round(spec.rows * _MILLION))
    return (numel // width * share + _MILLION - 1) // _MILLION, width


def expected_square(x: Tensor, decoded: Tensor, grad: Tensor, spec: Spec) -> float:
    """Return E ‖Σ gᵢᵀ (x̂ᵢ − xᵢ)‖² over samples of the rows xᵢ of `x`, as if they were independent.

    What is hard: few rows may make most of a gradient. A sample without them errs little, and the rare sample
    with one of them, divided by a small probability, errs a hundred times more. Of 12 batches of a
    Llama-style model, 11 had errors of 0.03 to 0.08, and one of 3.1. So the error of single samples is too
    low, almost always, and a search finds the layers of which it is.

    It is Σ ((1 + ε) / pᵢ − 1) ‖gᵢ‖² ‖xᵢ‖², where ε is the relative squared error of rounding, that of the
    rows of `decoded`. `x`: `(*, in)`, `grad`: `(*, out)`, with a row for each of `x`.
    """
    given, made, gradients = (tensor.detach().flatten(0, -2).float() for tensor in (x, decoded, grad))
    norms = torch.linalg.vector_norm(given, dim=-1)
    parts = row_probabilities(norms, stored_count(x.shape, spec)).double() / UNIT
    whole = (norms.square() * gradients.square().sum(-1)).double()
    kept = made.any(-1)
    exact = given[kept] / parts[kept, None].float()
    size = float(exact.square().sum())
    rounding = float((made[kept] - exact).square().sum()) / size if size else 0.0
    return float((((1 + rounding) / parts - 1) * whole).sum())
