"""Moving a batch to a device. A batch is whatever the user's loss takes: tensors in nested containers."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mesa_tune.errors import WorkloadError


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
