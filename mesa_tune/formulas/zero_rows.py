"""Rows of zeros (padding, windows) stay zeros: where groups reach over rows, one bit per row marks them.

The gradient that such a row meets may be as large as it likes, and times zero it is zero: behind it
`normalize` divides by ε, a norm before it multiplies by 1 / √ε.
"""

import torch
from torch import Tensor

from mesa_tune import ops
from mesa_tune.engine.call import Call

USUAL_GROUPS = 1024
"""Groups of this size, or of a smaller power of two, end with rows whose length is a multiple of it."""


def may_be_lost(call: Call, x: Tensor) -> bool:
    """Return whether a row of zeros of `x` may be decoded as other numbers: groups reach over rows.

    The answer is the same for all usual sizes of groups, codecs and tensors, so that a profile can predict
    what is saved besides.
    """
    spec = call.spec
    if x.dim() < 2 or x.numel() <= spec.min_elements or call.is_static(x):
        return False
    over_rows = spec.quant_groups > 0 or x.shape[-1] % max(spec.group_size, USUAL_GROUPS) > 0
    return over_rows and spec.levels > 0


def cleared(grad: Tensor, zero_rows: Tensor) -> Tensor:
    """Return `grad` with 0 in the rows that the packed bits mark; `grad` itself where they mark none."""
    zero = ops.unpack_bits(zero_rows, grad.shape[:-1])
    if zero.is_cpu and not torch.compiler.is_compiling() and not zero.any():
        return grad
    return grad.masked_fill(zero.unsqueeze(-1), 0)
