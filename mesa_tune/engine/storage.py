"""Storing a tensor for backward, once however many layers keep it (Rules 2 and 3).

The hard part is never to hand out a stale copy: an address is reused as soon as a tensor dies, and an in-
place operation changes a tensor without moving it. A copy is therefore found by storage *and* version, and
only while both the storage and the packed parts are alive.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

from mesa_tune import ops
from mesa_tune.codecs import CODECS, Memory, Spec, refusal
from mesa_tune.notice import warn_once
from mesa_tune.ops.maps import Mapped
from mesa_tune.policy.settings import SCRAP


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


class Way(NamedTuple):
    """How tensors of one shape, strides, dtype and device are stored under one spec.

    `numel` and `encoded` (bytes; None: too small, or no number of ours) are those of what is there: of an
    expanded tensor its part `one`. `refused`: why the codec cannot take it; `coded`: that it is encoded.
    `scrap`: a storage of so many bytes is not held for it. `copy`: what of all that an equal copy depends on.
    `meta` counts the parts that most codecs make; `traced`: for traced code.
    """

    numel: int
    encoded: int | None
    refused: str | None
    coded: bool
    scrap: int | None
    one: tuple[slice, ...] | None
    copy: tuple[Any, ...]
    meta: Meta
    traced: bool


_KNOWN_WAYS = 1 << 12
_ways: dict[Any, Way] = {}
_numbers: dict[Spec, int] = {}
"""A number for every spec, which is compared faster."""
_next_number = count()


def way_of(tensor: Tensor, spec: Spec) -> Way:
    """How `tensor` is stored under `spec`; asked once for all that are alike."""
    if torch.compiler.is_compiling():
        return _way(tensor, spec)
    alike = (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, spec)
    way = _ways.get(alike)
    if way is None:
        if len(_ways) >= _KNOWN_WAYS:
            _ways.clear()
        way = _ways[alike] = _way(tensor, spec)
    return way


def _way(tensor: Tensor, spec: Spec) -> Way:
    expanded = one = None
    traced = torch.compiler.is_compiling()
    if 0 in tensor.stride():
        expanded = tuple(tensor.shape)
        one = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())
        tensor = tensor[one]
    numel, floating = tensor.numel(), tensor.is_floating_point()
    whole = numel * tensor.element_size()
    encoded = refused = scrap = None
    if floating and numel > spec.min_elements:
        encoded = CODECS[spec.codec].packed_bytes(tensor.shape, spec, tensor.element_size())
        refused = refusal(tensor, spec)
    elif floating and numel > 0 and not traced:
        scrap = whole * SCRAP
    coded = spec.levels > 0 and encoded is not None and encoded < whole and refused is None
    run = coded and _is_one_run(tensor, spec)
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    alone = _numbers.setdefault(spec.alone, next(_next_number)) if coded and not traced else -1
    copy = (numel if run else (shape, strides), tensor.dtype, alone)
    laid_out = strides if run and not tensor.is_contiguous() else None
    meta = Meta(2 if coded else 1, coded, shape, tensor.dtype, expanded, laid_out)
    return Way(numel, encoded, refused, coded, scrap, one, copy, meta, traced)


def _is_one_run(tensor: Tensor, spec: Spec) -> bool:
    """Whether groups may follow the order of memory, so that all dense views of a storage share a copy."""
    if torch.compiler.is_compiling() or spec.codec != "quantize" or spec.quant_groups:
        return False
    # Who makes an output again knows the shape of what is kept, not its layout.
    return tensor.is_contiguous() or (
        not spec.serves and bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))
    )


def is_encoded(tensor: Tensor, spec: Spec, layer: str, element_size: int | None = None) -> bool:
    """Whether `tensor` of `layer` is encoded under `spec`: large enough, smaller so than in `element_size`
    bytes an element, and of a kind that the codec can take, else it says so.
    """
    way = way_of(tensor, spec)
    if way.coded and element_size is None:
        return True
    size = tensor.element_size() if element_size is None else element_size
    if way.encoded is None or not way.encoded < way.numel * size:
        return False
    if way.refused is not None:
        warn_once(f"mesa-tune: {layer!r} keeps a tensor uncompressed: {way.refused}.")
    return way.refused is None


def is_scrap(tensor: Tensor, spec: Spec) -> bool:
    """Whether `tensor` is too small to encode but a view of a large storage, all of which it would hold."""
    scrap = way_of(tensor, spec).scrap
    return scrap is not None and scrap <= tensor.untyped_storage().nbytes()


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
        return _keep_mapped(tensor, spec, key, memory)
    if raw:
        return [tensor], Meta(1, False, tensor.shape, tensor.dtype, None)
    way = way_of(tensor, spec)
    if way.one is not None:
        tensor = tensor[way.one]
    if way.coded:
        parts = _encode_once(tensor, spec, key, memory, way)
        return parts, _counted(way.meta, len(parts))
    if way.refused is not None:
        is_encoded(tensor, spec, layer)  # which says why not
    if way.scrap is not None and is_scrap(tensor, spec):
        return _once(tensor, way.copy, _cloned, tensor), way.meta
    return [tensor], way.meta


def keep_again(
    lossy: Sequence[Tensor | Mapped], ways: Sequence[Way | None], spec: Spec, key: Tensor
) -> list[Tensor]:
    """What `keep` saves for each, if it goes its way, or (None) stays as it is or is made by the codec."""
    saved: list[Tensor] = []
    for tensor, way in zip(lossy, ways, strict=True):
        if isinstance(tensor, Mapped) and tensor.kind == "definite":
            saved += _encode_definite(tensor, spec, key, None)
        elif way is not None:
            made = tensor.make() if isinstance(tensor, Mapped) else tensor
            saved += _encode_once(made, spec, key, None, way)
        elif isinstance(tensor, Mapped):
            saved += CODECS[spec.codec].encode_mapped(tensor, spec, key)  # type: ignore[attr-defined]
        else:
            saved.append(tensor)
    return saved


def _counted(meta: Meta, parts: int) -> Meta:
    """`meta` with that many parts."""
    return meta if meta.parts == parts else Meta(parts, *meta[1:])


def _encode_once(tensor: Tensor, spec: Spec, key: Tensor, memory: Memory | None, way: Way) -> list[Tensor]:
    encode = CODECS[spec.codec].encode
    if way.traced:  # equal functional ops are merged by the compiler
        return encode(tensor, spec, key)
    given = tensor if way.meta.strides is None else tensor.as_strided((way.numel,), (1,))
    return _once(tensor, way.copy, encode, given, spec, key, memory)


def encodes(mapped: Mapped, spec: Spec, layer: str) -> bool:
    """Whether the codec makes `mapped` of `layer` while encoding it."""
    if mapped.kind == "definite":
        way = way_of(mapped.source, spec)
        return way.coded and way.one is None
    possible = hasattr(CODECS[spec.codec], "encode_mapped") and spec.levels > 0
    return possible and is_encoded(mapped.source, spec, layer)


def _keep_mapped(mapped: Mapped, spec: Spec, key: Tensor, memory: Memory | None) -> tuple[list[Tensor], Meta]:
    if mapped.kind == "definite":
        parts = _encode_definite(mapped, spec, key, memory)
        return parts, _counted(way_of(mapped.source, spec).meta, len(parts))
    parts = CODECS[spec.codec].encode_mapped(mapped, spec, key)  # type: ignore[attr-defined]
    return parts, Meta(len(parts), True, mapped.source.shape, mapped.source.dtype, None)


def _encode_definite(mapped: Mapped, spec: Spec, key: Tensor, memory: Memory | None) -> list[Tensor]:
    """The parts of a tensor without its NaN; whoever saves the tensor itself shares them."""
    codec, source = CODECS[spec.codec], mapped.source
    way = way_of(source, spec)
    if way.meta.strides is not None:
        mapped = mapped._replace(source=source.as_strided((way.numel,), (1,)))
    made_inside = getattr(codec, "encode_mapped", None)
    if made_inside is not None:
        return _once(source, way.copy, made_inside, mapped, spec, key)
    return _once(source, way.copy, _encode_made, mapped, spec, key, memory)


def _encode_made(mapped: Mapped, spec: Spec, key: Tensor, memory: Memory | None) -> list[Tensor]:
    return CODECS[spec.codec].encode(mapped.made(), spec, key, memory)


def pack_once(mask: Tensor) -> Tensor:
    """The bits of `mask`, packed once however many layers keep them."""
    if torch.compiler.is_compiling():
        return ops.pack_bits(mask)
    return _once(mask, (mask.shape, mask.stride()), _packed, mask)[0]


def pack_zero_rows(x: Tensor) -> Tensor:
    """Which rows of `x`, along its last dimension, are zero: a bit each, packed once for all that ask."""
    if torch.compiler.is_compiling():
        return _zero_rows(x)[0]
    return _once(x, ("zero rows", x.shape, x.stride()), _zero_rows, x)[0]


def _zero_rows(x: Tensor) -> list[Tensor]:
    return [ops.pack_bits(torch.linalg.vector_norm(x, torch.inf, -1) == 0)]


def _packed(mask: Tensor) -> list[Tensor]:
    return [ops.pack_bits(mask)]


def _cloned(tensor: Tensor) -> list[Tensor]:
    return [tensor.clone()]


class _Copies(threading.local):
    def __init__(self) -> None:
        self.known: dict[Any, tuple[weakref.ref[UntypedStorage], list[weakref.ref[Tensor]]]] = {}
        self.limit = _FIRST_LIMIT

    def purge(self) -> None:
        """Drops copies of dead tensors, now and then: layers that stand alone never begin an outermost
        forward.
        """
        self.known = {place: copy for place, copy in self.known.items() if copy[0]() is not None}
        self.limit = max(_FIRST_LIMIT, 2 * len(self.known))


_FIRST_LIMIT = 1024
_SELECTIVE = (_CachingTorchDispatchMode, _CachedTorchDispatchMode)
_copies = _Copies()


def forget_copies() -> None:
    """Empties the table of known copies; called when an outermost forward begins."""
    _copies.known.clear()


def _is_selective() -> bool:
    """Whether selective checkpointing records the operators that run, or plays them back by their count.

    Both runs of a part must then make the same operators: none is saved by a copy that only one run finds.
    """
    if not torch._C._len_torch_dispatch_stack():
        return False
    return any(isinstance(mode, _SELECTIVE) for mode in _get_current_dispatch_mode_stack())


def _once(tensor: Tensor, what: Any, make: Callable[..., list[Tensor]], *given: Any) -> list[Tensor]:
    """What `make(*given)` makes of `tensor`, or made of it before; `what` says what that depends on."""
    if _is_selective():
        return make(*given)
    copies, storage = _copies, tensor.untyped_storage()
    place = (storage._cdata, tensor._version, tensor.storage_offset(), what)
    found = copies.known.get(place)
    if found is not None and found[0]() is storage:
        parts = [reference() for reference in found[1]]
        if not [part for part in parts if part is None]:  # `None in parts` would ask the tensors
            return parts  # type: ignore[return-value]
    fresh = make(*given)
    if len(copies.known) >= copies.limit:
        copies.purge()
    copies.known[place] = (weakref.ref(storage), [weakref.ref(part) for part in fresh])
    return fresh


def restore(parts: Sequence[Tensor], meta: Meta, spec: Spec) -> Tensor:
    """The kept tensor: bitwise if it was kept raw, as decoded otherwise."""
    if meta.strides is not None:
        run = CODECS[spec.codec].decode(parts, (torch.Size(meta.shape).numel(),), meta.dtype, spec)
        tensor = run.as_strided(meta.shape, meta.strides)
    else:
        tensor = CODECS[spec.codec].decode(parts, meta.shape, meta.dtype, spec) if meta.coded else parts[0]
    return tensor if meta.expanded is None else tensor.expand(meta.expanded)
