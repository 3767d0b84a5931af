"""What kernels allocate on the CPU and free within one call, modelled: no tensor and no meter shows it.

What is hard: the libraries do not say. The rules are what resident memory showed around single calls of five
convolutional networks (torch 2.13, oneDNN): a convolution copies its tensors into the layout that its kernel
wants, and some functions copy an argument that is not contiguous.
"""

from __future__ import annotations

from collections.abc import Iterable
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
        x, weight = args[:2]
        return int(max(x.nbytes, result.nbytes) + weight.nbytes)
    if func is _ATEN.convolution_backward.default:
        grad, x, weight, _, stride, *_, groups, _ = args
        copied = [tensor for tensor in (grad, x) if not _ATEN.is_non_overlapping_and_dense(tensor)]
        if max(stride) > 1 and groups == 1:
            copied.append(x)
        return sum(int(tensor.nbytes) for tensor in (grad, x, weight, *copied))
    tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
    return sum(tensor.nbytes for tensor in tensors if not tensor.is_contiguous())
