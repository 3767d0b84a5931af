"""Pieces of state in Python, each with how to copy its contents and how to put a copy back."""

from __future__ import annotations

import io
import pickle
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import is_
from types import CellType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from mesa_tune.conversion.wrapping import CONVERTED, REPLICATE

FRAMEWORKS = {"accelerate", "deepspeed", "lightning", "mesa_tune", "numpy", "pytorch_lightning", "torch"}
"""Packages whose objects and functions are not looked into: what they change, they put right themselves."""

_INTERNAL = (frozenset(vars(nn.Module())) - {"training"}) | {"forward", CONVERTED, REPLICATE}

_HOOKS = tuple(
    name for name in vars(nn.Module()) if name.startswith(("_forward_hooks", "_forward_pre_hooks"))
)

GENERATOR = "a random generator"
HOOK = "a hook"
ITERATOR = "an iterator"


class Place(NamedTuple):
    """One piece of state: `copy(owner)` returns its contents, and `put(owner, contents)` restores them.

    `what`: its name in a message. `key`: two places with equal keys are the same.
    """

    owner: Any
    copy: Callable[[Any], Any]
    put: Callable[[Any, Any], None]
    what: str
    key: Any


def is_foreign(package: str) -> bool:
    """Return whether objects and functions of a module of this name are not looked into."""
    top = package.partition(".")[0]
    return top in FRAMEWORKS or top in sys.stdlib_module_names


def attributes(owner: Any) -> Place:
    """The attributes of a module or another object, without those of `nn.Module` itself."""
    return Place(owner.__dict__, _own, _put_own, "an attribute", id(owner.__dict__))


def buffers(module: nn.Module) -> Place:
    """The buffers of a module."""
    return Place(module._buffers, dict, _put_mapping, "a buffer", id(module._buffers))


def hooks(module: nn.Module) -> Iterator[Place]:
    """The hooks that run in the forward of a module, and how each is called."""
    for name in _HOOKS:
        yield Place(module.__dict__[name], dict, _put_mapping, HOOK, id(module.__dict__[name]))


def names(holder: Any, found: Iterable[str]) -> Place:
    """Variables of a module of Python (its dict), or attributes of a class."""
    chosen = tuple(sorted(found))
    what = "an attribute of its class" if isinstance(holder, type) else "a global variable"
    return Place((holder, chosen), _named, _put_named, what, (id(holder), chosen))


def cell(owner: CellType) -> Place:
    """A variable that a function takes from the function around it."""
    return Place(owner, _inside, _put_inside, "a variable around its forward", id(owner))


def contents(value: Any) -> Place | None:
    """The contents of a container, an object or a generator; None for other values."""
    kind = type(value)
    if kind not in _makers:
        _makers[kind] = _maker(kind)
    make = _makers[kind]
    return None if make is None else make(value)


def values(copy: Any) -> Iterable[Any]:
    """Return the values in the contents of a place."""
    if isinstance(copy, dict):
        return copy.values()
    return copy if isinstance(copy, (list, set)) else ()


def _own(owner: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in owner.items() if name not in _INTERNAL}


def _put_own(owner: dict[str, Any], copy: Mapping[str, Any]) -> None:
    for name in [name for name in owner if name not in copy and name not in _INTERNAL]:
        del owner[name]
    for name, value in copy.items():
        if owner.get(name, owner) is not value:
            owner[name] = value


def _named(owner: tuple[Any, tuple[str, ...]]) -> dict[str, Any]:
    holder, chosen = owner
    values = vars(holder) if isinstance(holder, type) else holder
    return {name: values[name] for name in chosen if name in values}


def _put_named(owner: tuple[Any, tuple[str, ...]], copy: Mapping[str, Any]) -> None:
    holder, now = owner[0], _named(owner)
    for name, value in copy.items():
        if now.get(name, now) is value:
            continue
        if isinstance(holder, type):
            setattr(holder, name, value)
        else:
            holder[name] = value


def _inside(owner: CellType) -> dict[str, Any]:
    try:
        return {"": owner.cell_contents}
    except ValueError:  # not assigned yet
        return {}


def _put_inside(owner: CellType, copy: Mapping[str, Any]) -> None:
    for value in copy.values():
        owner.cell_contents = value


def _put_mapping(owner: dict[Any, Any], copy: Mapping[Any, Any]) -> None:
    if len(owner) != len(copy) or not (
        all(map(is_, owner, copy)) and all(map(is_, owner.values(), copy.values()))
    ):
        owner.clear()
        owner.update(copy)


def _put_items(owner: Any, copy: list[Any]) -> None:
    if len(owner) != len(copy) or not all(map(is_, owner, copy)):
        owner.clear()
        owner.extend(copy)


def _put_set(owner: set[Any], copy: set[Any]) -> None:
    if owner != copy:
        owner.clear()
        owner.update(copy)


def _state_of_torch(owner: torch.Generator) -> bytes:
    with _disable_current_modes():
        return owner.get_state().numpy().tobytes()


def _put_torch(owner: torch.Generator, copy: bytes) -> None:
    with _disable_current_modes():
        owner.set_state(torch.frombuffer(bytearray(copy), dtype=torch.uint8))


def _state_of_python(owner: random.Random) -> bytes:
    return pickle.dumps(owner.getstate())


def _put_python(owner: random.Random, copy: bytes) -> None:
    owner.setstate(pickle.loads(copy))


def _state_of_bits(owner: Any) -> bytes:
    return pickle.dumps(owner.bit_generator.state)


def _put_bits(owner: Any, copy: bytes) -> None:
    owner.bit_generator.state = pickle.loads(copy)


def _state_of_numpy(owner: Any) -> bytes:
    return pickle.dumps(owner.get_state(legacy=False))


def _put_numpy(owner: Any, copy: bytes) -> None:
    owner.set_state(pickle.loads(copy))


def _put_nothing(owner: Any, copy: Any) -> None:
    """Leave an iterator as it is: nobody can put its items back."""


def _put_array(owner: Any, copy: Any) -> None:
    owner[...] = copy


_Maker = Callable[[Any], Place]


def _making(copy: Callable[[Any], Any], put: Callable[[Any, Any], None], what: str) -> _Maker:
    return lambda owner: Place(owner, copy, put, what, id(owner))


_BY_CLASS: tuple[tuple[type, _Maker | None], ...] = (
    ((nn.Module), None),
    (Tensor, None),
    (dict, _making(dict, _put_mapping, "a dict")),
    (list, _making(list, _put_items, "a list")),
    (deque, _making(list, _put_items, "a deque")),
    (set, _making(set, _put_set, "a set")),
    (torch.Generator, _making(_state_of_torch, _put_torch, GENERATOR)),
    (random.SystemRandom, None),
    (random.Random, _making(_state_of_python, _put_python, GENERATOR)),
)
_NUMPY = {
    "ndarray": _making(lambda array: array.copy(), _put_array, "an array"),
    "Generator": _making(_state_of_bits, _put_bits, GENERATOR),
    "RandomState": _making(_state_of_numpy, _put_numpy, GENERATOR),
}
_iterator = _making(lambda _: None, _put_nothing, ITERATOR)
_PLAIN = (bool, int, float, str, tuple, type(None), Tensor, nn.Parameter, torch.dtype)
_makers: dict[type, _Maker | None] = dict.fromkeys(_PLAIN)
"""How a place of each class is made; None if its values have no contents that a module changes."""


def _maker(kind: type) -> _Maker | None:
    for known, make in _BY_CLASS:
        if issubclass(kind, known):
            return make
    if kind.__module__.partition(".")[0] == "numpy":
        return _NUMPY.get(kind.__name__)
    has_attributes = kind.__dictoffset__ != 0 and not issubclass(kind, type)
    if has_attributes and (kind is SimpleNamespace or not is_foreign(kind.__module__)):
        return attributes
    return _iterator if issubclass(kind, Iterator) and not issubclass(kind, io.IOBase) else None
