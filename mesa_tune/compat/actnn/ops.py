"""ActNN's functions as its tests call them: `conv2d.apply(input, weight, …, scheme)`.

Each runs PyTorch's function, and saves its input by `config` and the scheme, as ActNN's layers do. What is
hard is that ActNN's callers pass everything by position, the scheme last, and unpack what
`quantize_activation` returns.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mesa_tune.codecs import CODECS, Spec
from mesa_tune.compat.actnn import conf
from mesa_tune.compat.actnn.cpp_extension import backward_func as ext_backward_func
from mesa_tune.compat.actnn.cpp_extension import minimax as ext_minimax
from mesa_tune.compat.actnn.cpp_extension import quantization as ext_quantization
from mesa_tune.compat.actnn.layers import Scheme, memories_of, observed, settings_of
from mesa_tune.compat.missing import unsupported
from mesa_tune.functional import SettingsMode
from mesa_tune.ops.codecs import RAW

__all__ = [
    "adaptive_avg_pool2d",
    "batch_norm",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "dequantize_activation",
    "ext_backward_func",
    "ext_minimax",
    "ext_quantization",
    "linear",
    "quantize_activation",
]


class _Applied:
    """A function with an `apply`, as `autograd.Function` has."""

    def __init__(self, name: str, apply: Callable[..., Tensor]) -> None:
        self.__name__ = name
        self.apply = apply


def _saving(name: str, function: Callable[..., Tensor], channels: int, count: int) -> _Applied:
    """Return `function`, called with `input`, `count` further arguments and then a scheme; saves `input`."""

    def apply(input: Tensor, *args: Any) -> Tensor:
        arguments, scheme = args[:count], args[count] if len(args) > count else None
        settings = settings_of(conf.config, 0, scheme)
        weights = [argument for argument in arguments if isinstance(argument, Tensor)]
        with SettingsMode(settings, name, memories_of(scheme), weights):
            output = function(input, *arguments)
        return observed(scheme, input, channels, output)

    return _Applied(name, apply)


conv1d = _saving("conv1d", F.conv1d, 1, 6)
conv2d = _saving("conv2d", F.conv2d, 1, 6)
conv3d = _saving("conv3d", F.conv3d, 1, 6)
conv_transpose1d = _saving("conv_transpose1d", F.conv_transpose1d, 1, 7)
conv_transpose2d = _saving("conv_transpose2d", F.conv_transpose2d, 1, 7)
conv_transpose3d = _saving("conv_transpose3d", F.conv_transpose3d, 1, 7)
linear = _saving("linear", F.linear, -1, 2)
batch_norm = _saving("batch_norm", F.batch_norm, 1, 7)
adaptive_avg_pool2d = _Applied("adaptive_avg_pool2d", F.adaptive_avg_pool2d)


class Activation(tuple[Any, ...]):
    """What `quantize_activation` returns, as in ActNN: packed levels, bits, and the groups' steps and minima.

    `bits` is one number, or a tensor with one number per sample. If nothing is compressed, the first element
    is the tensor itself and the others are None. `dtype` is the tensor's dtype.
    """

    dtype: torch.dtype


def quantize_activation(input: Tensor, scheme: Scheme | None = None) -> Activation:
    """Return `input` in the form in which a layer with `scheme` saves it."""
    spec = _spec(scheme)
    if spec is None:
        activation = Activation((input, None, None, None))
    else:
        key = torch.ops.mesa_tune.fresh_seed.default(input)
        memory = (memories_of(scheme) or {}).get(0)
        data, ranges, *bits = CODECS[spec.codec].encode(input.detach(), spec, key, memory)
        sample_bits = bits[0] if bits else spec.bits
        activation = Activation((data, sample_bits, ranges[:, 1], ranges[:, 0]))
    activation.dtype = input.dtype
    return activation


def dequantize_activation(quantized: Activation, q_input_shape: Sequence[int]) -> Tensor:
    """Decode what `quantize_activation` returned for a tensor of shape `q_input_shape`."""
    data, bits, steps, minima = quantized
    if steps is None:
        stored: Tensor = data
        return stored
    size = conf.config.group_size if conf.config.pergroup else prod(q_input_shape)
    ranges = torch.stack([minima, steps], 1)
    if isinstance(bits, int):
        sizes = (bits, 2**bits, size, 0)
        decoded: Tensor = torch.ops.mesa_tune.dequantize.default(
            data, ranges, q_input_shape, quantized.dtype, *sizes
        )
    else:
        decoded = RAW.dequantize_samples(data, ranges, bits, q_input_shape, quantized.dtype, size, 0)
    return decoded


def _spec(scheme: Scheme | None) -> Spec | None:
    settings = settings_of(conf.config, 0, scheme)
    return None if settings.store == "offload" else Spec.of(settings, 0)


__getattr__ = unsupported(
    __name__,
    {
        "sync_batch_norm": "its statistics need a process group; use actnn.QSyncBatchNorm",
        "ext_calc_precision": "QScheme.allocate_perlayer allocates the bits",
        **dict.fromkeys(
            (
                "quantize_and_pack",
                "dequantize_and_unpack",
                "no_scheme_compute_quantization_bits",
            ),
            "a step of ActNN's kernels; use quantize_activation and dequantize_activation",
        ),
    },
)
