"""Fake tensors, faster: what an operation makes of tensors of a geometry is asked of PyTorch once.

What is hard: PyTorch's own cache takes 0.2 ms per operation, and a step of 32 layers has ten thousand. Here a
result is made again from its sizes alone if all arguments have the geometry of an earlier call, and what it
made then was a new storage, a view of an argument, or an argument itself.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from mesa_tune.ops.flags import BytesOnly
from mesa_tune.workload.fake_results import corrected

_CPU = torch.device("cpu")
_DEVICE = torch.ops.prim.device.default
_ATOMS = (str, torch.dtype, torch.layout, torch.device, torch.memory_format)


class _Made(NamedTuple):
    """Geometry of one result, and the argument that it is (`same`) or whose storage it views (`base`)."""

    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    offset: int = 0
    dtype: torch.dtype = torch.float32
    same: int | None = None
    base: int | None = None


_UNKNOWN = _Made(same=-1)


class _NoKeyError(Exception):
    """An argument is of a kind that no key can name."""


class FastFakes(BytesOnly):
    """`BytesOnly` that remembers what operations make."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[Any, tuple[type | None, list[_Made | None]]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return (
            False  # nothing compiles a step of fake tensors, and PyTorch's guard costs a microsecond per call
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation on fake tensors."""
        if func is _DEVICE:  # more than half of all calls
            return args[0].device
        tensors: list[FakeTensor] = []
        try:
            key = func, torch.get_default_dtype(), _key(args, tensors), _key(kwargs or {}, tensors)
        except _NoKeyError:
            return self._made(func, types, args, kwargs or {})
        if key in self._known:
            kind, made = self._known[key]
            results = [None if part is None else self._again(part, tensors) for part in made]
            return results[0] if kind is None else kind(results)
        result = self._made(func, types, args, kwargs or {})
        if torch.Tag.inplace_view not in func.tags:
            self._remember(key, result, tensors)
        return result

    def _made(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        return corrected(func, args, result)

    def _again(self, made: _Made, tensors: list[FakeTensor]) -> Tensor:
        if made.same is not None:
            return tensors[made.same]
        if made.base is None:
            meta = torch.empty_strided(made.shape, made.stride, dtype=made.dtype, device="meta")
        else:
            storage = tensors[made.base].untyped_storage()
            meta = torch.empty(0, dtype=made.dtype, device="meta")
            meta.set_(storage, made.offset, made.shape, made.stride)
        return FakeTensor(self, meta, _CPU)

    def _remember(self, key: Any, result: Any, tensors: list[FakeTensor]) -> None:
        """Remember how to make `result` again, if it can be told: not where arguments share a storage."""
        kind = (tuple if isinstance(result, tuple) else list) if isinstance(result, (tuple, list)) else None
        parts: list[Any] = [result] if kind is None else list(result)
        made = [_described(part, tensors) for part in parts]
        new = [part for part, one in zip(parts, made, strict=True) if _is_new(one)]
        storages = {tensor.untyped_storage()._cdata for tensor in (*tensors, *new)}
        if _UNKNOWN not in made and len(storages) == len(tensors) + len(new):
            self._known[key] = kind, made


def _key(value: Any, tensors: list[FakeTensor]) -> Any:
    """Return a key of an argument; add its tensors to `tensors`. Raise _NoKeyError if there is none."""
    if isinstance(value, FakeTensor):
        if not _is_plain(value):
            raise _NoKeyError
        tensors.append(value)
        return value.shape, value.stride(), value.storage_offset(), value.dtype
    if value is None or isinstance(value, _ATOMS):
        return value
    if isinstance(value, (bool, int, float)):
        return type(value), value
    if isinstance(value, (tuple, list)):
        return tuple([_key(part, tensors) for part in value])
    if isinstance(value, dict):
        return tuple([(name, _key(part, tensors)) for name, part in value.items()])
    raise _NoKeyError


def _is_plain(tensor: FakeTensor) -> bool:
    """Return whether the geometry tells all of a tensor: no value is known, and no bit conjugates it."""
    strided = tensor.layout is torch.strided and not tensor.dtype.is_complex
    return strided and tensor.constant is None and tensor.device == _CPU


def _is_new(made: _Made | None) -> bool:
    return made is not None and made.same is None and made.base is None


def _described(result: Any, tensors: list[FakeTensor]) -> _Made | None:
    """Return how to make a result again: `_UNKNOWN` if that cannot be told, None for None."""
    if result is None:
        return None
    if not isinstance(result, FakeTensor) or not _is_plain(result):
        return _UNKNOWN
    storage = result.untyped_storage()
    made = _Made(tuple(result.shape), result.stride(), int(result.storage_offset()), result.dtype)
    for index, tensor in enumerate(tensors):
        if tensor is result:
            return _Made(same=index)
        if tensor.untyped_storage()._cdata == storage._cdata:
            return made._replace(base=index)
    whole = torch.empty_strided(made.shape, made.stride, dtype=made.dtype, device="meta")
    is_whole = made.offset == 0 and whole.untyped_storage().nbytes() == storage.nbytes()
    return made if is_whole else _UNKNOWN
