"""Where PyTorch's fake tensors differ from what its CPU kernels return, in a training step.

Found by running both on every operation of nine models of transformers, in float32 and under autocast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_ATEN: Any = torch.ops.aten


def corrected(func: Any, args: Sequence[Any], result: Any) -> Any:
    """Return the fake `result` of an operation as the CPU kernel returns it."""
    correct = _CORRECTIONS.get(func)
    return result if correct is None else correct(args, result)


def _with_wide_statistics(args: Sequence[Any], result: Sequence[Tensor]) -> Sequence[Tensor]:
    """Statistics have the dtype of the parameters, which may be wider than the input's."""
    parameters = [value for value in args[1:] if isinstance(value, Tensor)]
    if not parameters or parameters[0].dtype == args[0].dtype:
        return result
    y, *statistics = result
    return y, *(part.to(parameters[0].dtype) for part in statistics)


def _with_contiguous_gradient(_: Sequence[Any], result: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    grad, *others = result
    return grad if grad is None else grad.contiguous(), *others


_CORRECTIONS: dict[Any, Callable[[Sequence[Any], Any], Any]] = {
    _ATEN.native_layer_norm.default: _with_wide_statistics,
    _ATEN.native_batch_norm.default: _with_wide_statistics,
    _ATEN.native_layer_norm_backward.default: _with_contiguous_gradient,
}
