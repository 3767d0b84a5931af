"""Functions without a formula whose saved tensors the hooks may store lossily (Rule 10), and why.

`linear`: each gradient is linear in each saved tensor. `bounded`: the derivative is bounded, and so is its
change with what is saved. `shape`: of a saved floating-point tensor nothing but the shape is used. Everything
else that no formula serves stays exact: a backward that compares what it saved, divides by it or
exponentiates it has no bound on its error.
"""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

_LINEAR: Final = (
    torch.dot,
    torch.vdot,
    torch.inner,
    torch.outer,
    torch.ger,
    torch.mv,
    torch.addmv,
    torch.addr,
    torch.addbmm,
    torch.kron,
    torch.linalg.cross,
    torch.cross,
    torch.linalg.vecdot,
    torch.linalg.multi_dot,
    torch.tensordot,
    torch.chain_matmul,
    torch.einsum,
    torch.lerp,
    torch.trapezoid,
    torch.cumulative_trapezoid,
    torch.conv_tbc,
    Tensor.dot,
    Tensor.vdot,
    Tensor.inner,
    Tensor.outer,
    Tensor.ger,
    Tensor.mv,
    Tensor.addmv,
    Tensor.addr,
    Tensor.addbmm,
    Tensor.kron,
    Tensor.cross,
    Tensor.lerp,
)
_BOUNDED: Final = (
    torch.atan,
    torch.arctan,
    torch.asinh,
    torch.arcsinh,
    torch.erfc,
    torch.special.erfc,
    Tensor.atan,
    Tensor.arctan,
    Tensor.asinh,
    Tensor.arcsinh,
    Tensor.erfc,
    torch.lstm,
    torch.gru,
    torch.rnn_tanh,
    torch.lstm_cell,
    torch.rnn_tanh_cell,
)

_SHAPE: Final = (
    torch.gather,
    torch.take_along_dim,
    torch.index_add,
    torch.masked_select,
    Tensor.gather,
    Tensor.take_along_dim,
    Tensor.index_add,
    Tensor.index_add_,
    Tensor.masked_select,
)

HOOKED: Final[dict[Callable[..., Any], str]] = {
    **dict.fromkeys(_LINEAR, "linear"),
    **dict.fromkeys(_BOUNDED, "bounded"),
    **dict.fromkeys(_SHAPE, "shape"),
}
"""Each function, as a mode sees it, and the reason in a word."""
