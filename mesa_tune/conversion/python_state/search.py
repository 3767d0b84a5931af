"""Find the state in Python that the forward of a module, and of those below it, can read and change.

The code of their forwards and hooks, of what these call, and of what decorators put around them, tells which
variables they use. Functions of PyTorch and of the standard library are not followed.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from mesa_tune.conversion.python_state.hooks import has_hooks
from mesa_tune.conversion.python_state.places import Place, attributes, cell, contents, is_foreign, names
from mesa_tune.conversion.wrapping import CONVERTED

_MOST_FUNCTIONS = 200
"""Functions of one module that are looked at."""


def places_of(modules: list[nn.Module]) -> list[Place]:
    """Return the state that `modules` use, except for what their containers contain."""
    search = _Search()
    for module in modules:
        own = not is_foreign(type(module).__module__)
        if own or has_hooks(module):
            search.add(attributes(module))
        if own:
            for value in (_forward(module), *vars(module).values()):
                search.follow(value, type(module))
        for hooked in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            search.add(contents(hooked))
            search.follow(hooked, None)
            search.follow(getattr(type(hooked), "__call__", None), type(hooked))  # noqa: B004
    search.run()
    return list(search.places.values())


def global_generators() -> Iterator[Place]:
    """Yield the generators that Python's `random` and NumPy share among all their functions."""
    for owner in (random._inst, getattr(sys.modules.get("numpy.random.mtrand"), "_rand", None)):
        place = contents(owner)
        if place is not None:
            yield place


def _forward(module: nn.Module) -> Any:
    """Return the forward that runs without a conversion."""
    converted = module.__dict__.get(CONVERTED)
    return type(module).forward if converted is None or converted.previous is None else converted.previous


class _Search:
    """Functions still to be looked at, each with the class whose method it is, and places found so far."""

    def __init__(self) -> None:
        self.places: dict[Any, Place] = {}
        self.left: list[tuple[FunctionType, type | None]] = []
        self.seen: set[Any] = set()

    def add(self, place: Place | None) -> None:
        if place is not None:
            self.places.setdefault(place.key, place)

    def run(self) -> None:
        while self.left and len(self.seen) < _MOST_FUNCTIONS:
            self._look(*self.left.pop(0))

    def follow(self, value: Any, kind: type | None) -> None:
        """Look at a function, a method with its object, or a `partial`, later."""
        if isinstance(value, partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                self.add(contents(part))
                self._use(part, kind)
        elif isinstance(value, (staticmethod, classmethod)):
            self.follow(value.__func__, kind)
        elif isinstance(value, property):
            self.follow(value.fget, kind)
        elif isinstance(value, (MethodType, BuiltinFunctionType)):
            self.add(contents(value.__self__))
            self.follow(getattr(value, "__func__", None), type(value.__self__))
        elif isinstance(value, FunctionType) and not is_foreign(value.__globals__.get("__name__", "")):
            self.left.append((value, kind))

    def _look(self, function: FunctionType, kind: type | None) -> None:
        if (function.__code__, kind) in self.seen:
            return
        self.seen.add((function.__code__, kind))
        used = _names(function.__code__)
        self._variables(function.__globals__, used)
        for each in function.__closure__ or ():
            place = cell(each)
            self.add(place)
            for value in place.copy(each).values():
                self._use(value, kind)
        for base in () if kind is None else kind.__mro__:
            if not is_foreign(base.__module__):
                self._variables(base, used)

    def _variables(self, holder: Any, used: set[str]) -> None:
        """Look at those variables of a module of Python, or attributes of a class, that code uses."""
        values = vars(holder) if isinstance(holder, type) else holder
        kind = holder if isinstance(holder, type) else None
        data = set()
        for name in used & values.keys():
            value = values[name]
            self._use(value, kind, used)
            if not isinstance(value, (ModuleType, FunctionType, MethodType, BuiltinFunctionType, type)):
                data.add(name)
        if data:
            self.add(names(holder, data))

    def _use(self, value: Any, kind: type | None, used: set[str] | None = None) -> None:
        """Look at what code gets by a name; `used`: all its names, for attributes of a module of Python."""
        if isinstance(value, ModuleType):
            self._module(value, used or set())
        elif isinstance(value, type):
            if not is_foreign(value.__module__) and value is not kind:
                self.places.update(_class_data(value, used or set()))
        else:
            self.follow(value, kind)

    def _module(self, module: ModuleType, used: set[str]) -> None:
        name = module.__name__
        if name in {"random", "numpy.random"} or (name == "numpy" and "random" in used):
            for place in global_generators():
                if type(place.owner).__module__.startswith(name.partition(".")[0]):
                    self.add(place)
        elif not is_foreign(name) and module.__dict__.get("__file__") not in self.seen:
            self.seen.add(module.__dict__.get("__file__"))
            self._variables(vars(module), used)


def _class_data(kind: type, used: set[str]) -> dict[Any, Place]:
    data = {name for name in used & vars(kind).keys() if not callable(vars(kind)[name])}
    place = names(kind, data)
    return {place.key: place} if data else {}


def _names(code: CodeType) -> set[str]:
    """Return the names that code uses, with that of the functions inside it."""
    inside = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*map(_names, inside))
