"""Moving, counting and slicing batches. A batch is whatever the user's loss takes: tensors in containers."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from mesa_tune.errors import RunError, WorkloadError


def to_device(batch: Any, device: str, origin: str = "batch()") -> Any:
    """Return a copy of `batch` with every tensor on `device` and containers of the same types.

    Mappings, lists, tuples, named tuples, sets and dataclasses are searched for tensors. Objects with a
    method `to` (transformers' BatchEncoding, PackedSequence) move themselves. `origin` names the function in
    errors. Raise WorkloadError for a tensor that cannot be moved: on the meta device, or inside another
    object.
    """
    if isinstance(batch, Tensor):
        return _moved(batch, device, origin)
    if callable(getattr(batch, "to", None)) and not isinstance(batch, (type, nn.Module)):
        return batch.to(device)
    if isinstance(batch, (Mapping, list, tuple, set, frozenset)):
        return _container_to(batch, device, origin)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return _dataclass_to(batch, device, origin)
    _require_device(batch, device, origin)
    return batch


def _moved(tensor: Tensor, device: str, origin: str) -> Tensor:
    if tensor.is_meta and torch.device(device).type != "meta":
        raise WorkloadError(
            f"{origin} returned a tensor on the device meta, which has no values; {device} was asked for\n"
            "make the batch on the CPU: tensors are moved to the device for you"
        )
    return tensor.to(device)


def _container_to(batch: Any, device: str, origin: str) -> Any:
    if isinstance(batch, Mapping):
        moved = {key: to_device(value, device, origin) for key, value in batch.items()}
        if type(batch) is dict:
            return moved
        result: Any = copy.copy(batch)
        result.update(moved)
        return result
    values = [to_device(value, device, origin) for value in batch]
    return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)


def _dataclass_to(batch: Any, device: str, origin: str) -> Any:
    result = copy.copy(batch)
    for field in dataclasses.fields(batch):
        # object.__setattr__ also sets the fields of a frozen dataclass.
        object.__setattr__(result, field.name, to_device(getattr(batch, field.name), device, origin))
    return result


def _require_device(batch: Any, device: str, origin: str) -> None:
    expected = torch.device(device)
    for name, value in getattr(batch, "__dict__", {}).items():
        if isinstance(value, Tensor) and value.device.type != expected.type:
            raise WorkloadError(
                f"{origin} returned a {type(batch).__name__} with .{name} on {value.device}, not {device}\n"
                "return tensors in dicts, lists, tuples or dataclasses, or give the class a method to(device)"
            )


def batch_size(batch: Any) -> int:
    """Return the first dimension of the first tensor in `batch`. Raise RunError if there is none."""
    for tensor in _tensors(batch):
        if tensor.dim():
            return tensor.shape[0]
    raise RunError(
        "no tensor with a batch dimension in the batch\n"
        "give step() the batch that loss() takes, in tuples, lists, dicts or dataclasses"
    )


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        yield from chain.from_iterable(map(_tensors, batch.values()))
    elif isinstance(batch, (list, tuple)):
        yield from chain.from_iterable(map(_tensors, batch))
    elif dataclasses.is_dataclass(batch):
        yield from chain.from_iterable(map(_tensors, vars(batch).values()))


def sliced(batch: Any, samples: slice, size: int) -> Any:
    """Return `batch` with some `samples` of every tensor whose first dimension is `size`."""
    if isinstance(batch, Tensor):
        return batch[samples] if batch.dim() and batch.shape[0] == size else batch
    if isinstance(batch, Mapping):
        result: Any = copy.copy(batch)
        result.update({key: sliced(value, samples, size) for key, value in batch.items()})
        return result
    if isinstance(batch, (list, tuple)):
        values = [sliced(value, samples, size) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        result = copy.copy(batch)
        for entry in dataclasses.fields(batch):
            object.__setattr__(result, entry.name, sliced(getattr(batch, entry.name), samples, size))
        return result
    return batch
