"""What a forward saves uncompressed, by layer, measured from autograd's side.

What is hard: autograd also reports the packed tensors, so the observer must tell them from uncompressed ones.
"""

from __future__ import annotations

import re
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from meters import given_tensors, loss_under, model_under
from torch import Tensor, UntypedStorage, nn

import mesa_tune as mt
from mesa_tune.engine.observer import Observer
from mesa_tune.engine.rematerialize import Recipe
from mesa_tune.engine.storage import Packing
from mesa_tune.measure.memory.trace import observing
from mesa_tune.ops.maps import Deferred


@dataclass
class Row:
    """Uncompressed bytes of layers whose names differ only in numbers; the shape of the largest tensor."""

    layers: str
    function: str
    bytes: int
    tensors: int
    shape: tuple[int, ...]
    dtype: str


@dataclass
class Derived:
    """Layers whose inputs backward computes from copies of `producers`; names with stars for numbers."""

    layers: str
    producers: str
    tensors: int


class Left(NamedTuple):
    """Bytes of packed tensors, the uncompressed tensors (largest first), and the derived tensors."""

    coded_bytes: int
    rows: list[Row]
    derived: list[Derived]

    @property
    def bytes(self) -> int:
        """Bytes saved uncompressed."""
        return sum(row.bytes for row in self.rows)


def left_uncompressed(workload: mt.Workload, policy: mt.Policy) -> Left:
    """Return what a forward under `policy` saves uncompressed, except parameters, buffers, batch, loss."""
    model, batch = model_under(workload, policy), workload.make_batch()
    observer = SavedTensorObserver()
    with observing(observer):
        loss = loss_under(workload, policy)(model, batch)
    rows: dict[str, Row] = {}
    tensors = observer.uncompressed([*given_tensors(model, batch), loss])
    for saved in sorted(tensors, key=lambda saved: -saved.bytes):
        key = _unnumbered(saved.layer)
        row = rows.setdefault(key, Row(key, _function(model, saved.layer), 0, 0, saved.shape, saved.dtype))
        row.bytes, row.tensors = row.bytes + saved.bytes, row.tensors + 1
    derived = [Derived(*pair, count) for pair, count in observer.derived.items()]
    return Left(observer.coded_bytes(), sorted(rows.values(), key=lambda row: -row.bytes), derived)


def _unnumbered(layer: str) -> str:
    """Return the layer's name with a star for every number."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", layer)


def _function(model: nn.Module, layer: str) -> str:
    """Return the class of the layer's module, or else the function that the layer's name ends in."""
    parts = layer.split(".")
    modules = dict(model.named_modules())
    if layer in modules:
        return type(modules[layer]).__name__
    return parts[-2] if len(parts) > 1 and parts[-1].isdecimal() else layer


class _SavedTensor(NamedTuple):
    layer: str
    storage: weakref.ref[UntypedStorage]
    bytes: int
    shape: tuple[int, ...]
    dtype: str


class SavedTensorObserver(Observer):
    """Observer of a forward: all tensors that autograd saves, and which of them are packed."""

    def __init__(self) -> None:
        self.derived: Counter[tuple[str, str]] = Counter()
        self._packed: dict[int, weakref.ref[UntypedStorage]] = {}
        self._saved: dict[int, _SavedTensor] = {}
        self._newest: Tensor | None = None

    def coded_bytes(self) -> int:
        """Return the bytes of packed tensors, ranges and packed bits that are alive."""
        storages = (storage for reference in self._packed.values() if (storage := reference()) is not None)
        return sum(storage.nbytes() for storage in storages)

    def uncompressed(self, without: Sequence[Tensor]) -> list[_SavedTensor]:
        """Return what is alive and not packed, in the order of saving, except the tensors `without`."""
        excluded = {tensor.untyped_storage()._cdata for tensor in without} | self._packed.keys()
        return [
            saved
            for address, saved in self._saved.items()
            if address not in excluded and saved.storage() is not None
        ]

    def begin(self, layer: str | None, given: object) -> None:
        self._newest = None

    def end(self, layer: str | None, output: object) -> None:
        self._newest = None

    def saved(self, layer: str, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        earlier = self._saved.get(storage._cdata)
        if earlier is None or earlier.storage() is None:
            self._newest = tensor
            dtype = str(tensor.dtype).removeprefix("torch.")
            saved = _SavedTensor(layer, weakref.ref(storage), storage.nbytes(), tuple(tensor.shape), dtype)
            self._saved[storage._cdata] = saved

    def stored(
        self,
        layer: str,
        lossy: tuple[Tensor | Deferred, ...],
        how: tuple[Packing | Recipe, ...],
        parts: tuple[list[Tensor], ...],
        exact: list[Tensor],
        row: int,
        valued: bool = False,
    ) -> None:
        # Exact uint8 tensors are packed masks and window offsets; other exact tensors are PyTorch's own.
        packed = [tensor for tensor in exact if tensor.dtype is torch.uint8]
        for packing, stored in zip(how, parts, strict=True):
            if isinstance(packing, Recipe):  # its parts are the producer's
                self.derived[_unnumbered(layer), _unnumbered(packing.layer)] += 1
            elif packing.packed:
                packed += stored
        for part in packed:
            self._packed[part.untyped_storage()._cdata] = weakref.ref(part.untyped_storage())
        # For a tensor stored by a hook, `saved` is called first, and then `stored`.
        newest = self._newest
        if newest is not None and len(lossy) == 1 and lossy[0] is newest:
            del self._saved[newest.untyped_storage()._cdata]
