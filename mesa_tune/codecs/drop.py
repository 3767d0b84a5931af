"""Store only the largest magnitudes: DropIT (arXiv 2202.13808), min-k over the whole tensor.

`drop: γ` in policy.txt. The fraction γ of the elements with the smallest magnitudes is not stored and decodes
to zero. The others, the survivors, are marked in a bitmap of one bit per element (DropIT stores a 32-bit
index per survivor). Their values follow in order: exact (`store: exact`), or quantized in groups of their
own. Dropping is biased, in DropIT as well: the input that a linear layer or a convolution saves enters only
the gradient of its weight.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mesa_tune import ops
from mesa_tune.codecs import quantize
from mesa_tune.codecs.spec import Memory, Spec
from mesa_tune.ops import reference
from mesa_tune.ops.codecs import RAW


def survivors(numel: int, drop: float) -> int:
    """Return how many of `numel` elements are stored: the integer part of numel · (1 - γ), as in DropIT."""
    return int(numel * (1 - drop))


def encode(x: Tensor, spec: Spec, key: Tensor, memory: Memory | None = None) -> list[Tensor]:
    """Return the bitmap (uint8), then the survivors in the dtype of x, or their packed codes and ranges."""
    bitmap, values = RAW.sparsify(x, survivors(x.numel(), spec.drop))
    if spec.exact:
        return [bitmap, values]
    return [bitmap, *quantize.encode(values, _grouped(spec, values.numel()), key)]


def decode(parts: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype, spec: Spec) -> Tensor:
    """Return the tensor with its survivors, zero elsewhere."""
    bitmap, *stored = parts
    values = stored[0]
    if not spec.exact:
        count = survivors(_numel(shape), spec.drop)
        values = quantize.decode(stored, (count,), dtype, _grouped(spec, count))
    result: Tensor = RAW.densify(bitmap, values, shape)
    return result


def packed_bytes(shape: Sequence[int], spec: Spec, element_size: int = 4) -> int:
    """Return the bytes of bitmap and survivors; `element_size`: bytes per element of the tensor."""
    numel = _numel(shape)
    count = survivors(numel, spec.drop)
    stored = count * element_size
    if not spec.exact:
        stored = quantize.packed_bytes((count,), _grouped(spec, count), element_size)
    return reference.plane_bytes(numel) + stored


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
