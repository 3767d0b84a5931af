"""Cache of plans: a call that is like an earlier one runs by the same plan, without its route.

A route may take longer than the call itself. What is hard is to be sure that the plan fits. Calls are alike
if `torch.compile`'s guards find their tensors alike (type, dtype, device, shape, strides, `requires_grad`,
dispatch keys), if their other arguments are equal, and if the route's questions have the same answers.
"""

from collections.abc import Callable, Hashable, Sequence
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor

try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # not a public name
    TensorGuards = None  # type: ignore[assignment, misc]

from mesa_tune.engine.call import Call, casts, may_change
from mesa_tune.engine.function import SEQUENCES, CachedCall, CachedCalls
from mesa_tune.engine.rematerialize import find

_CONSTANTS = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.memory_format}
_PLANS_PER_LAYER = 8
_SHAPES_PER_LAYER = 64


class _UnlikeError(Exception):
    """A call that cannot be distinguished from calls with other plans."""


def cached_call(call: Call, output: Any) -> CachedCall:
    """Return the plan of a call that has returned `output`, for calls like it.

    Raises `_UnlikeError` if the route did more than run the plan, or went by something unknown.
    """
    given = [*call.args, *call.kwargs.values(), None]
    count = len(given)
    sequences = [
        (index, type(value), len(value))
        for index, value in enumerate(given)
        if type(value) in SEQUENCES and any(isinstance(element, Tensor) for element in value)
    ]
    given += [element for index, *_ in sequences for element in given[index]]
    arguments = list(enumerate(given))
    given += [tensor for *_, tensors in call.lookups for tensor in tensors or ()]
    positions = {id(value): index for index, value in reversed(list(enumerate(given)))}
    changes = any(ask is may_change for ask, *_ in call.answers)
    if output is not call.output or (call.plan is not None and id(output) in positions and not changes):
        raise _UnlikeError
    tensors = [(index, value) for index, value in arguments if isinstance(value, Tensor)]
    first = [(index, tensor) for index, tensor in tensors if positions[id(tensor)] == index]
    if not first or any(tensor.layout is not torch.strided or tensor.is_nested for _, tensor in first):
        raise _UnlikeError
    if call.plan is not None and not {id(tensor) for _, tensor in first} <= set(map(id, call.tensors)):
        raise _UnlikeError  # its value may have been used
    nothing = count - 1  # the None, which is the same in every call
    skipped = {nothing, *(index for index, _ in tensors), *(index for index, *_ in sequences)}
    kind = first[0][1].device.type
    try:
        lookups = [(look, positions[id(of)], tensors is None) for look, of, tensors in call.lookups]
        asked = {(ask, positions[id(tensor)]): answer for ask, tensor, answer in call.answers}
        pick = _picking([positions[id(tensor)] for tensor in call.tensors])
    except KeyError:
        raise _UnlikeError from None
    plan = None if call.plan is None else getattr(output.grad_fn, "plan", call.plan)
    sources = [call.sources.get(index) for index in call.candidates]
    own = find(output, None) if plan is not None and plan.exposes is not None else None
    return CachedCall(
        signature=(call.func, len(call.args), *call.kwargs),
        sequences=sequences,
        tensors=_picking([index for index, _ in first]),
        alike=alike([tensor for _, tensor in first]),
        repeats=[(i, positions[id(tensor)]) for i, tensor in tensors if positions[id(tensor)] != i],
        constants=[(index, _constant(value)) for index, value in arguments if index not in skipped],
        autocast=(kind, torch.get_autocast_dtype(kind)) if casts(kind) else None,
        lookups=lookups,
        answers=[(ask, position, answer) for (ask, position), answer in asked.items()],
        plan=plan,
        pick=pick,
        key=None if plan is None else call.context.key(output.device),
        memories=call.memories,
        candidates=call.candidates,
        recipes=[None if source is None else source.recipe for source in sources],
        recipe=None if own is None else own.recipe,
    )


class CallCache:
    """The cached calls of a conversion, by layer."""

    def __init__(self) -> None:
        self.calls: CachedCalls = {}
        self._shapes: dict[Hashable, set[Any]] = {}

    def note(self, layer: Hashable, call: Call, output: Any) -> None:
        """Cache a call that returned `output`, if it is the layer's second call with these shapes.

        The conditions of a plan take long to collect, which does not pay where shapes differ in every step.
        """
        shapes = self._shapes.setdefault(layer, set())
        leaves = (*call.args, *call.kwargs.values())
        signature = tuple(
            [leaf.shape if isinstance(leaf, Tensor) and not leaf.is_nested else type(leaf) for leaf in leaves]
        )
        if signature not in shapes:
            if len(shapes) >= _SHAPES_PER_LAYER:
                shapes.clear()
            shapes.add(signature)
            return
        try:
            cached = cached_call(call, output)
        except _UnlikeError:
            return
        self.calls[layer] = (cached, *self.calls.get(layer, ()))[:_PLANS_PER_LAYER]

    def clear(self) -> None:
        """Forget all calls."""
        self.calls.clear()
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
    if type(value) not in SEQUENCES:
        raise _UnlikeError
    elements = [_constant(element) for element in value]
    return elements if type(value) is list else value


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


_PROPERTIES = attrgetter("__class__", "dtype", "device", "layout", "requires_grad", "shape")


def _looks(tensors: Sequence[Tensor]) -> Any:
    """Return the properties that guards compare; None if one is no tensor."""
    if not all(isinstance(tensor, Tensor) for tensor in tensors):
        return None
    state = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    kinds = sorted({tensor.device.type for tensor in tensors})
    properties = [(_PROPERTIES(t), t.stride(), t.is_conj(), t.is_neg()) for t in tensors]
    return state, list(map(casts, kinds)), properties
