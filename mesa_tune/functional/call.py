"""`Call`: one call of a routed function, knowing its layer, its settings and what must not be encoded."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mesa_tune.codecs import Spec
from mesa_tune.functional.apply import Apply, Memories
from mesa_tune.functional.formula import Static, autocast_dtype
from mesa_tune.functional.keeping import pays
from mesa_tune.functional.table import FORMULAS
from mesa_tune.notice import warn_once

Plain = Callable[[], Any]


class Call:
    """Handed to a route (`routes` of each family), which names the formula and the tensors.

    `plain()` is the call as PyTorch would have run it; a route that cannot serve the arguments returns
    `call.refuse(why)`.
    """

    def __init__(
        self,
        layer: str,
        spec: Spec,
        key: Callable[[torch.device], Tensor],
        is_static: Callable[[Tensor], bool],
        plain: Plain,
        memory: Memories | None = None,
    ) -> None:
        self.layer = layer
        self.spec = spec
        self.key = key
        self.is_static = is_static
        self.plain = plain
        self.memory = memory

    def apply(self, name: str, static: Static, tensor: Tensor, *others: Tensor | None) -> Any:
        """Runs formula `name` on the tensors; plain where no gradient is wanted or nothing would get
        smaller.
        """
        tensors = (tensor, *others)
        needs = tuple(given is not None and given.requires_grad for given in tensors)
        if not any(needs):
            return self.plain()
        if any(given is not None and _odd(given) for given in tensors):
            return self.refuse("complex, sparse and nested tensors have no formula")
        if not (FORMULAS[name].lossless or self._pays(tensors)):
            return self.plain()
        raw = tuple(given is None or self.is_static(given) for given in tensors)
        key = self.key(tensor.device)
        given = (self.layer, name, static, needs, raw, self.spec, key, self.memory, *tensors)
        return Apply.apply(*given)  # type: ignore[no-untyped-call]

    def part(self, plain: Plain) -> "Call":
        """A call for one part of this one, which `plain` runs as PyTorch would."""
        return Call(self.layer, self.spec, self.key, self.is_static, plain)

    def refuse(self, why: str) -> Any:
        """Runs the call as PyTorch would, with a warning that names the layer (Rule 9)."""
        warn_once(f"mesa-tune: {self.layer!r} is left uncompressed: {why}.")
        return self.plain()

    def small(self, *tensors: Tensor) -> bool:
        """Whether no tensor is worth encoding: too small, or no smaller under these settings."""
        return not self._pays(tensors)

    def _pays(self, tensors: Sequence[Tensor | None]) -> bool:
        if self.spec.levels == 0:
            return any(given is not None and given.numel() > self.spec.min_elements for given in tensors)
        given = [tensor for tensor in tensors if tensor is not None]
        # PyTorch may keep the copy that autocast makes, which is smaller than the tensor itself.
        return any(pays(tensor, self.spec, _kept_size(tensor)) for tensor in given)


def _kept_size(tensor: Tensor) -> int:
    dtype = autocast_dtype(tensor)
    return tensor.element_size() if dtype is None else dtype.itemsize


def _odd(tensor: Tensor) -> bool:
    return tensor.is_complex() or tensor.layout is not torch.strided or tensor.is_nested
