"""GACT's functions that pack one tensor, built on mesa-tune's quantizer, and its attention."""

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


class QuantizedList(list[Any]):
    """What `op_quantize` returns, as in GACT: packed levels, bits, and the groups' scales and minima.

    Scales (the distance between two levels) and minima are float32 of shape (groups, 1, 1). With 32 bits the
    first element is the tensor itself in groups, and the scales are the widths of the groups' ranges. `dtype`
    is the tensor's dtype.
    """

    dtype: torch.dtype


def op_quantize(input: Tensor, q_bit: int, seed: int) -> QuantizedList:
    """Quantize `input` to `q_bit` bits per element (1 to 8; 32: unchanged), in groups of `config.group_size`.

    Equal seeds give equal noise.

    Raises:
        ValueError: other numbers of bits.
    """
    size = conf.config.group_size
    if q_bit == EXACT_BITS:
        rows = _rows(input.detach(), size)
        low = rows.amin(1, keepdim=True)
        quantized = QuantizedList([rows, q_bit, rows.amax(1, keepdim=True) - low, low])
    else:
        data, ranges = ops.quantize(input, q_bit, size, seed=seed)[:2]
        scales, minima = (ranges[:, column].view(-1, 1, 1) for column in (1, 0))
        quantized = QuantizedList([data, q_bit, scales, minima])
    quantized.dtype = input.dtype
    return quantized


def op_dequantize(input: QuantizedList, input_shape: Sequence[int]) -> Tensor:
    """Decode what `op_quantize` returned for a tensor of shape `input_shape`."""
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
    """Pack a mask of zeros and ones (any dtype) into 1 bit per element; return it with its shape."""
    return [ops.pack_bits(input != 0), input.shape]


def op_dequantize_mask(input: Sequence[Any]) -> Tensor:
    """Unpack what `op_quantize_mask` returned, as uint8."""
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
    """Run `scaled_dot_product_attention`, which does not store the matrix of attention weights.

    PyTorch chooses the chunk sizes. Dropout applies to the weights; GACT's applies to parts of its sums.
    """
    return F.scaled_dot_product_attention(query_layer, key_layer, value_layer, dropout_p=dropout_p)


__getattr__ = unsupported(
    __name__,
    dict.fromkeys(
        ("no_scheme_quantize_pack", "dequantize_and_unpack", "ext_quantization", "ext_minimax"),
        "a step of GACT's kernels; use op_quantize and op_dequantize",
    ),
)
