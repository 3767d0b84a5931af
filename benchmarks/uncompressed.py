"""What a step keeps as PyTorch would, by layer: what is under no codec, seen from autograd's side."""

from __future__ import annotations

import re
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from meters import given_tensors, loss_under, model_under
from torch import Tensor, UntypedStorage, nn

import mesa_tune as mt
from mesa_tune.engine.observer import Replay
from mesa_tune.engine.rematerialize import Recipe
from mesa_tune.engine.storage import Packing
from mesa_tune.profiler.trace import observing


@dataclass
class Row:
    """Layers that differ only in their numbers, and what they keep uncompressed; the largest one's shape."""

    layers: str
    function: str
    bytes: int
    tensors: int
    shape: tuple[int, ...]
    dtype: str


@dataclass
class Derived:
    """Layers that differ only in their numbers, and whose outputs they have made again instead of storing."""

    layers: str
    producers: str
    tensors: int


class Left(NamedTuple):
    """Bytes in codecs and packed bits, what is kept besides, largest first, and what is not kept at all."""

    coded_bytes: int
    rows: list[Row]
    derived: list[Derived]

    @property
    def bytes(self) -> int:
        """What is kept uncompressed."""
        return sum(row.bytes for row in self.rows)


def left_uncompressed(workload: mt.Workload, policy: mt.Policy) -> Left:
    """What a forward under `policy` keeps as PyTorch does; parameters, buffers, batch and loss apart."""
    model, batch = model_under(workload, policy), workload.make_batch()
    keeper = Keeper()
    with observing(keeper):
        loss = loss_under(workload, policy)(model, batch)
    rows: dict[str, Row] = {}
    found = keeper.uncompressed([*given_tensors(model, batch), loss])
    for kept in sorted(found, key=lambda kept: -kept.bytes):
        key = _unnumbered(kept.layer)
        row = rows.setdefault(key, Row(key, _function(model, kept.layer), 0, 0, kept.shape, kept.dtype))
        row.bytes, row.tensors = row.bytes + kept.bytes, row.tensors + 1
    derived = [Derived(*pair, tensors) for pair, tensors in keeper.derived.items()]
    return Left(keeper.coded_bytes(), sorted(rows.values(), key=lambda row: -row.bytes), derived)


def _unnumbered(layer: str) -> str:
    """The layer's name with a star for every number."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", layer)


def _function(model: nn.Module, layer: str) -> str:
    """The function that a layer's name ends in, or the class of the module that the layer is."""
    parts = layer.split(".")
    modules = dict(model.named_modules())
    if layer in modules:
        return type(modules[layer]).__name__
    return parts[-2] if len(parts) > 1 and parts[-1].isdecimal() else layer


class _Kept(NamedTuple):
    layer: str
    storage: weakref.ref[UntypedStorage]
    bytes: int
    shape: tuple[int, ...]
    dtype: str


class Keeper:
    """Observes a forward: every tensor that autograd saves, and which of them hold codes or packed bits."""

    wants_tensors = False

    def __init__(self) -> None:
        self.derived: Counter[tuple[str, str]] = Counter()
        self._packed: dict[int, weakref.ref[UntypedStorage]] = {}
        self._saved: dict[int, _Kept] = {}
        self._newest: Tensor | None = None

    def coded_bytes(self) -> int:
        """Bytes of codes, ranges and packed bits that are alive."""
        found = (storage for reference in self._packed.values() if (storage := reference()) is not None)
        return sum(storage.nbytes() for storage in found)

    def uncompressed(self, given: Sequence[Tensor]) -> list[_Kept]:
        """What is alive and saved in no codec, in the order of saving; `given` apart."""
        apart = {tensor.untyped_storage()._cdata for tensor in given} | self._packed.keys()
        return [
            kept for place, kept in self._saved.items() if place not in apart and kept.storage() is not None
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
            dtype = str(tensor.dtype).removeprefix("torch.")
            kept = _Kept(layer, weakref.ref(storage), storage.nbytes(), tuple(tensor.shape), dtype)
            self._saved[storage._cdata] = kept

    def stored(
        self,
        layer: str,
        lossy: tuple[Tensor, ...],
        how: tuple[Packing | Recipe, ...],
        parts: tuple[list[Tensor], ...],
        exact: list[Tensor],
        row: int,
    ) -> None:
        # Masks and window offsets come packed in bytes; what is exact in floats is as PyTorch has it.
        packed = [tensor for tensor in exact if tensor.dtype is torch.uint8]
        for packing, stored in zip(how, parts, strict=True):
            if isinstance(packing, Recipe):  # its parts are the producer's
                self.derived[_unnumbered(layer), _unnumbered(packing.layer)] += 1
            elif packing.packed:
                packed += stored
        for part in packed:
            self._packed[part.untyped_storage()._cdata] = weakref.ref(part.untyped_storage())
        # A hook first says that autograd saves the tensor, and then that it is encoded.
        if len(lossy) == 1 and lossy[0] is self._newest:
            del self._saved[lossy[0].untyped_storage()._cdata]

    def backward(self, replay: Replay) -> None:
        """Nothing is decoded in a forward."""

    def asked(self, layer: str, tensors: Any) -> None:
        """What a call goes by is no matter here."""

    def unpacked(self, layer: str, tensor: Tensor) -> Tensor:
        return tensor
