"""What kernels allocate on the CPU besides tensors, modelled: no tensor and no meter shows it.

What is hard: the libraries do not say. The rules are what resident memory showed around single calls (torch
2.13, oneDNN): a convolution copies its tensors into the layout that its kernel wants, or, where oneDNN does
not take the dtype (bfloat16 without AVX-512) or is off, writes each window as a column of a matrix; a
pointwise function copies each whole argument that is not of its dtype; and some functions copy an argument
that is not contiguous. All of that is free when the call ends. What oneDNN compiles, anew for every shape,
stays. And of the workspace that an LSTM saves, most is never written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, reduce
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from mesa_tune.engine.tensors import layout_of
from mesa_tune.measure.cuda.reductions import reduction_bytes, this_processor
from mesa_tune.ops import fused
from mesa_tune.ops.devices import on_cpu

_ATEN = torch.ops.aten
_COPYING = {
    *(
        getattr(_ATEN, name).default
        for name in (
            "_log_softmax",
            "_softmax",
            "native_layer_norm",
            "native_layer_norm_backward",
            "upsample_bilinear2d_backward",
            "upsample_nearest2d_backward",
        )
    ),
    fused.BATCH_NORM_BACKWARD.kernel,
    fused.DEQUANTIZE_MUL.kernel,
    fused.LINEAR_BACKWARD.kernel,
    fused.NORM_BACKWARD.kernel,
    fused.SOFTMAX_BACKWARD.kernel,
}
_UNCAST = {_ATEN.where.self: 0, _ATEN.masked_fill.Scalar: 1, _ATEN.masked_fill.Tensor: 1}
"""Pointwise functions with an argument, by its position, that is read in its own dtype."""
_PRODUCTS = {
    _ATEN.mm.default,
    _ATEN.bmm.default,
    _ATEN.addmm.default,
    _ATEN.baddbmm.default,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default,
}
_CONVOLUTIONS = {_ATEN.convolution.default, _ATEN.convolution_backward.default}
_LSTM, _LSTM_BACKWARD = _ATEN.mkldnn_rnn_layer.default, _ATEN.mkldnn_rnn_layer_backward.default
_COMPILED = {
    **{product: {torch.bfloat16: 650_000} for product in _PRODUCTS},
    **{convolution: {torch.bfloat16: 100_000, torch.float32: 60_000} for convolution in _CONVOLUTIONS},
}
"""About the bytes that oneDNN keeps for each shape; of bfloat16 where the processor has kernels for it."""


def workspace_bytes(func: Any, args: tuple[Any, ...], result: Any) -> int:
    """Return about the most bytes that a call takes besides its tensors; on CUDA those of partial sums."""
    if args and isinstance(args[0], Tensor) and not on_cpu(args[0]):
        return reduction_bytes(func, args, this_processor())
    is_pointwise = torch.Tag.pointwise in func.tags and isinstance(result, Tensor)
    if not (is_pointwise or func in _CONVOLUTIONS or func in _COPYING):
        return 0
    tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
    if not tensors:
        return 0
    if func is _ATEN.convolution.default:
        x, weight, _, *options = args
        return _Convolution(x, weight, result, *options).forward_bytes()
    if func is _ATEN.convolution_backward.default:
        grad, x, weight, _, *options, wanted = args
        return _Convolution(x, weight, grad, *options).backward_bytes(with_bias=wanted[2])
    if func in _COPYING:
        return sum(tensor.nbytes for tensor in tensors if not tensor.is_contiguous())
    return _cast_bytes(func, args, result)


class LibraryMemory:
    """What oneDNN keeps of the calls that it has seen."""

    def __init__(self) -> None:
        self._seen: dict[Any, int] = {}

    def see(self, func: Any, args: tuple[Any, ...]) -> None:
        """Count a call, if it is of a shape that was not seen before."""
        sizes = _COMPILED.get(func)
        if sizes is None or args[0].device.type != "cpu":
            return
        dtype = args[0].dtype
        size = sizes.get(dtype)
        if size is not None and (dtype != torch.bfloat16 or _has_bfloat16()):
            forms = ((arg.shape, arg.stride()) for arg in args if isinstance(arg, Tensor))
            self._seen[func, tuple(forms)] = size

    @property
    def nbytes(self) -> int:
        """The bytes of all calls."""
        return sum(self._seen.values())


class UntouchedBytes:
    """Bytes of storages that no kernel has written yet: they take addresses, and no memory.

    Of the workspace of an LSTM, oneDNN's forward writes the gates and the states of the cells, where it runs
    backwards in time also copies of two more states; its backward writes the gradients of the gates.
    """

    def __init__(self) -> None:
        self._bytes: dict[int, int] = {}

    def see(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Note what a call leaves unwritten, or writes."""
        if func is _LSTM:
            y, workspace, is_reverse = result[0], result[3], args[7]
            written = (7 if is_reverse else 5) * y.nbytes
            self._bytes[workspace.untyped_storage()._cdata] = max(0, workspace.nbytes - written)
        elif func is _LSTM_BACKWARD:
            y, key = args[7], args[-1].untyped_storage()._cdata
            self._bytes[key] = max(0, self._bytes.get(key, 0) - 4 * y.numel() * torch.float32.itemsize)

    def forget(self, key: int) -> None:
        """Forget a storage that has died."""
        self._bytes.pop(key, None)

    @property
    def nbytes(self) -> int:
        """The bytes of all storages that are alive."""
        return sum(self._bytes.values())


@cache
def _has_bfloat16() -> bool:
    """Return whether oneDNN compiles kernels for bfloat16 on this processor."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _cast_bytes(func: Any, args: tuple[Any, ...], result: Tensor) -> int:
    """Return the bytes of arguments, and of a result in place, that are cast to the dtype of the kernel."""
    read = [arg for place, arg in enumerate(args) if place != _UNCAST.get(func)]
    tensors = [arg for arg in read if isinstance(arg, Tensor) and arg.dim()]
    if not tensors:
        return 0
    in_place, dtype = func._schema.name.endswith("_"), result.dtype
    if in_place or dtype == torch.bool:
        dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
        if not dtype.is_floating_point and any(isinstance(arg, float) for arg in read):
            dtype = torch.get_default_dtype()
    cast = [tensor for tensor in (*tensors, *([result] if in_place else ())) if tensor.dtype != dtype]
    return int(sum(tensor.numel() for tensor in cast) * dtype.itemsize)


@dataclass(frozen=True)
class _Convolution:
    """Input, weight, output or its gradient, and options of a convolution."""

    x: Tensor
    weight: Tensor
    y: Tensor
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    output_padding: Sequence[int]
    groups: int

    def forward_bytes(self) -> int:
        kernel = self._kernel()
        if not kernel.startswith("Slow"):
            copies = 2 if self._moves_channels() else 1
            return max(self.x.nbytes, self.y.nbytes) + copies * self.weight.nbytes
        columns = 0 if self._pointwise() else self._columns()
        if kernel not in {"Slow2d", "Slow3d", "SlowTranspose2d"}:
            columns //= len(self.x)
        if self.transposed:
            columns += self._summed()
        return self._copied() + self._grouped(columns, self.x.nbytes, self.y.nbytes)

    def backward_bytes(self, *, with_bias: bool) -> int:
        kernel = self._kernel()
        if not kernel.startswith("Slow"):
            copied = [tensor for tensor in (self.y, self.x) if not _ATEN.is_non_overlapping_and_dense(tensor)]
            if max(self.stride) > 1 and (self.groups == 1 or self._is_16_bit()):
                copied.append(self.x)
            # The gradient of weights of 16 bits is summed in float32.
            copies = 3 if self._moves_channels() else 2 if self._is_16_bit() else 1
            copied += [self.weight] * copies
            return max(sum(int(tensor.nbytes) for tensor in (self.y, self.x, *copied)), self._padded())
        sample = self._columns() // len(self.x)
        of_weight = self._columns() if kernel in {"Slow2d", "Slow3d"} else sample
        of_x = of_weight if kernel == "Slow3d" else sample
        if self._pointwise():
            of_weight = 0
        if not self.transposed:
            of_x += self._summed()
        if kernel == "Slow2d":
            of_x *= min(torch.get_num_threads(), len(self.x))
        taken = self.x.nbytes + self.y.nbytes
        # The gradient of a bias sums 16-bit numbers in a float32 copy, and this kernel keeps it.
        of_bias = 2 * self.y.nbytes if with_bias and kernel == "SlowTranspose3d" and self._is_16_bit() else 0
        return self._copied() + self._grouped(max(of_x, of_weight), taken, self.x.nbytes) + of_bias

    def _moves_channels(self) -> bool:
        """Return whether weights are copied to have their channels last, as the input has."""
        return layout_of(self.x) == torch.channels_last and not _channels_last(self.weight)

    def _padded(self) -> int:
        """Return the bytes of a gradient of weights whose groups have their channels padded to 16.

        So it is with channels last: the gradient in float32; for 16 bits also in these, and one sample of the
        input and of the output. Small windows by channel have a kernel of their own.
        """
        by_channel = self.groups == self.x.shape[1] == self.y.shape[1]
        small = by_channel and max(self.weight.shape[2:]) < 4
        if self.groups == 1 or small or not _channels_last(self.x):
            return 0
        channels = [16 * math.ceil(each.shape[1] / self.groups / 16) for each in (self.x, self.y)]
        weights = math.prod((self.groups, *channels, *self.weight.shape[2:]))
        if not self._is_16_bit():
            return 4 * weights
        areas = (math.prod(each.shape[2:]) for each in (self.x, self.y))
        samples = sum(width * area for width, area in zip(channels, areas, strict=True))
        return 6 * weights + 2 * self.groups * samples

    def _kernel(self) -> str:
        """Return the name of PyTorch's kernel; "Slow…" are its own, which make columns."""
        steps = (self.stride, self.padding, self.dilation)
        options = (*steps, self.transposed, self.output_padding, self.groups)
        return str(torch._C._select_conv_backend(self.x, self.weight, None, *options).name)

    def _grouped(self, columns: int, taken: int, joined: int) -> int:
        """Return the bytes of groups: one after the other with its part of what is `taken`, then joined."""
        return columns if self.groups == 1 else max(columns + taken // self.groups, joined)

    def _pointwise(self) -> bool:
        """Return whether the input is its own matrix of columns."""
        window = max(*self.weight.shape[2:], *self.stride)
        return window == 1 and not self.transposed and not any(self.padding)

    def _columns(self) -> int:
        """Return the bytes of the columns of a group, of all samples."""
        places = self.x if self.transposed else self.y
        return self.weight[0].numel() * places[:, 0].numel() * self.x.element_size()

    def _summed(self) -> int:
        """Return the bytes of the float32 sums of one sample's products of 16-bit numbers."""
        return 2 * self._columns() // len(self.x) if self._is_16_bit() else 0

    def _is_16_bit(self) -> bool:
        return self.x.element_size() == 2

    def _copied(self) -> int:
        return sum(tensor.nbytes for tensor in (self.x, self.y) if not tensor.is_contiguous())


def _channels_last(tensor: Tensor) -> bool:
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
