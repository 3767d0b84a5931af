"""The loss of a script as source code: the calls between the output of the model and the backward.

What is hard: a script computes its loss in code that cannot be called from outside. So the calls of torch
functions are recorded, and those that the loss depends on are written out. Tensors that no recorded call
made, such as labels, become a part of the batch.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, handle_torch_function

from mesa_tune.errors import RunError
from mesa_tune.measure.recording.function_names import applied, last_name, may_write, name_of

INSTEAD = "`mesa-tune init` writes a file to put it into; `mesa-tune profile -- COMMAND` observes the step"
"""What helps where a step cannot be recorded."""

_WRITTEN = (torch.dtype, torch.layout, torch.memory_format)
_DIVISIONS = ("torch.Tensor.div", "torch.Tensor.__truediv__", "torch.div")
_PRODUCTS = ("torch.Tensor.mul", "torch.Tensor.mul_")
_SHORT = {"torch.nn.functional.": "F.", "torch.Tensor.__pow__": "torch.Tensor.pow"}
_CHANGES = ("__set__", "register_hook")
_NUMBER = re.compile("\0([0-9]+)\0")


class _Call(NamedTuple):
    """A call of a torch function. `prefix`: the context that it ran in, as source code.

    `written`: the storages that it changes.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any
    prefix: str
    written: frozenset[int] = frozenset()


class LossSource(NamedTuple):
    """Statements of a loss, the last of which is its expression.

    They use `model`, `batch`, `output` (of the model) and `others` (further tensors). In place of a number
    they have its position in `numbers`. `classes`: the autograd functions that they apply.
    """

    statements: tuple[str, ...]
    others: list[Tensor]
    numbers: list[float]
    classes: tuple[type, ...]

    def written(self, varying: Sequence[int] = ()) -> list[str]:
        """Return the source of all statements, in which numbers at `varying` come from the list `numbers`."""

        def number(match: re.Match[str]) -> str:
            index = int(match[1])
            return f"numbers[{varying.index(index)}]" if index in varying else _constant(self.numbers[index])

        return [_NUMBER.sub(number, line) for line in self.statements]


class LossCalls(TorchFunctionMode):
    """Mode that records the calls of torch functions. `autocast`: the device type of an autocast model.

    PyTorch shows a mode no `apply` of an autograd function, so that is replaced meanwhile.
    """

    def __init__(self, autocast: str | None) -> None:
        super().__init__()
        self.autocast = autocast
        self.calls: list[_Call] = []
        self._made: set[int] = set()
        self._before: dict[int, Tensor] = {}
        apply = vars(torch.autograd.Function)["apply"].__func__

        def shown(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if torch._C._is_torch_function_mode_enabled():
                return handle_torch_function(cls.apply, args, *args, **kwargs)
            return apply(cls, *args, **kwargs)

        self._apply = patch.object(torch.autograd.Function, "apply", classmethod(shown))

    def __enter__(self) -> LossCalls:
        self._apply.start()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._apply.stop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`, and record it if it takes tensors and makes or changes some."""
        kwargs = kwargs or {}
        given = [tensor for tensor, _ in _parts((args, kwargs)) if not tensor.is_inference()]
        if may_write(func, kwargs):
            self._copy_before(given)
        versions = [tensor._version for tensor in given]
        result = func(*args, **kwargs)
        written = {
            _storage(each) for each, version in zip(given, versions, strict=True) if each._version > version
        }
        if last_name(func) in _CHANGES:
            written.add(_storage(args[0]))
        if written or (any(_parts(result)) and any(_parts((args, kwargs)))):
            self.calls.append(_Call(func, args, kwargs, result, self._prefix(), frozenset(written)))
            self._made |= {id(tensor) for tensor, _ in _parts(result)}
        return result

    def _copy_before(self, given: list[Tensor]) -> None:
        """Copy tensors from elsewhere that a call may change, and begin the loss with their copies.

        Else the loss, run again, would change those of the batch. `given`: the arguments of the call.
        """
        storages = {_storage(tensor) for tensor in given}
        seen = {id(tensor): tensor for call in self.calls for tensor, _ in _parts((call.args, call.kwargs))}
        seen |= {id(tensor): tensor for tensor in given}
        for key, tensor in seen.items():
            elsewhere = key not in self._made and key not in self._before and not tensor.requires_grad
            if elsewhere and _storage(tensor) in storages:
                self._before[key] = tensor.clone()
                self.calls.insert(0, _Call(Tensor.clone, (tensor,), {}, tensor, ""))

    def _prefix(self) -> str:
        if not torch.is_grad_enabled():
            return "with torch.no_grad():"
        if self.autocast and not torch.is_autocast_enabled(self.autocast):
            return f"with torch.autocast({quoted(self.autocast)}, enabled=False):"
        return ""

    def source(
        self, inputs: Any, output: Any, loss: Tensor, divisor: int, model: nn.Module | None = None
    ) -> LossSource:
        """Return the source of `loss`, without a last division by `divisor`, which mesa-tune does itself.

        `inputs`: the recorded arguments of `model`, `output`: what it returned. Raise RunError for a loss
        that does not follow from `output`, parameters of `model` and constants by torch functions.
        """
        calls = self._needed(loss)
        while calls and _only_scales(calls[-1], divisor):
            loss = calls.pop().args[0]
        writer = _Writer(inputs, output, calls, self._before)
        if model is not None:
            names = {
                id(each): f"model.get_parameter({quoted(name)})" for name, each in model.named_parameters()
            }
            writer.names = names | writer.names
        statements = (*writer.lines(), writer.expression(loss))
        classes = tuple(kind for call in calls if (kind := applied(call.function)) is not None)
        return LossSource(statements, writer.others, writer.numbers, classes)

    def _needed(self, loss: Tensor) -> list[_Call]:
        """Return the calls that `loss` depends on, in order."""
        needed, storages, calls = {id(loss)}, {_storage(loss)}, []
        for call in reversed(self.calls):
            if call.written & storages or any(id(tensor) in needed for tensor, _ in _parts(call.result)):
                needed |= {id(tensor) for tensor, _ in _parts((call.args, call.kwargs))}
                storages |= {_storage(tensor) for tensor, _ in _parts((call.args, call.kwargs))}
                calls.append(call)
        return calls[::-1]


class _Writer:
    """Writes calls as lines of Python. `names`: expressions of tensors by their identity.

    `before`: values of tensors, by identity, before a call changed them. The result of a call that only the
    next one uses has no name: it would live on beyond its use.
    """

    def __init__(self, inputs: Any, output: Any, calls: list[_Call], before: Mapping[int, Tensor]) -> None:
        self.names = {id(tensor): f"batch{path}" for tensor, path in _parts(inputs)}
        self.names |= {id(tensor): f"output{path}" for tensor, path in _parts(output)}
        self.others: list[Tensor] = []
        self.numbers: list[float] = []
        self.calls, self.before = calls, before
        self.users: dict[int, list[_Call]] = {}
        for call in calls:
            for tensor, _ in _parts((call.args, call.kwargs)):
                self.users.setdefault(id(tensor), []).append(call)
        self.count = 0

    def lines(self) -> list[str]:
        """Return the statements of all calls, in the contexts that they ran in."""
        statements = [(call.prefix, line) for call in self.calls for line in self._statement(call)]
        lines: list[str] = []
        for prefix, group in itertools.groupby(statements, lambda each: each[0]):
            indent = "    " if prefix else ""
            lines += [prefix] * bool(prefix) + [f"{indent}{line}" for _, line in group]
        return lines

    def _statement(self, call: _Call) -> Iterator[str]:
        """Name the results of a call; yield its statement, unless the call becomes a part of another's."""
        name = name_of(call.function)
        if name is None:
            raise _unwritable(f"a call of {call.function}")
        given = [self.expression(value) for value in call.args]
        given += [f"{key}={self.expression(value)}" for key, value in _changed(call)]
        source = _called(name, given)
        if self._is_part(call):
            self.names[id(call.result)] = source
            return
        if not any(_parts(call.result)):
            yield source
            return
        self.count += 1
        variable = f"value{self.count}"
        self.names |= {id(tensor): f"{variable}{path}" for tensor, path in _parts(call.result)}
        yield f"{variable} = {source}"

    def _is_part(self, call: _Call) -> bool:
        """Return whether one call in the same context uses the result, and none changes a tensor in place."""
        users = self.users.get(id(call.result), [])
        in_place = any(other.written for other in self.calls)
        alone = isinstance(call.result, Tensor) and (len(users) == 1 or (not users and not call.prefix))
        return alone and not in_place and all(user.prefix == call.prefix for user in users)

    def expression(self, value: Any) -> str:
        """Return the Python expression of an argument."""
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, (tuple, list)):
            inner = ", ".join(map(self.expression, value))
            return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' * (len(value) == 1)})"
        if isinstance(value, slice):
            return f"slice({', '.join(map(self.expression, (value.start, value.stop, value.step)))})"
        if isinstance(value, np.generic):
            value = value.item()
        if type(value) in (int, float):
            self.numbers.append(value)
            return f"\0{len(self.numbers) - 1}\0"
        return _constant(value)

    def _tensor(self, tensor: Tensor) -> str:
        name = self.names.get(id(tensor))
        if name is None:
            tensor_before = self.before.get(id(tensor), tensor)
            if tensor_before.requires_grad:
                raise _unwritable(
                    "a trained tensor that is neither the model's nor made from its output by torch functions"
                )
            name = self.names[id(tensor)] = f"others[{len(self.others)}]"
            self.others.append(tensor_before)
        return name


def _constant(value: Any) -> str:
    if isinstance(value, _WRITTEN):
        return str(value)
    if isinstance(value, torch.device):
        return f"torch.device({quoted(str(value))})"
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({quoted(str(value))})"
    if value is ...:
        return "..."
    if value is None or type(value) in (bool, int, float, complex, str):
        return quoted(value)
    raise _unwritable(f"a {type(value).__name__} as an argument")


def _changed(call: _Call) -> list[tuple[str, Any]]:
    """Return the keyword arguments of a call that are not the defaults of its function."""
    if not call.kwargs or not inspect.isfunction(call.function):
        return list(call.kwargs.items())
    try:
        defaults = inspect.signature(call.function).parameters
    except ValueError:  # a wrapped built-in function
        return list(call.kwargs.items())
    return [
        (name, value)
        for name, value in call.kwargs.items()
        if isinstance(value, Tensor) or name not in defaults or value != defaults[name].default
    ]


def _called(name: str, given: list[str]) -> str:
    """Return the source of a call; methods of tensors as methods."""
    for long, short in _SHORT.items():
        name = name.replace(long, short)
    method = name.removeprefix("torch.Tensor.")
    if method.endswith(".__get__"):
        return f"{given[0]}.{method.removesuffix('.__get__')}"
    if method != name and method.isidentifier() and not method.startswith("__"):
        return f"{given[0]}.{method}({', '.join(given[1:])})"
    return f"{name}({', '.join(given)})"


def _storage(tensor: Tensor) -> int:
    """Return the identity of the storage of `tensor`, of one without storage its own."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse tensors, and those inside vmap
        return id(tensor)


def _only_scales(call: _Call, divisor: int) -> bool:
    """Return whether a call divides by `divisor` or by 1, or multiplies by 1."""
    name, by = name_of(call.function) or "", call.args[1:]
    if len(by) != 1 or not isinstance(by[0], (int, float)):
        return False
    return (name in _DIVISIONS and by[0] in (divisor, 1)) or (name in _PRODUCTS and by[0] == 1)


def _parts(tree: Any, path: str = "") -> Iterator[tuple[Tensor, str]]:
    """Yield the tensors of `tree`, each with the expression that leads to it."""
    if isinstance(tree, Tensor):
        yield tree, path
    for value, step in _children(tree):
        yield from _parts(value, f"{path}{step}")


def _children(tree: Any) -> Iterator[tuple[Any, str]]:
    """Yield the values in a container, each with its subscript or attribute."""
    if isinstance(tree, Mapping):
        yield from ((value, f"[{quoted(key)}]") for key, value in tree.items())
    elif isinstance(tree, (tuple, list)):
        yield from ((value, f"[{index}]") for index, value in enumerate(tree))
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        yield from ((getattr(tree, field.name), f".{field.name}") for field in dataclasses.fields(tree))


def quoted(value: object) -> str:
    """Return `repr` of a value, of a text with double quotes."""
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _unwritable(what: str) -> RunError:
    return RunError(f"the loss of the script has {what}, which cannot be written as source\n{INSTEAD}")
