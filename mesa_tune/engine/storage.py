"""Storing a tensor for backward: how is decided once per geometry; an equal copy is stored once (Rule 3)."""

from collections.abc import Hashable, Sequence
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mesa_tune import ops
from mesa_tune.codecs import CODECS, Memory, Spec
from mesa_tune.engine.registry import file, filed, once
from mesa_tune.engine.tensors import views_large_storage
from mesa_tune.notice import warn_once
from mesa_tune.ops.flags import none_set
from mesa_tune.ops.fused import MASK_GRAD
from mesa_tune.ops.maps import Deferred
from mesa_tune.ops.reference import channels_of


class Packing(NamedTuple):
    """How one tensor of this shape and dtype is stored, as `parts` tensors, and restored.

    `packed`: by the codec; else it is saved as it is, or, if `copied`, as a copy out of a large storage.
    `deferred`: the codec computes it while encoding. `strides`: it is packed in the order of memory, and
    restored in this layout. `expanded`: the shape to which it was expanded; then only the elements at `core`
    are stored. `numel` elements are stored. Packed they take `bytes` (None: too few elements to pack), unless
    the codec has a reason for a `refusal`. `copy_key`: key by which layers find an equal copy. `width`:
    elements per row, where rows may be left out; else 0.
    """

    packed: bool
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: int = 1
    copied: bool = False
    deferred: bool = False
    strides: tuple[int, ...] | None = None
    expanded: tuple[int, ...] | None = None
    core: tuple[slice, ...] | None = None
    numel: int = 0
    bytes: int | None = None
    refusal: str | None = None
    copy_key: tuple[Any, ...] = ()
    width: int = 0

    def in_parts(self, count: int) -> "Packing":
        """Return the packing with this number of parts."""
        return self if self.parts == count else self._replace(parts=count)


_PACK_BITS = torch.ops.mesa_tune.pack_bits.default
_PACK_ZERO_ROWS = torch.ops.mesa_tune.pack_zero_rows.default
_CACHED_PACKINGS = 1 << 12
_packings: dict[Any, Packing] = {}
_numbers: dict[Spec, int] = {}
"""A number for every spec, which is compared faster; specs that share copies have the same."""
_next_number = count()


def as_is(shape: Sequence[int], dtype: torch.dtype) -> Packing:
    """Return the packing of a tensor that is saved as it is."""
    return Packing(False, tuple(shape), dtype)


def packing_of(tensor: Tensor | Deferred, spec: Spec) -> Packing:
    """Return how a tensor of this geometry is stored under `spec`; see `decided` for the rest."""
    if isinstance(tensor, Deferred):
        return _deferred_packing(tensor, spec)
    if torch.compiler.is_compiling():
        return _packing(tensor, spec)
    geometry = (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, spec)
    packing = _packings.get(geometry)
    if packing is None:
        if len(_packings) >= _CACHED_PACKINGS:
            _packings.clear()
        packing = _packings[geometry] = _packing(tensor, spec)
    return packing


def _packing(tensor: Tensor, spec: Spec) -> Packing:
    expanded = core = None
    if 0 in tensor.stride():
        expanded = tuple(tensor.shape)
        core = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())
        tensor = tensor[core]
    numel, shape, strides = tensor.numel(), tuple(tensor.shape), tuple(tensor.stride())
    packed_bytes = why = None
    if tensor.is_floating_point() and numel > spec.min_elements:
        packed_bytes = CODECS[spec.codec].packed_bytes(shape, spec, tensor.element_size())
        why = refusal(tensor, spec)
    smaller = packed_bytes is not None and packed_bytes < numel * tensor.element_size()
    packed = smaller and spec.levels > 0 and why is None
    in_memory_order = packed and _is_in_memory_order(tensor, spec)
    traced = torch.compiler.is_compiling()
    number = _number(spec) if packed and not traced else -1
    return Packing(
        packed,
        shape,
        tensor.dtype,
        parts=2 if packed else 1,
        strides=strides if in_memory_order and not tensor.is_contiguous() else None,
        expanded=expanded,
        core=core,
        numel=numel,
        bytes=packed_bytes,
        refusal=why,
        copy_key=(numel if in_memory_order else (shape, strides), tensor.dtype, number),
        width=shape[spec.axis] if spec.axis and len(shape) > 1 else 0,
    )


def refusal(tensor: Tensor, spec: Spec) -> str | None:
    """Return why `tensor` cannot be stored by `spec`; None if it can.

    A codec whose limits differ from the quantizer's has a function `refuses(tensor, spec)` of its own.
    """
    refuses = getattr(CODECS[spec.codec], "refuses", None)
    if refuses is not None:
        return str(reason) if (reason := refuses(tensor, spec)) else None
    if tensor.dtype not in ops.DTYPES:
        return f"its dtype is {tensor.dtype}"
    if spec.quant_groups:
        _, extent = channels_of(tensor.shape)
        if extent % spec.quant_groups:
            return f"quant_groups {spec.quant_groups} does not divide {extent}"
    return None


def _number(spec: Spec) -> int:
    if spec not in _numbers:
        _numbers[spec] = _numbers.setdefault(spec.alone, next(_next_number))
    return _numbers[spec]


def _is_in_memory_order(tensor: Tensor, spec: Spec) -> bool:
    """Return whether groups follow the order of memory, so that all dense views of a storage share a copy."""
    if spec.codec != "quantize" or spec.quant_groups:
        return False
    # A recipe (`store: derive`) contains the shape of what was saved, not its layout.
    return tensor.is_contiguous() or (not spec.exposes and _is_dense(tensor))


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill a part of the memory, each in a place of its own."""
    if torch.compiler.is_compiling():
        return tensor.permute(_outermost_first(tensor.stride())).is_contiguous()
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def _outermost_first(strides: Sequence[int]) -> list[int]:
    """Return the dimensions in the order of their strides, the largest first."""
    return sorted(range(len(strides)), key=lambda dim: -strides[dim])


def _deferred_packing(deferred: Deferred, spec: Spec) -> Packing:
    packing = packing_of(deferred.source, spec)
    if deferred.kind == "definite":
        possible = packing.core is None
    else:
        possible = hasattr(CODECS[spec.codec], "encode_deferred")
    return packing._replace(deferred=True) if packing.packed and possible else packing


def is_packed(tensor: Tensor, spec: Spec, layer: str, element_size: int | None = None) -> bool:
    """Return whether `tensor` of `layer` is packed under `spec`; warn if the codec refuses it.

    It must be smaller packed than with `element_size` bytes per element.
    """
    packing = packing_of(tensor, spec)
    size = tensor.element_size() if element_size is None else element_size
    if packing.bytes is None or packing.bytes >= packing.numel * size:
        return False
    warn_of_refusal(packing, layer)
    return packing.refusal is None


def warn_of_refusal(packing: Packing, layer: str) -> None:
    """Warn if the codec refuses a tensor of `layer` (Rule 9): of a dtype that none takes, once for all."""
    if packing.refusal is not None and packing.dtype not in ops.DTYPES:
        warn_once(
            f"mesa-tune: tensors of {packing.dtype} stay uncompressed: only those of float32 and 16 bits are."
        )
    elif packing.refusal is not None:
        warn_once(f"mesa-tune: {layer!r} keeps a tensor uncompressed: {packing.refusal}.")


def decided(tensor: Tensor | Deferred, spec: Spec, layer: str = "", exact: bool = False) -> Packing:
    """Return how `tensor` of `layer` is stored: as it is (always if `exact`), packed, or copied."""
    if exact and isinstance(tensor, Tensor):
        return as_is(tensor.shape, tensor.dtype)
    packing = packing_of(tensor, spec)
    warn_of_refusal(packing, layer)
    copied = isinstance(tensor, Tensor) and is_too_small(tensor, spec) and views_large_storage(None, tensor)
    return packing._replace(copied=True) if copied else packing


def is_too_small(tensor: Tensor, spec: Spec) -> bool:
    """Return whether `tensor` could be packed if it had more elements."""
    return packing_of(tensor, spec).bytes is None and tensor.is_floating_point()


def store(
    tensor: Tensor | Deferred,
    packing: Packing,
    spec: Spec,
    key: Tensor,
    memory: Memory | None = None,
    *,
    zero_rows: list[Tensor] | None = None,
) -> list[Tensor]:
    """Return what to save for `tensor`, as `packing` says: packed parts, a copy, or itself.

    Append `pack_zero_rows` of the tensor to `zero_rows`, if given.
    """
    if isinstance(tensor, Deferred):
        if packing.deferred:
            return _store_deferred(tensor, packing, spec, key, memory)
        tensor = tensor.make()
    if zero_rows is not None:
        return _store_with_rows(tensor, packing, spec, key, memory, zero_rows)
    if packing.core is not None:
        tensor = tensor[packing.core]
    if not packing.packed:
        return once(tensor, packing.copy_key, lambda: [tensor.clone()]) if packing.copied else [tensor]
    encode = CODECS[spec.codec].encode
    if torch.compiler.is_compiling():  # the compiler merges equal functional ops
        return encode(_in_memory_order(tensor, packing), spec, key)
    return once(tensor, packing.copy_key, encode, _in_memory_order(tensor, packing), spec, key, memory)


def _packs_rows(tensor: Tensor, packing: Packing, spec: Spec) -> bool:
    """Return whether one op is to pack the tensor and which rows are zero: if neither is there already."""
    row_major = packing.packed and packing.core is None and packing.strides is None and not spec.quant_groups
    if not (row_major and hasattr(CODECS[spec.codec], "encode_rows")):
        return False
    return torch.compiler.is_compiling() or not (
        filed(tensor, packing.copy_key) or filed(tensor, _rows_key(tensor))
    )


def _store_with_rows(
    tensor: Tensor,
    packing: Packing,
    spec: Spec,
    key: Tensor,
    memory: Memory | None,
    zero_rows: list[Tensor],
) -> list[Tensor]:
    if not _packs_rows(tensor, packing, spec):
        zero_rows.append(pack_zero_rows(tensor))
        return store(tensor, packing, spec, key, memory)
    codec: Any = CODECS[spec.codec]
    parts: list[Tensor]
    *parts, rows = codec.encode_rows(tensor, spec, key)
    zero_rows.append(rows)
    if not torch.compiler.is_compiling():
        file(tensor, packing.copy_key, parts)
        file(tensor, _rows_key(tensor), [rows])
    return parts


def _in_memory_order(tensor: Tensor, packing: Packing) -> Tensor:
    if packing.strides is None:
        return tensor
    if torch.compiler.is_compiling():  # the compiler knows no strides, only values
        return tensor.permute(_outermost_first(packing.strides)).flatten()
    return tensor.as_strided((packing.numel,), (1,))


def _in_own_order(run: Tensor, packing: Packing) -> Tensor:
    """Return the tensor whose elements `run` has in the order of their memory."""
    assert packing.strides is not None
    if not torch.compiler.is_compiling():
        return run.as_strided(packing.shape, packing.strides)
    order = _outermost_first(packing.strides)
    dense = run.view([packing.shape[dim] for dim in order])
    return dense.permute([order.index(dim) for dim in range(len(order))])


def _store_deferred(
    deferred: Deferred, packing: Packing, spec: Spec, key: Tensor, memory: Memory | None
) -> list[Tensor]:
    codec: Any = CODECS[spec.codec]
    if deferred.kind != "definite":
        parts: list[Tensor] = codec.encode_deferred(deferred, spec, key)
        return parts
    # Layers that save the source itself share the copy: only NaN elements differ.
    source = deferred.source
    if packing.strides is not None:
        deferred = deferred._replace(source=_in_memory_order(source, packing))
    if hasattr(codec, "encode_deferred"):
        return once(source, packing.copy_key, codec.encode_deferred, deferred, spec, key)
    return once(source, packing.copy_key, lambda: codec.encode(deferred.made(), spec, key, memory))


def restore(parts: Sequence[Tensor], packing: Packing, spec: Spec) -> Tensor:
    """Return the saved tensor: bitwise if it was saved as it is, as decoded otherwise."""
    if packing.strides is not None:
        run = CODECS[spec.codec].decode(parts, (packing.numel,), packing.dtype, spec)
        tensor = _in_own_order(run, packing)
    elif packing.packed:
        tensor = CODECS[spec.codec].decode(parts, packing.shape, packing.dtype, spec)
    else:
        tensor = parts[0]
    return tensor if packing.expanded is None else tensor.expand(packing.expanded)


def pack_once(mask: Tensor) -> Tensor:
    """Return the bits of `mask`, packed once however many layers save them."""
    if torch.compiler.is_compiling():
        return ops.pack_bits(mask)
    return once(mask, ("bits", mask.shape, mask.stride()), lambda: [_PACK_BITS(mask)])[0]


def pack_zero_rows(x: Tensor) -> Tensor:
    """Return which rows of `x`, along its last dimension, are zero: one bit per row, packed once.

    Rows of zeros (padding, windows) have to stay zeros where groups reach over rows. The gradient that such
    a row meets may be as large as it likes, and times zero it is zero: behind it `normalize` divides by ε, a
    norm before it multiplies by 1 / √ε.
    """
    if torch.compiler.is_compiling():
        return _zero_rows(x)[0]
    return once(x, _rows_key(x), _zero_rows, x)[0]


def _rows_key(x: Tensor) -> Hashable:
    return "zero rows", x.shape, x.stride()


def _zero_rows(x: Tensor) -> list[Tensor]:
    return [_PACK_ZERO_ROWS(x) if x.dtype in ops.DTYPES else ops.reference.pack_zero_rows(x)]


def without_zero_rows(grad: Tensor, zero_rows: Tensor) -> Tensor:
    """Return `grad` with 0 in the rows that the packed bits mark; `grad` itself where they mark none."""
    if none_set(zero_rows):
        return grad
    if grad.dtype in ops.DTYPES and grad.numel():
        masked: Tensor = MASK_GRAD(grad, zero_rows, 0.0, grad.shape[-1])
        return masked
    return grad.masked_fill(ops.unpack_bits(zero_rows, grad.shape[:-1]).unsqueeze(-1), 0)
