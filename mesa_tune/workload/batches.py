"""Moving a batch to a device, and selecting its samples.

A batch is whatever the user's loss takes: tensors in nested containers.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
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
    if is_container(batch):
        return rebuilt(batch, lambda value: to_device(value, device, origin))
    _require_device(batch, device, origin)
    return batch


def is_container(batch: Any) -> bool:
    """Return True for a mapping, list, tuple, set or dataclass: tensors are searched in its values."""
    is_dataclass = dataclasses.is_dataclass(batch) and not isinstance(batch, type)
    return is_dataclass or isinstance(batch, (Mapping, list, tuple, set, frozenset))


def values_of(container: Any) -> Iterable[Any]:
    """Return the values of a container."""
    if isinstance(container, Mapping):
        return container.values()
    if dataclasses.is_dataclass(container):
        return [getattr(container, field.name) for field in dataclasses.fields(container)]
    values: Iterable[Any] = container
    return values


def rebuilt(container: Any, change: Callable[[Any], Any]) -> Any:
    """Return a container of the same type with `change` of each value."""
    if isinstance(container, Mapping):
        changed = {key: change(value) for key, value in container.items()}
        if type(container) is dict:
            return changed
        result: Any = copy.copy(container)
        result.update(changed)
        return result
    if dataclasses.is_dataclass(container) and not isinstance(container, type):
        result = copy.copy(container)
        for field in dataclasses.fields(container):
            # object.__setattr__ also sets the fields of a frozen dataclass.
            object.__setattr__(result, field.name, change(getattr(container, field.name)))
        return result
    kind: Any = type(container)
    values = [change(value) for value in values_of(container)]
    return kind(*values) if hasattr(container, "_fields") else kind(values)


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors of `batch`, in order."""
    if isinstance(batch, Tensor):
        yield batch
    elif is_container(batch):
        for value in values_of(batch):
            yield from tensors_of(value)


def batch_size(batch: Any) -> int:
    """Return the first dimension of the first tensor of `batch`. Raise WorkloadError if there is none."""
    size = next((tensor.size(0) for tensor in tensors_of(batch) if tensor.dim()), None)
    if not size:
        raise WorkloadError(
            "batch: has no tensor whose first dimension counts samples\n"
            "put its tensors into dicts, lists, tuples or dataclasses, or give a function batch(n)"
        )
    return size


def copied_containers(batch: Any) -> Any:
    """Return `batch` in new containers with the same tensors: a loss may pop its labels from a dict."""
    return rebuilt(batch, copied_containers) if is_container(batch) else batch


def select(batch: Any, index: Tensor | slice, size: int) -> Any:
    """Return `batch` with the samples at `index` of each tensor whose first dimension is `size`."""
    if isinstance(batch, Tensor):
        if not batch.dim() or batch.size(0) != size:
            return batch
        if batch.is_nested:
            chosen = range(size)[index] if isinstance(index, slice) else index.tolist()
            parts = batch.unbind()
            return torch.nested.nested_tensor([parts[number] for number in chosen], layout=batch.layout)
        return batch[index if isinstance(index, slice) else index.to(batch.device)]
    return rebuilt(batch, lambda value: select(value, index, size)) if is_container(batch) else batch


def _moved(tensor: Tensor, device: str, origin: str) -> Tensor:
    if tensor.is_meta and torch.device(device).type != "meta":
        raise WorkloadError(
            f"{origin} returned a tensor on the device meta, which has no values; {device} was asked for\n"
            "make the batch on the CPU: tensors are moved to the device for you"
        )
    return tensor.to(device)


def _require_device(batch: Any, device: str, origin: str) -> None:
    expected = torch.device(device)
    for name, value in getattr(batch, "__dict__", {}).items():
        if isinstance(value, Tensor) and value.device.type != expected.type:
            raise WorkloadError(
                f"{origin} returned a {type(batch).__name__} with .{name} on {value.device}, not {device}\n"
                "return tensors in dicts, lists, tuples or dataclasses, or give the class a method to(device)"
            )
