"""GACT's functions of single tensors, over our quantizer."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mesa_tune import ops
from mesa_tune.compat.gact import conf
from mesa_tune.compat.missing import unsupported

EXACT_BITS = 32


class Quantized(list[Any]):
    """What `op_quantize` returns, GACT's four: packed levels, bits, scales and minima of the groups.

    Scales are the distance of two levels, float32 of shape (groups, 1, 1), as the minima are. With 32 bits
    the first is the tensor itself in groups, and the scales are the groups' ranges. `dtype` is the tensor's.
    """

    dtype: torch.dtype


def op_quantize(input: Tensor, q_bit: int, seed: int) -> Quantized:
    """`input` in `q_bit` bits per element (1 to 8, or 32: as it is), in groups of `config.group_size`.

    Equal seeds give equal noise. Raises ValueError for other bits.
    """
    size = conf.config.group_size
    if q_bit == EXACT_BITS:
        rows = _rows(input.detach(), size)
        low = rows.amin(1, keepdim=True)
        made = Quantized([rows, q_bit, rows.amax(1, keepdim=True) - low, low])
    else:
        data, ranges = ops.quantize(input, q_bit, size, seed=seed)[:2]
        made = Quantized([data, q_bit, ranges[:, 1].view(-1, 1, 1), ranges[:, 0].view(-1, 1, 1)])
    made.dtype = input.dtype
    return made


def op_dequantize(input: Quantized, input_shape: Sequence[int]) -> Tensor:
    """The tensor of shape `input_shape` that `op_quantize` has stored."""
    data, bits, scales, minima = input
    shape = tuple(input_shape)
    if bits == EXACT_BITS:
        elements: Tensor = data.flatten()[: prod(shape)].view(shape)
        return elements
    ranges = torch.stack([minima.flatten(), scales.flatten()], 1)
    size = conf.config.group_size
    return ops.dequantize(ops.Quantized(data, ranges, shape, input.dtype, bits, 2**bits, size, None))


def _rows(flat: Tensor, size: int) -> Tensor:
    flat = flat.reshape(-1)
    return F.pad(flat, (0, -flat.numel() % size)).view(-1, size)


def op_quantize_mask(input: Tensor) -> list[Any]:
    """A mask of zeros and ones (any dtype) in one bit per element, and its shape."""
    return [ops.pack_bits(input != 0), input.shape]


def op_dequantize_mask(input: Sequence[Any]) -> Tensor:
    """The mask that `op_quantize_mask` has stored, uint8."""
    return ops.unpack_bits(input[0], input[1]).to(torch.uint8)


def self_atten(
    dropout_p: float,
    query_layer: Tensor,
    key_layer: Tensor,
    value_layer: Tensor,
    q_chunk_size: int,
    k_chunk_size: int,
    use_checkpoint: bool = True,
) -> Tensor:
    """Attention without its matrix of weights in memory: PyTorch's `scaled_dot_product_attention`.

    It chooses its own sizes of chunks, and drops weights (GACT drops parts of its sums).
    """
    return F.scaled_dot_product_attention(query_layer, key_layer, value_layer, dropout_p=dropout_p)


__getattr__ = unsupported(
    __name__,
    dict.fromkeys(
        ("no_scheme_quantize_pack", "dequantize_and_unpack", "ext_quantization", "ext_minimax"),
        "a step of GACT's kernels; use op_quantize and op_dequantize",
    ),
)
