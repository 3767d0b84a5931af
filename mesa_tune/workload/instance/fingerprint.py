"""The fingerprint of a training step that a script has at hand: equal where an earlier profile still holds.

What is hard: there is no file to hash, and values of weights differ from run to run. So shapes, options and
code count: of the model's classes, of the loss, and of the functions of the same file that the loss calls.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

from torch import Tensor, nn

from mesa_tune.workload.batches import is_container, values_of

_ADDRESS = re.compile(r"0x[0-9a-f]+")
_MOST = 1000
"""Containers of more values count by their class and length alone."""
_PLAIN = (bool, int, float, str, type(None))


def fingerprint(*parts: Any) -> str:
    """Return a SHA-256 of models, batches, functions and plain values.

    Of a module: shapes, dtypes, ties, what trains, settings and code. Of a tensor: shape and dtype. Of a
    function: its code, that of functions of its module which it calls, and what it is bound to.
    """
    described = [_described(part, set()) for part in parts]
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def _described(value: Any, seen: set[Any]) -> Any:
    """Return plain JSON values that are equal for equal values, in another process too."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Tensor):
        return [list(value.shape), str(value.dtype)]
    if isinstance(value, nn.Module):
        return _of_module(value, seen)
    if is_container(value):
        return _of_container(value, seen)
    if callable(value):
        return _of_function(value, seen)
    return _shown(value)


def _of_container(container: Any, seen: set[Any]) -> Any:
    values = list(values_of(container))
    if len(values) > _MOST:
        return [type(container).__name__, len(values)]
    if isinstance(container, Mapping):
        return {str(key): _described(each, seen) for key, each in container.items()}
    described = [_described(each, seen) for each in values]
    return sorted(map(json.dumps, described)) if isinstance(container, (set, frozenset)) else described


def _shown(value: Any) -> str:
    return _ADDRESS.sub("", repr(value))


def _of_module(model: nn.Module, seen: set[Any]) -> Any:
    if id(model) in seen:
        return None
    seen.add(id(model))
    numbers: dict[int, int] = {}
    tensors = [
        [name, numbers.setdefault(id(each), len(numbers)), str(each.dtype), each.requires_grad, [*each.shape]]
        for named in (model.named_parameters, model.named_buffers)
        for name, each in named(remove_duplicate=False)
    ]
    modules = [
        [name, module.training, _settings(module), _settings(getattr(module, "config", None))]
        for name, module in model.named_modules()
    ]
    kinds = sorted(
        {type(module) for module in model.modules()}, key=lambda kind: (kind.__module__, kind.__name__)
    )
    return [_shown(model), tensors, modules, [_of_class(kind, seen) for kind in kinds]]


def _settings(owner: Any) -> dict[str, Any]:
    """Return the attributes of an object that are plain values."""
    return {
        name: value for name, value in getattr(owner, "__dict__", {}).items() if isinstance(value, _PLAIN)
    }


def _of_class(kind: type, seen: set[Any]) -> list[Any]:
    """Return the code of the methods of a class and its bases, without those of torch."""
    bases = [base for base in kind.__mro__ if base is not object and base.__module__.split(".")[0] != "torch"]
    methods = [each for base in bases for each in vars(base).values() if isinstance(each, FunctionType)]
    return [[base.__qualname__ for base in kind.__mro__], [_of_code(method.__code__) for method in methods]]


def _of_function(function: Callable[..., Any], seen: set[Any]) -> Any:
    if isinstance(function, functools.partial):
        return [_described(each, seen) for each in (function.func, function.args, function.keywords)]
    plain, owner = getattr(function, "__func__", function), getattr(function, "__self__", None)
    if not isinstance(plain, FunctionType):
        return _of_callable_object(plain, seen)
    if plain in seen:
        return plain.__qualname__
    seen.add(plain)
    bound = [_described(each, seen) for each in (plain.__defaults__, _cells(plain), _settings(owner))]
    called = [_of_function(each, seen) for each in _called(plain)]
    return [_of_code(plain.__code__), bound, called]


def _of_callable_object(value: Any, seen: set[Any]) -> Any:
    call = getattr(type(value), "__call__", None)  # noqa: B004 - not a test for callable
    if isinstance(value, type) or not isinstance(call, FunctionType):
        return getattr(value, "__qualname__", _shown(value))
    return [_of_function(call, seen), _settings(value)]


def _cells(function: FunctionType) -> list[Any]:
    """Return the values of the variables that a function takes from the functions around it."""
    return [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _called(function: FunctionType) -> Iterator[FunctionType]:
    """Yield the functions of the same module whose names a function uses."""
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, FunctionType) and value.__module__ == function.__module__:
            yield value


def _of_code(code: CodeType) -> list[Any]:
    constants = [_of_code(each) if isinstance(each, CodeType) else _constant(each) for each in code.co_consts]
    return [code.co_code.hex(), list(code.co_names), constants]


def _constant(value: Any) -> Any:
    return sorted(map(repr, value)) if isinstance(value, frozenset) else repr(value)
