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

_METHODS: Final = {
    "linear": "dot vdot inner outer ger mv addmv addr addbmm kron cross lerp",
    "shape": "gather take_along_dim index_add masked_select",
}
"""By reason, functions of `torch` that are methods of tensors, too."""

_FUNCTIONS: Final = {
    "linear": "tensordot chain_matmul einsum trapezoid cumulative_trapezoid conv_tbc",
    "bounded": "lstm gru rnn_tanh lstm_cell rnn_tanh_cell",
}
_OTHERS: Final[dict[Callable[..., Any], str]] = {
    torch.linalg.cross: "linear",
    torch.linalg.vecdot: "linear",
    torch.linalg.multi_dot: "linear",
    Tensor.index_add_: "shape",
}


def _named(owner: Any, names: dict[str, str]) -> dict[Callable[..., Any], str]:
    return {getattr(owner, name): reason for reason, text in names.items() for name in text.split()}


HOOKED: Final = _named(torch, _FUNCTIONS) | _named(torch, _METHODS) | _named(Tensor, _METHODS) | _OTHERS
"""Each function, as a mode sees it, and the reason in a word."""
