"""Python functions of PyTorch whose bodies run with the routing mode on (`F.normalize`, `F.lp_pool2d`).

A mode sees such a function as one call, and is off inside it. What is hard is to run the same body with the
mode on: the body first asks whether somebody overrides the function, finds the mode, and hands the call over
again, without end. So the body runs with other globals, in which that question has the answer no. These
globals are a module of their own: `torch.compile` looks up the globals of what it traces by their module.
"""

import sys
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from mesa_tune.engine.routing import Opened

_ASKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
_SAVE_NOTHING = {"affine_grid", "embedding", "embedding_bag", "fold", "interpolate", "unfold"}
"""Functions that call a single function of PyTorch, and save no floating-point tensor except their input."""


def _is_open(*_: Any) -> bool:
    """Answer no to all questions whether a function is overridden."""
    return False


def _globals_of(source: ModuleType) -> dict[str, Any]:
    """Return the globals of `source`, in which nothing is overridden."""
    name = f"{__name__}.{source.__name__.replace('.', '_')}"
    module = sys.modules.setdefault(name, ModuleType(name))
    module.__dict__.update({**source.__dict__, **dict.fromkeys(_ASKS, _is_open), "__name__": name})
    return module.__dict__


def _opened(function: Any, names: dict[str, Any]) -> Opened:
    """Return `function` with other globals."""
    code, defaults, closure = function.__code__, function.__defaults__, function.__closure__
    copy = FunctionType(code, names, function.__name__, defaults, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    return Opened(function.__name__.strip("_"), copy)


def _can_be_overridden(function: Any) -> bool:
    return isinstance(function, FunctionType) and any(name in function.__code__.co_names for name in _ASKS)


def _public(source: ModuleType, names: dict[str, Any]) -> dict[Callable[..., Any], Opened]:
    """Map each public function of `source` that can be overridden to its opened copy."""
    return {
        function: _opened(function, names)
        for name, function in vars(source).items()
        if not name.startswith("_") and name not in _SAVE_NOTHING and _can_be_overridden(function)
    }


_tensor = sys.modules["torch._tensor"]

OPENED: dict[Callable[..., Any], Opened] = {
    **_public(F, _globals_of(F)),
    Tensor.__rmatmul__: _opened(Tensor.__rmatmul__, _globals_of(_tensor)),
}
"""The opened copy of each function that a mode sees. If it also has a route, only the route uses the copy."""
