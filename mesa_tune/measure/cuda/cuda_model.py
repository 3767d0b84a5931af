"""What a step saves on CUDA, traced on fake CPU tensors: a model of where CUDA's kernels differ.

What is hard: a PyTorch without CUDA cannot run autograd on tensors of that device, fake ones included. So
the step runs on the CPU, and the functions that save something else on CUDA are replaced: attention (flash,
memory-efficient), dropout (a mask of bytes), and what autocast runs in float32. A `torch.autocast("cuda")` of
the user's code acts on the CPU. Optimizers update all parameters at once. Of our own kernels, those run that
CUDA has.

Not in the model: cuDNN's recurrent layers, and workspaces of libraries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from mesa_tune.ops.devices import as_on_cuda

_ATEN: Any = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_LARGEST_FLASH_HEAD = 256

_IN_FLOAT32 = (
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log1p", "log2", "reciprocal"),
    *("rsqrt", "sinh", "tan", "softplus", "layer_norm", "native_layer_norm", "group_norm", "logsumexp"),
    *("pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "cosine_similarity", "linalg_vector_norm"),
    *("cumsum", "cumprod", "sum", "sum.dim_IntList", "softmax.int", "log_softmax.int", "norm.Scalar"),
)
"""Functions that autocast runs in float32 on CUDA, and not on the CPU (ATen/autocast_mode.h)."""


@contextmanager
def cuda_functions() -> Iterator[None]:
    """Run functions of CPU tensors, for the body, as CUDA's kernels save for backward."""
    with as_on_cuda(), _autocast_on_cpu(), torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("scaled_dot_product_attention", _attention, "AutogradCPU")
        library.impl("dropout", _dropout, "AutogradCPU")
        for name in _IN_FLOAT32:
            library.impl(name, _in_float32(name), "AutocastCPU")
        yield


@contextmanager
def _autocast_on_cpu() -> Iterator[None]:
    """Let autocast for CUDA act on the CPU, where PyTorch without CUDA would switch it off."""
    enter = torch.autocast.__init__

    def on_cpu(
        self: torch.autocast, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any
    ) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", torch.get_autocast_dtype("cuda") if dtype is None else dtype
        enter(self, device_type, dtype, *args, **kwargs)

    torch.autocast.__init__ = on_cpu  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__init__ = enter  # type: ignore[method-assign]


def update_all_at_once(optimizer: Optimizer) -> None:
    """Make an optimizer update all parameters at once, as is the default on CUDA."""
    for group in optimizer.param_groups:
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = True


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention by the kernel that PyTorch chooses on CUDA: flash, memory-efficient, or written out."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if attn_mask is None and _flash_takes(q, k, v, is_causal):
        return _flash(q, k, v, dropout_p, is_causal, scale)
    mask = None if attn_mask is None else _additive(attn_mask, q)
    if not enable_gqa and _efficient_takes(q, k, v):
        bias = None if mask is None else mask.expand(*q.shape[:3], k.shape[2])
        wanted = any(tensor.requires_grad for tensor in (q, k, v))
        y: Tensor = _ATEN._scaled_dot_product_efficient_attention(
            q, k, v, bias, wanted, dropout_p, is_causal, scale=scale
        )[0]
        return y
    written_out: Tensor = _ATEN._scaled_dot_product_attention_math(
        q, k, v, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )[0]
    return written_out


def _flash_takes(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> bool:
    width = q.shape[-1]
    fits = q.dim() == 4 and q.dtype in _HALF and width == v.shape[-1] <= _LARGEST_FLASH_HEAD
    return fits and not (is_causal and q.shape[2] != k.shape[2])


def _efficient_takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    unit = 8 if q.dtype in _HALF else 4
    aligned = q.shape[-1] % unit == 0 and v.shape[-1] % unit == 0
    return q.dim() == 4 and aligned and q.dtype in (*_HALF, torch.float32)


def _flash(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, is_causal: bool, scale: float) -> Tensor:
    width = q.shape[-1]
    if width % 8:
        q, k, v = (F.pad(tensor, (0, 8 - width % 8)) for tensor in (q, k, v))
    y: Tensor = _ATEN._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, False, scale=scale)[
        0
    ]
    return y[..., :width] if width % 8 else y


def _additive(mask: Tensor, q: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask.logical_not(), -math.inf)


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    if not train or p == 0 or not x.numel():
        return x
    y: Tensor = x * 0 if p == 1 else _ATEN.native_dropout(x, p, True)[0]
    return y


def _in_float32(name: str) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    function = getattr(getattr(_ATEN, packet), overload or "default")

    def run(*args: Any, **kwargs: Any) -> Any:
        wide, named = tree_map_only(Tensor, _widened, (args, kwargs))
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            return function(*wide, **named)

    return run


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _HALF else tensor


_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
