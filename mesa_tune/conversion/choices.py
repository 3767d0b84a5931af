"""Detection of modules whose shapes, indices or branches depend on the values of their tensors.

Such a module may choose differently when it runs again from rounded inputs, and the tensors of its two runs
then do not fit together. What is hard is to detect this without reading values, which would wait for the
device. So only the functions that the module calls are looked at.
"""

from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from mesa_tune.engine.rematerialize import IN_PLACE


class ChoiceDetector(TorchFunctionMode):
    """Detects calls that compute integers, booleans or Python numbers from values that rounded inputs change.

    These results could differ in the second run, and with them shapes, or which elements of a tensor are
    taken. `exact`: tensors that are equal in both runs. What is computed from them alone is also equal in
    both.
    """

    def __init__(self, exact: list[Tensor]) -> None:
        super().__init__()
        self.exact = {id(tensor): ref(tensor) for tensor in exact}  # weak: the module may free them
        self.detected = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if self.detected:
            return output
        if not self._changes(args, kwargs):
            leaves = (leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
            self.exact.update((id(leaf), ref(leaf)) for leaf in leaves)
        elif _may_choose(func, output):
            self.detected = True
        elif func in IN_PLACE or kwargs:
            self.exact.clear()  # the call may have written to one of them
        return output

    def __exit__(self, *error: Any) -> None:
        self.exact.clear()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def _changes(self, args: Any, kwargs: Any) -> bool:
        """Return whether rounded inputs change one of the arguments."""
        first = bool(args) and self._is_rounded(args[0])  # decides most calls, and fast
        return first or any(self._is_rounded(leaf) for leaf in tree_leaves((args, kwargs)))

    def _is_rounded(self, leaf: Any) -> bool:
        floating = isinstance(leaf, Tensor) and leaf.is_floating_point()
        if not floating or isinstance(leaf, nn.Parameter):
            return False
        known = self.exact.get(id(leaf))
        return known is None or known() is not leaf


_VALUES = {Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__bool__, Tensor.__int__}
_VALUES |= {Tensor.__float__, Tensor.__index__, Tensor.equal, torch.equal, Tensor.allclose, torch.allclose}
_VALUES |= {Tensor.is_nonzero, torch.is_nonzero, Tensor.unique, torch.unique}
_VALUES |= {Tensor.unique_consecutive, torch.unique_consecutive}


def _may_choose(func: Any, output: Any) -> bool:
    """Return whether `func` returns something other than floating-point values that depends on values."""
    if func in _VALUES:
        return True
    name = getattr(func, "__name__", "")
    if name.startswith("new_") or name.endswith("_like"):
        return False
    outputs = output if isinstance(output, (tuple, list)) else (output,)
    return any(isinstance(y, Tensor) and not y.is_floating_point() for y in outputs)
