"""Reading values out of a tensor, where that is possible: it may wait for a device, or there may be no value.

Also the fake tensors of a trace that looks at bytes alone, in which no flag is set.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from mesa_tune.ops.devices import on_cpu


class BytesOnly(FakeTensorMode):
    """Fake tensors of a training step of which only bytes are asked. Real tensors may meet them."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)


def none_set(flags: Tensor) -> bool:
    """Return whether no flag is set; False on a device that this would wait for, and in traced code.

    Under `BytesOnly` none is set where the CPU's kernels run: flags mark what is unusual (NaN, zero rows).
    """
    if type(flags) is Tensor:
        return flags.is_cpu and not torch.compiler.is_compiling() and not flags.any()
    return on_cpu(flags) and isinstance(flags, FakeTensor) and isinstance(flags.fake_mode, BytesOnly)


def counts_below(ascending: Tensor, limits: Sequence[int], end: int) -> list[int]:
    """Return how many of the integers, which are below `end`, are below each of `limits`.

    Fake integers are evenly spaced.
    """
    if isinstance(ascending, FakeTensor):
        return [len(ascending) * limit // end for limit in limits]
    counts: list[int] = torch.searchsorted(ascending, ascending.new_tensor(limits)).tolist()
    return counts
