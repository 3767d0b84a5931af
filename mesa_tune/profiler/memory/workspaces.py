"""What kernels allocate on the CPU and free within one call, modelled: no tensor and no meter shows it.

What is hard: the libraries do not say. The rules are what resident memory showed around single calls of five
convolutional networks (torch 2.13, oneDNN): a convolution copies its tensors into the layout that its kernel
wants, or, where oneDNN does not take the dtype (bfloat16 without AVX-512) or is off, writes each window as a
column of a matrix; and some functions copy an argument that is not contiguous.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._pytree import tree_leaves

from mesa_tune.profiler.memory.meter import Meter

_ATEN = torch.ops.aten
_COPYING = {
    getattr(_ATEN, name).default
    for name in (
        "_log_softmax",
        "_softmax",
        "native_layer_norm",
        "native_layer_norm_backward",
        "upsample_bilinear2d_backward",
        "upsample_nearest2d_backward",
    )
}
_MODELLED = {_ATEN.convolution.default, _ATEN.convolution_backward.default, *_COPYING}


class WorkspaceMeter(Meter):
    """A meter whose `most` also counts the workspaces of convolutions and other calls.

    `older`: tensors that exist already, which count too.
    """

    def __init__(self, older: Iterable[Tensor], others: Iterable[UntypedStorage] = ()) -> None:
        super().__init__()
        self.most = 0
        self.count_older(older, others)

    def _called(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        self.most = max(self.most, self.high_water, self.live_bytes + workspace_bytes(func, args, result))


def workspace_bytes(func: Any, args: tuple[Any, ...], result: Any) -> int:
    """Return about the most bytes that a call on the CPU takes besides its tensors; 0 on other devices."""
    if func not in _MODELLED or args[0].device.type != "cpu":
        return 0
    if func is _ATEN.convolution.default:
        x, weight, _, *options = args
        return _Convolution(x, weight, result, *options).forward_bytes()
    if func is _ATEN.convolution_backward.default:
        grad, x, weight, _, *options, wanted = args
        return _Convolution(x, weight, grad, *options).backward_bytes(with_bias=wanted[2])
    tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
    return sum(tensor.nbytes for tensor in tensors if not tensor.is_contiguous())


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
            return max(self.x.nbytes, self.y.nbytes) + self.weight.nbytes
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
            if max(self.stride) > 1 and self.groups == 1:
                copied.append(self.x)
            return sum(int(tensor.nbytes) for tensor in (self.y, self.x, self.weight, *copied))
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
