"""The names of torch functions in source code, and what they tell of a call."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from operator import attrgetter
from types import MethodType
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import resolve_name

from mesa_tune.workload.instance.recorded import SCRIPT


def name_of(function: Any) -> str | None:
    """Return the source of a function, or None if it has no name.

    It is that of a file that imports torch and the modules of autograd functions.
    """
    if isinstance(function, (OpOverload, OpOverloadPacket)):
        return f"torch.ops.{function}"
    if (kind := applied(function)) is not None:
        name = kind.__qualname__ if kind.__module__ == SCRIPT else f"{kind.__module__}.{kind.__qualname__}"
        return None if "<locals>" in name else f"{name}.apply"
    path = f"{getattr(function, '__module__', None)}.{getattr(function, '__qualname__', '')}"
    candidates = (resolve_name(function), path, f"torch.{getattr(function, '__name__', '')}")
    return next((name for name in candidates if name and _found(name, function)), None)


def _found(name: str, function: Any) -> bool:
    """Return whether `name` is that of `function` below torch."""
    package, _, path = name.partition(".")
    try:
        return package == "torch" and attrgetter(path)(sys.modules[package]) == function
    except AttributeError:
        return False


def applied(function: Any) -> type | None:
    """Return the autograd function whose `apply` is `function`, or None."""
    kind = getattr(function, "__self__", None)
    is_kind = isinstance(kind, type) and issubclass(kind, torch.autograd.Function)
    return kind if is_kind and isinstance(function, MethodType) else None


def last_name(function: Any) -> str:
    return (name_of(function) or "").rpartition(".")[2]


def may_write(function: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call may change its arguments, by the names that PyTorch gives such functions."""
    name = last_name(function)
    in_place = name.endswith("_") and not name.endswith("__")
    operator = name in ("__setitem__", "__set__") or (name.startswith("__i") and name != "__invert__")
    return (
        in_place
        or operator
        or "out" in kwargs
        or bool(kwargs.get("inplace"))
        or applied(function) is not None
    )
