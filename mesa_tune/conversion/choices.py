"""What a run decides by its tensors' values: shapes, indices, branches.

A module that runs again from rounded inputs may decide otherwise, and tensors of its two runs then do not fit
together. Whether it decides anything is seen from the functions it calls, never from the values.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from mesa_tune.engine.rematerialize import IN_PLACE


class Choices(TorchFunctionMode):
    """Notes whether a call made integers, booleans or Python numbers of values that rounded inputs change.

    Those could be others in the second run, and with them shapes, or which elements of a tensor are taken.
    `exact` are tensors that are the same in both; what is made of them alone is, too.
    """

    def __init__(self, exact: list[Tensor]) -> None:
        super().__init__()
        self.exact = {id(tensor): tensor for tensor in exact}
        self.made = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if self.made:
            return output
        if not self._changes(args, kwargs):
            self.exact.update((id(leaf), leaf) for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
        elif _may_choose(func, output):
            self.made = True
        elif func in IN_PLACE or kwargs:
            self.exact.clear()  # one of them may have been written over
        return output

    def __exit__(self, *error: Any) -> None:
        self.exact.clear()  # what is known lives no longer than the run
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def _changes(self, args: Any, kwargs: Any) -> bool:
        """Whether rounded inputs change one of the arguments."""
        first = bool(args) and self._is_rounded(args[0])  # most calls are known by it
        return first or any(self._is_rounded(leaf) for leaf in tree_leaves((args, kwargs)))

    def _is_rounded(self, leaf: Any) -> bool:
        floating = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return floating and id(leaf) not in self.exact and not isinstance(leaf, nn.Parameter)


_VALUES = {Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__bool__, Tensor.__int__}
_VALUES |= {Tensor.__float__, Tensor.__index__, Tensor.equal, torch.equal, Tensor.allclose, torch.allclose}
_VALUES |= {Tensor.is_nonzero, torch.is_nonzero, Tensor.unique, torch.unique}
_VALUES |= {Tensor.unique_consecutive, torch.unique_consecutive}


def _may_choose(func: Any, output: Any) -> bool:
    """Whether `func` returns what its tensors' values decide on, besides floating-point values."""
    if func in _VALUES:
        return True
    name = getattr(func, "__name__", "")
    if name.startswith("new_") or name.endswith("_like"):
        return False
    outputs = output if isinstance(output, (tuple, list)) else (output,)
    return any(isinstance(y, Tensor) and not y.is_floating_point() for y in outputs)
