"""ActNN's kernels by name: functions that save masks, and packing with one number of bits for all samples."""

import torch
import torch.nn.functional as F
from torch import Tensor

from mesa_tune.compat.missing import unsupported
from mesa_tune.functional import SettingsMode
from mesa_tune.ops import reference
from mesa_tune.ops.codecs import RAW
from mesa_tune.policy.settings import LayerSettings

_BITS = LayerSettings()


def act_quantized_relu(input: Tensor) -> Tensor:
    """`F.relu`; saves one bit per element."""
    with SettingsMode(_BITS, "act_quantized_relu"):
        return F.relu(input)


def act_quantized_dropout(input: Tensor, p: float = 0.5, train: bool = True) -> Tensor:
    """`F.dropout`; saves one bit per element."""
    with SettingsMode(_BITS, "act_quantized_dropout"):
        return F.dropout(input, p, train)


def act_quantized_max_pool2d(
    input: Tensor,
    kernel_size: int | tuple[int, int],
    stride: int | tuple[int, int] | None = None,
    padding: int | tuple[int, int] = 0,
    dilation: int | tuple[int, int] = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor:
    """`F.max_pool2d`; saves the position of each maximum in its window.

    Raises:
        ValueError: `return_indices` is true.
    """
    if return_indices:
        raise ValueError("`return_indices` must be False: call F.max_pool2d for indices")
    with SettingsMode(_BITS, "act_quantized_max_pool2d"):
        return F.max_pool2d(input, kernel_size, stride, padding, dilation, ceil_mode)


def pack_single_precision(
    data: Tensor, min: Tensor, max: Tensor, bits: int, stochastic: bool
) -> tuple[Tensor, Tensor]:
    """Quantize `data` (samples, groups, elements) between `min` and `max` (samples, groups, 1).

    Returns uint8 bit planes, and the scale in levels per unit, as in ActNN.
    """
    if not 1 <= bits <= 8:
        raise ValueError(f"`1 <= bits <= 8` must hold, but got bits={bits}")
    levels = 2**bits
    ranges = reference.ranges_of(min.flatten().float(), max.flatten().float(), levels)
    seed = torch.ops.mesa_tune.fresh_seed.default(data)
    packed = RAW.quantize_within(data, ranges, bits, levels, data.shape[-1], 0, stochastic, seed)
    return packed, (1 / ranges[:, 1]).view_as(min)


def unpack_single_precision(
    data: Tensor, bits: int, scale: Tensor, min: Tensor, samples: int, groups: int, group_size: int
) -> Tensor:
    """Decode `pack_single_precision`: float32 of shape (samples, groups, group_size)."""
    ranges = torch.stack([min.flatten().float(), 1 / scale.flatten().float()], 1)
    ranges = torch.where(scale.view(-1, 1).isnan(), torch.nan, ranges)  # no element of the group is finite
    shape = (samples, groups, group_size)
    decoded: Tensor = torch.ops.mesa_tune.dequantize.default(
        data, ranges, shape, torch.float32, bits, 2**bits, group_size, 0
    )
    return decoded


__getattr__ = unsupported(
    __name__,
    dict.fromkeys(
        ("pack_mixed_precision", "unpack_mixed_precision"),
        "the codec chooses the samples' bits itself; use actnn.ops.quantize_activation",
    ),
)
