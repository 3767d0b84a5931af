"""Store only the largest magnitudes: DropIT (arXiv 2202.13808), min-k over the whole tensor.

`drop: γ` in policy.txt. The fraction γ of the elements with the smallest magnitudes is not stored and decodes
to zero. The others, the survivors, are marked in a bitmap of one bit per element, as in Back Razor (NeurIPS
2022); DropIT stores a 32-bit index per survivor. Above γ = 0.75 the Elias-Fano code of the bitmap is smaller
and is stored instead: about 2 + log2(1 / (1 - γ)) bits per survivor. Their values follow in order: exact
(`store: exact`), or quantized in groups of their own. Dropping is biased, in DropIT as well: the input that a
linear layer or a convolution saves enters only the gradient of its weight.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mesa_tune import ops
from mesa_tune.codecs import quantize
from mesa_tune.codecs.spec import Memory, Spec
from mesa_tune.ops import reference
from mesa_tune.ops.codecs import RAW
from mesa_tune.ops.reference.positions import position_bytes


def survivors(numel: int, drop: float) -> int:
    """Return how many of `numel` elements are stored: the integer part of numel · (1 - γ), as in DropIT."""
    return int(numel * (1 - drop))


def encode(x: Tensor, spec: Spec, key: Tensor, memory: Memory | None = None) -> list[Tensor]:
    """Return the marks (uint8), then the survivors in the dtype of x, or their packed codes and ranges."""
    marks, values = RAW.sparsify(x, survivors(x.numel(), spec.drop))
    marks = marks_of(marks, x.numel(), spec.drop)  # the bitmap is not needed any more
    if spec.exact:
        return [marks, values]
    return [marks, *quantize.encode(values, _grouped(spec, values.numel()), key)]


def decode(parts: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype, spec: Spec) -> Tensor:
    """Return the tensor with its survivors, zero elsewhere."""
    marks, *stored = parts
    values, numel = stored[0], _numel(shape)
    if not spec.exact:
        count = survivors(numel, spec.drop)
        values = quantize.decode(stored, (count,), dtype, _grouped(spec, count))
    low = _low_bits(spec.drop)
    bitmap = RAW.unpack_positions(marks, numel, survivors(numel, spec.drop), low) if low else marks
    result: Tensor = RAW.densify(bitmap, values, shape)
    return result


def packed_bytes(shape: Sequence[int], spec: Spec, element_size: int = 4) -> int:
    """Return the bytes of marks and survivors; `element_size`: bytes per element of the tensor."""
    numel = _numel(shape)
    count = survivors(numel, spec.drop)
    stored = count * element_size
    if not spec.exact:
        stored = quantize.packed_bytes((count,), _grouped(spec, count), element_size)
    low = _low_bits(spec.drop)
    return (position_bytes(numel, count, low) if low else reference.plane_bytes(numel)) + stored


def marks_of(bitmap: Tensor, numel: int, drop: float) -> Tensor:
    """Return how the survivors that the bitmap marks are stored: as it is, or as their positions."""
    low = _low_bits(drop)
    marks: Tensor = RAW.pack_positions(bitmap, numel, survivors(numel, drop), low) if low else bitmap
    return marks


def has_positions(drop: float) -> bool:
    """Return whether the positions of survivors are stored: a bitmap would be larger."""
    return drop > _BITMAP


def _low_bits(drop: float) -> int:
    """Return the low bits of each survivor's position; 0 where a bitmap is stored."""
    return math.floor(-math.log2(1 - drop)) if has_positions(drop) else 0


_BITMAP = 0.75
"""Up to this fraction a bitmap is stored: (1 - γ) (1 + 2) + 1 / 4 bits per element are 1 there."""


def refuses(tensor: Tensor, spec: Spec) -> str | None:
    """Return why `tensor` cannot be stored by this codec; exact survivors may have any real dtype."""
    if not spec.exact and tensor.dtype not in ops.DTYPES:
        return f"its dtype is {tensor.dtype}"
    return None


def _grouped(spec: Spec, count: int) -> Spec:
    """Return the spec of the survivors. They have no channels: `quant_groups` means groups of equal size."""
    if not spec.quant_groups:
        return spec
    return spec._replace(group_size=max(1, -(-count // spec.quant_groups)), quant_groups=0)


def _numel(shape: Sequence[int]) -> int:
    numel = 1
    for extent in shape:
        numel *= extent
    return numel
