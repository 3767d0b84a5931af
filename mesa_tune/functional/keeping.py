"""Storing a tensor for backward, once however many layers keep it (Rules 2 and 3).

The hard part is never to hand out a stale copy: an address is reused as soon as a tensor dies, and an in-
place operation changes a tensor without moving it. A copy is therefore found by storage *and* version, and
only while both the storage and the packed parts are alive.
"""

import math
import threading
import weakref
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from mesa_tune import ops
from mesa_tune.codecs import CODECS, Memory, Spec, refusal
from mesa_tune.maps import Mapped
from mesa_tune.notice import warn_once
from mesa_tune.settings import SCRAP


class Meta(NamedTuple):
    """How to rebuild a kept tensor from its parts; `coded` False: the part is the tensor itself.

    `strides`: it was encoded in the order of memory, and comes back in its layout.
    """

    parts: int
    coded: bool
    shape: tuple[int, ...]
    dtype: torch.dtype
    expanded: tuple[int, ...] | None
    strides: tuple[int, ...] | None = None


_FIRST_LIMIT = 1024


class _Copies(threading.local):
    def __init__(self) -> None:
        self.known: dict[Any, tuple[StorageWeakRef, list[weakref.ref[Tensor]]]] = {}
        self.limit = _FIRST_LIMIT

    def purge(self) -> None:
        """Drops copies of dead tensors, now and then: layers that stand alone never begin an outermost
        forward.
        """
        if len(self.known) >= self.limit:
            self.known = {place: copy for place, copy in self.known.items() if not copy[0].expired()}
            self.limit = max(_FIRST_LIMIT, 2 * len(self.known))


_copies = _Copies()


def forget_copies() -> None:
    """Empties the table of known copies; called when an outermost forward begins."""
    _copies.known.clear()


def keep(
    tensor: Tensor | Mapped,
    spec: Spec,
    key: Tensor,
    raw: bool,
    layer: str = "",
    memory: Memory | None = None,
) -> tuple[list[Tensor], Meta]:
    """What to save for `tensor` of `layer`: its encoded parts; a copy if it is a scrap; or itself when `raw`,
    small, or no smaller encoded. One that the codec `encodes` while it is made is made by it.
    """
    if isinstance(tensor, Mapped):
        return _keep_mapped(tensor, spec, key)
    if raw:
        return [tensor], Meta(1, False, tuple(tensor.shape), tensor.dtype, None)
    expanded = None
    if 0 in tensor.stride():
        expanded = tuple(tensor.shape)
        tensor = tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]
    coded = spec.levels > 0 and is_encoded(tensor, spec, layer)
    strides = None
    if coded:
        as_run = _is_one_run(tensor, spec)
        strides = tuple(tensor.stride()) if as_run and not tensor.is_contiguous() else None
        parts = _encode_once(tensor, spec, key, memory, as_run)
    elif is_scrap(tensor, spec):
        parts = _once(tensor, (tensor.shape, tensor.stride()), None, lambda: [tensor.clone()])
    else:
        parts = [tensor]
    return parts, Meta(len(parts), coded, tuple(tensor.shape), tensor.dtype, expanded, strides)


def encodes(mapped: Mapped, spec: Spec, layer: str) -> bool:
    """Whether the codec makes `mapped` of `layer` while encoding it."""
    possible = hasattr(CODECS[spec.codec], "encode_mapped") and spec.levels > 0
    return possible and is_encoded(mapped.source, spec, layer)


def _keep_mapped(mapped: Mapped, spec: Spec, key: Tensor) -> tuple[list[Tensor], Meta]:
    parts: list[Tensor] = CODECS[spec.codec].encode_mapped(mapped, spec, key)  # type: ignore[attr-defined]
    return parts, Meta(len(parts), True, tuple(mapped.source.shape), mapped.source.dtype, None)


def _is_one_run(tensor: Tensor, spec: Spec) -> bool:
    """Whether groups may follow the order of memory, so that all dense views of a storage share a copy."""
    if torch.compiler.is_compiling() or spec.codec != "quantize" or spec.quant_groups:
        return False
    # Who makes an output again knows the shape of what is kept, not its layout.
    return tensor.is_contiguous() or (
        not spec.serves and bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))
    )


def _run(tensor: Tensor) -> Tensor:
    """The elements in the order of memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def is_encoded(tensor: Tensor, spec: Spec, layer: str, element_size: int | None = None) -> bool:
    """Whether `tensor` of `layer` is encoded under `spec`: large enough, smaller so than in `element_size`
    bytes an element, and of a kind that the codec can take, else it says so.
    """
    if tensor.numel() <= spec.min_elements:
        return False
    judge = _gets_smaller if torch.compiler.is_compiling() else _known_to_get_smaller
    if not judge(tensor.shape, tensor.dtype, spec, element_size):
        return False
    why = refusal(tensor, spec)
    if why is not None:
        warn_once(f"mesa-tune: {layer!r} keeps a tensor uncompressed: {why}.")
    return why is None


def _gets_smaller(shape: torch.Size, dtype: torch.dtype, spec: Spec, element_size: int | None) -> bool:
    if not dtype.is_floating_point:
        return False
    own = dtype.itemsize
    size = own if element_size is None else element_size
    return CODECS[spec.codec].packed_bytes(shape, spec, own) < math.prod(shape) * size


_known_to_get_smaller = lru_cache(maxsize=1 << 12)(_gets_smaller)


def is_scrap(tensor: Tensor, spec: Spec) -> bool:
    """Whether `tensor` is too small to encode but a view of a large storage, all of which it would hold."""
    if torch.compiler.is_compiling() or not tensor.is_floating_point():
        return False
    size = tensor.numel() * tensor.element_size()
    return 0 < tensor.numel() <= spec.min_elements and size * SCRAP <= tensor.untyped_storage().nbytes()


def restore(parts: list[Tensor], meta: Meta, spec: Spec) -> Tensor:
    """The kept tensor: bitwise if it was kept raw, as decoded otherwise."""
    if meta.strides is not None:
        run = CODECS[spec.codec].decode(parts, (torch.Size(meta.shape).numel(),), meta.dtype, spec)
        tensor = run.as_strided(meta.shape, meta.strides)
    else:
        tensor = CODECS[spec.codec].decode(parts, meta.shape, meta.dtype, spec) if meta.coded else parts[0]
    return tensor if meta.expanded is None else tensor.expand(meta.expanded)


def _encode_once(
    tensor: Tensor, spec: Spec, key: Tensor, memory: Memory | None, as_run: bool
) -> list[Tensor]:
    if torch.compiler.is_compiling():  # equal functional ops are merged by the compiler
        return CODECS[spec.codec].encode(tensor, spec, key)
    geometry = (tensor.numel(), 1) if as_run else (tensor.shape, tensor.stride())
    given = _run(tensor) if as_run and not tensor.is_contiguous() else tensor
    return _once(tensor, geometry, spec.alone, lambda: CODECS[spec.codec].encode(given, spec, key, memory))


def pack_once(mask: Tensor) -> Tensor:
    """The bits of `mask`, packed once however many layers keep them."""
    if torch.compiler.is_compiling():
        return ops.pack_bits(mask)
    return _once(mask, (mask.shape, mask.stride()), None, lambda: [ops.pack_bits(mask)])[0]


def _once(
    tensor: Tensor, geometry: tuple[Any, Any], spec: Spec | None, make: Callable[[], list[Tensor]]
) -> list[Tensor]:
    """What `make` makes of `tensor`, or made of it before; `geometry` and `spec` say what that depends on."""
    storage = tensor.untyped_storage()
    place = (storage._cdata, tensor._version, tensor.storage_offset(), geometry, tensor.dtype, spec)
    found = _copies.known.get(place)
    if found is not None and not found[0].expired():
        parts = [reference() for reference in found[1]]
        if not [part for part in parts if part is None]:  # `None in parts` would ask the tensors
            return parts  # type: ignore[return-value]
    fresh = make()
    _copies.purge()
    _copies.known[place] = (StorageWeakRef(storage), [weakref.ref(part) for part in fresh])
    return fresh
