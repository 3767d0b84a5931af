"""What a forward saves as PyTorch does, by function: seen from autograd's side, while a policy is at work."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor, UntypedStorage

from mesa_tune.functional.apply import Replay
from mesa_tune.functional.deriving import Recipe
from mesa_tune.functional.keeping import Meta


class Saved(NamedTuple):
    """A storage that autograd saved in a call of `layer`."""

    layer: str
    storage: weakref.ref[UntypedStorage]
    bytes: int
    is_float: bool


class ExactBytes:
    """Observe a forward: every tensor that autograd saves, and which of them hold codes or packed bits."""

    wants_tensors = False

    def __init__(self) -> None:
        self._packed: set[int] = set()
        self._saved: dict[int, Saved] = {}
        self._newest: Tensor | None = None

    def left(self, given: Iterable[Tensor]) -> list[Saved]:
        """Return what is saved, alive and in no codec; `given` (parameters, batch, loss) apart."""
        apart = {tensor.untyped_storage()._cdata for tensor in given} | self._packed
        return [
            saved for key, saved in self._saved.items() if key not in apart and saved.storage() is not None
        ]

    def begin(self, layer: str | None, given: object) -> None:
        self._newest = None

    def end(self, layer: str | None, output: object) -> None:
        self._newest = None

    def saved(self, layer: str, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        known = self._saved.get(storage._cdata)
        if known is None or known.storage() is None:
            self._newest = tensor
            self._saved[storage._cdata] = Saved(
                layer, weakref.ref(storage), storage.nbytes(), tensor.is_floating_point()
            )

    def kept(
        self,
        layer: str,
        lossy: Sequence[object],
        kept: Sequence[Meta | Recipe],
        parts: Sequence[list[Tensor]],
        exact: list[Tensor],
        row: int,
    ) -> None:
        packed = [tensor for tensor in exact if not tensor.is_floating_point() and tensor.itemsize == 1]
        for how, stored in zip(kept, parts, strict=True):
            if isinstance(how, Meta) and how.coded:
                packed += stored
        self._packed |= {part.untyped_storage()._cdata for part in packed}
        # A hook first says that autograd saves the tensor, and then that it is encoded.
        if len(lossy) == 1 and self._newest is not None and lossy[0] is self._newest:
            self._saved.pop(self._newest.untyped_storage()._cdata, None)

    def backward(self, replay: Replay) -> None:
        """Nothing is decoded in a forward."""

    def unpacked(self, layer: str, tensor: Tensor) -> Tensor:
        return tensor
