"""Cache of plans: a call that is like an earlier one runs by the same plan, without its route.

A route may take longer than the call itself. What is hard is to be sure that the plan fits. Calls are alike
if `torch.compile`'s guards find their tensors alike (type, dtype, device, shape, strides, `requires_grad`,
dispatch keys), if their other arguments are equal, and if the route's questions have the same answers.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # not a public name
    TensorGuards = None  # type: ignore[assignment, misc]

from mesa_tune.engine.call import MISS, Call, Context, may_change
from mesa_tune.engine.function import apply_plan, run
from mesa_tune.engine.plan import CallPlan
from mesa_tune.engine.rematerialize import find

_CONSTANTS = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.memory_format}
_SEQUENCES = (tuple, list, torch.Size)
_PLANS_PER_LAYER = 8
_SHAPES_PER_LAYER = 64


class _UnlikeError(Exception):
    """A call that cannot be distinguished from calls with other plans."""


class CachedCall:
    """The plan of a call, and the conditions on arguments under which it fits another call.

    Positions count the arguments, the values of keywords, a None, then the elements of arguments that are
    sequences of tensors (`sequences`: their positions, types and lengths), then tensors that were looked up.
    """

    def __init__(self, call: Call, output: Any) -> None:
        """Raise `_UnlikeError` if the route did more than run the plan, or used an unknown tensor."""
        given = [*call.args, *call.kwargs.values(), None]
        self.count, self.func, self.names = len(given), call.func, tuple(call.kwargs)
        self.sequences = [
            (index, type(value), len(value))
            for index, value in enumerate(given)
            if type(value) in _SEQUENCES and any(isinstance(element, Tensor) for element in value)
        ]
        given += [element for index, *_ in self.sequences for element in given[index]]
        arguments = list(enumerate(given))
        given += [tensor for *_, tensors in call.lookups for tensor in tensors or ()]
        positions = {id(value): index for index, value in reversed(list(enumerate(given)))}
        self._guard(arguments, positions)
        try:
            self.lookups = [(look, positions[id(of)], tensors is None) for look, of, tensors in call.lookups]
            self.answers = [(ask, positions[id(tensor)], answer) for ask, tensor, answer in call.answers]
            self.pick = _picking([positions[id(tensor)] for tensor in call.tensors])
        except KeyError:
            raise _UnlikeError from None
        self._plan(call, output, positions)

    def _guard(self, arguments: Sequence[tuple[int, Any]], positions: Mapping[int, int]) -> None:
        tensors = [(index, value) for index, value in arguments if isinstance(value, Tensor)]
        self.repeats = [(i, positions[id(tensor)]) for i, tensor in tensors if positions[id(tensor)] != i]
        first = [(i, tensor) for i, tensor in tensors if positions[id(tensor)] == i]
        skipped = {*(index for index, _ in tensors), *(index for index, *_ in self.sequences)}
        self.constants = [(index, _constant(value)) for index, value in arguments if index not in skipped]
        self.tensors, self.alike = _picking([i for i, _ in first]), alike([tensor for _, tensor in first])
        kind = first[0][1].device.type
        self.autocast = (kind, torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None

    def _plan(self, call: Call, output: Any, positions: Mapping[int, int]) -> None:
        changes = any(ask is may_change for ask, *_ in call.answers)
        if output is not call.output or (call.plan is not None and id(output) in positions and not changes):
            raise _UnlikeError
        self.memories, self.candidates, self.recipe = call.memories, call.candidates, None
        self.plan = None if call.plan is None else getattr(output.grad_fn, "plan", call.plan)
        sources = [call.sources.get(index) for index in call.candidates]
        self.recipes = [None if source is None else source.recipe for source in sources]
        if self.plan is None:
            return
        self.key = call.context.key(output.device)
        if self.plan.exposes is not None and (source := find(output, None)) is not None:
            self.recipe = source.recipe

    def run(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], context: Context
    ) -> Any:
        """Return the output for other arguments; `MISS` if the plan does not fit them."""
        given = (*args, *kwargs.values(), None)
        if len(given) != self.count or func is not self.func or tuple(kwargs) != self.names:
            return MISS
        found = self._with_elements(given) if self.sequences else given
        if found is None or not self.alike(*self.tensors(found)):
            return MISS
        found = self._with_lookups(found) if self.lookups else found
        if found is None or not self._agrees(found, context):
            return MISS
        plan = self.plan
        if plan is None:
            return func(*args, **kwargs)
        if self.candidates:
            return self._derived(plan, self.pick(found))
        return apply_plan(plan, self.memories, *self.pick(found), self.key)

    def _with_elements(self, given: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Return the arguments and the elements of sequences; None if types or lengths differ."""
        for index, kind, length in self.sequences:
            if type(given[index]) is not kind or len(given[index]) != length:
                return None
            given += tuple(given[index])
        return given

    def _with_lookups(self, given: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Return the arguments and the tensors looked up by them; None if these exist only now or then."""
        for look, index, missing in self.lookups:
            tensors = look(given[index])
            if (tensors is None) is not missing:
                return None
            given += tuple(tensors or ())
        return given

    def _agrees(self, given: Sequence[Any], context: Context) -> bool:
        """Return whether everything except the properties of tensors is the same."""
        if self.autocast is not None and torch.get_autocast_dtype(self.autocast[0]) is not self.autocast[1]:
            return False
        for index, value in self.constants:
            other = given[index]
            if other is not value and not _is_same(value, other):
                return False
        if False in [given[index] is given[first] for index, first in self.repeats]:
            return False
        return False not in [
            question(context, given[index]) is answer for question, index, answer in self.answers
        ]

    def _derived(self, plan: CallPlan, tensors: Sequence[Any]) -> Any:
        """Return the output of a call that rematerializes inputs, or exposes its own output."""
        found = [find(tensors[index], None) for index in self.candidates]
        if [None if source is None else source.recipe for source in found] != self.recipes:
            return MISS
        sources = {i: source for i, source in zip(self.candidates, found, strict=True) if source is not None}
        return run(plan, self.memories, self.key, tensors, sources, recipe=self.recipe)


class CallCache:
    """The cached calls of a conversion's layers."""

    def __init__(self) -> None:
        self._calls: dict[Hashable, tuple[CachedCall, ...]] = {}
        self._shapes: dict[Hashable, set[Any]] = {}

    def run(
        self,
        layer: Hashable,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        context: Context,
    ) -> Any:
        """Return the output of a call by a cached plan of its layer; `MISS` if no plan fits."""
        for cached in self._calls.get(layer, ()):
            output = cached.run(func, args, kwargs, context)
            if output is not MISS:
                return output
        return MISS

    def note(self, layer: Hashable, call: Call, output: Any) -> None:
        """Cache a call that returned `output`, if it is the layer's second call with these shapes.

        The conditions of a plan take long to collect, which does not pay where shapes differ in every step.
        """
        shapes = self._shapes.setdefault(layer, set())
        leaves = (*call.args, *call.kwargs.values())
        signature = tuple([leaf.shape if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves])
        if signature not in shapes:
            if len(shapes) >= _SHAPES_PER_LAYER:
                shapes.clear()
            shapes.add(signature)
            return
        try:
            cached = CachedCall(call, output)
        except _UnlikeError:
            return
        self._calls[layer] = (cached, *self._calls.get(layer, ()))[:_PLANS_PER_LAYER]

    def clear(self) -> None:
        """Forget all calls."""
        self._calls.clear()
        self._shapes.clear()


def _picking(positions: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Return a function that takes the items at these positions."""
    if len(positions) > 1:
        return itemgetter(*positions)
    return itemgetter(slice(positions[0], positions[0] + 1) if positions else slice(0))


def _constant(value: Any) -> Any:
    """Return `value`, copied if it can change; raise `_UnlikeError` if it is no constant."""
    if type(value) in _CONSTANTS:
        return value
    if type(value) not in _SEQUENCES:
        raise _UnlikeError
    elements = [_constant(element) for element in value]
    return elements if type(value) is list else value


def _is_same(value: Any, other: Any) -> bool:
    if type(other) is not type(value) or other != value:
        return False
    if type(value) in _SEQUENCES:
        return all(map(_is_same, value, other))
    return bool(value != 0 or str(other) == str(value))  # 0.0 == -0.0


def alike(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Return a function that compares other tensors with these, by the guards of `torch.compile` if possible.

    Raise `_UnlikeError` if these tensors do not pass the comparison themselves.
    """
    if TensorGuards is None:
        looks = _looks(tensors)
        return lambda *others: _looks(others) == looks
    guards = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    if not guards.check(*tensors):
        raise _UnlikeError
    check: Callable[..., bool] = guards.check
    return check


def _looks(tensors: Sequence[Tensor]) -> Any:
    """Return the properties that guards compare."""
    state = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    kinds = {tensor.device.type for tensor in tensors}
    casts = sorted((kind, torch.is_autocast_enabled(kind)) for kind in kinds)
    return (
        state,
        casts,
        [
            (
                type(t),
                t.dtype,
                t.device,
                t.layout,
                t.requires_grad,
                t.is_conj(),
                t.is_neg(),
                t.shape,
                t.stride(),
            )
            for t in tensors
        ],
    )
