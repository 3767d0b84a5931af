"""ActNN's names of PyTorch's convolution backward functions, with cuDNN's arguments; they run on any device.

`benchmark`, `deterministic` and `allow_tf32` are ignored: PyTorch chooses them by `torch.backends`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mesa_tune.compat.missing import unsupported

GradientPair = tuple[Tensor | None, Tensor | None]


def cudnn_convolution_backward(
    input: Tensor,
    grad_output: Tensor,
    weight: Tensor,
    padding: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    benchmark: bool,
    deterministic: bool,
    allow_tf32: bool,
    output_mask: Sequence[bool],
) -> GradientPair:
    """Return gradients of a convolution's input and weight, those that `output_mask` asks for."""
    return _backward(
        input, grad_output, weight, padding, stride, dilation, False, [0] * len(stride), groups, output_mask
    )


def cudnn_convolution_transpose_backward(
    input: Tensor,
    grad_output: Tensor,
    weight: Tensor,
    padding: Sequence[int],
    output_padding: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    benchmark: bool,
    deterministic: bool,
    allow_tf32: bool,
    output_mask: Sequence[bool],
) -> GradientPair:
    """Return gradients of a transposed convolution's input and weight, those that `output_mask` asks for."""
    return _backward(
        input, grad_output, weight, padding, stride, dilation, True, output_padding, groups, output_mask
    )


def _backward(
    input: Tensor,
    grad_output: Tensor,
    weight: Tensor,
    padding: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> GradientPair:
    gradients = torch.ops.aten.convolution_backward(
        grad_output,
        input,
        weight,
        None,
        list(stride),
        list(padding),
        list(dilation),
        transposed,
        list(output_padding),
        groups,
        [*output_mask, False],
    )
    return gradients[0], gradients[1]


__getattr__ = unsupported(
    __name__,
    dict.fromkeys(
        (
            "cudnn_batch_norm",
            "cudnn_batch_norm_backward",
            "native_batch_norm",
            "native_batch_norm_backward",
        ),
        "cuDNN's own reserve; call torch.ops.aten.native_batch_norm and its backward",
    ),
)
