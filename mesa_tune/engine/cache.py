"""A call that is like its layer's last ones is served as they were, without asking everything anew.

What a route decides, and what `Call.apply` finds out, takes longer than the call itself may. It goes by the
arguments' values, by the geometry of tensors among them, and by the layer's settings; and a layer's call is
mostly the twin of its last one. Tensors are compared by the guards of `torch.compile`, all at once.
"""

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # it is no public name; without it nothing settles
    TensorGuards = None  # type: ignore[assignment, misc]

from mesa_tune.engine.call import Served
from mesa_tune.engine.function import Known, Plan, apply_plan
from mesa_tune.engine.storage import is_scrap, way_of

_CONSTANT = {int, float, bool, str, type(None), torch.Size, torch.dtype}


_Pick = Callable[[Sequence[Any]], Sequence[Any]]


class Settled(NamedTuple):
    """How a call of `func` was served: by `plan`, with the arguments that `own` picks as its tensors.

    What its arguments were like: how many were `given`, and a None after them; the `names` of keywords;
    `alike`, whether the `tensors` among them are of the same type, dtype, device, shape and strides, want
    gradients or do not, and meet the same dispatch keys (autocast, transforms); which of them lay in a batch
    or a buffer (`static`; parameters always do); which small ones are views of storages of `scraps` bytes or
    more, which are copied; what the `others` were. `cast`: a kind of device, and to what autocast took it.
    """

    func: Callable[..., Any]
    plan: Plan
    key: Tensor
    own: _Pick
    names: tuple[str, ...]
    given: int
    tensors: _Pick
    alike: Callable[..., bool]
    static: tuple[tuple[int, bool], ...]
    scraps: tuple[tuple[int, int, bool], ...]
    others: tuple[tuple[int, Any], ...]
    cast: tuple[str, torch.dtype] | None

    def again(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        is_static: Callable[[Tensor], bool],
    ) -> Any:
        """The output for other arguments; None if they are not alike."""
        given = (*args, *kwargs.values(), None)
        if len(given) != self.given or tuple(kwargs) != self.names:
            return None
        if not (self.alike(*self.tensors(given)) and self._agrees(given, is_static)):
            return None
        return apply_plan(self.plan, None, *self.own(given), self.key)

    def _agrees(self, given: Sequence[Any], is_static: Callable[[Tensor], bool]) -> bool:
        """Whether all but the tensors' own properties is the same."""
        if self.cast is not None and torch.get_autocast_dtype(self.cast[0]) is not self.cast[1]:
            return False
        for place, value in self.others:
            other = given[place]
            if other is not value and not _is_same(value, other):
                return False
        for place, static in self.static:
            if is_static(given[place]) is not static:
                return False
        return not self.scraps or self._copies_alike(given)

    def _copies_alike(self, given: Sequence[Any]) -> bool:
        """Whether the same small tensors are views of large storages."""
        return all(
            (given[place].untyped_storage().nbytes() >= size) is scrap for place, size, scrap in self.scraps
        )

    @staticmethod
    def of(
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        served: Served,
        output: Any,
        is_static: Callable[[Tensor], bool],
        key: Callable[[torch.device], Tensor],
    ) -> "Settled | None":
        """A call whose `output` is its formula's, as it was `served`; None if it is not, if that had tensors
        that are not the call's own, each once, if it worked in place, or if its values may change while they
        stay the same object.
        """
        given, used = [*args, *kwargs.values()], served.tensors
        found = {**{id(each): place for place, each in enumerate(given)}, id(None): len(given)}
        own = all(id(each) in found for each in used)
        if not own or output is not served.output or id(output) in found:
            return None
        tensors = [place for place, each in enumerate(given) if isinstance(each, Tensor)]
        others = [(place, each) for place, each in enumerate(given) if not isinstance(each, Tensor)]
        constant = all(_is_constant(each) for _, each in others)
        alike = _alike([given[place] for place in tensors]) if constant else None
        if alike is None:
            return None
        apart = [place for place in tensors if type(given[place]) is not nn.Parameter]
        static = tuple([(place, is_static(given[place])) for place in apart])
        spec = served.plan.spec
        ways = [(place, way_of(given[place], spec).scrap) for place, is_static in static if not is_static]
        scraps = [(place, size, is_scrap(given[place], spec)) for place, size in ways if size is not None]
        device = served.output.device
        cast = torch.is_autocast_enabled(device.type)
        return Settled(
            func,
            served.plan._replace(known=Known()),
            key(device),
            _picking([found[id(each)] for each in used]),
            tuple(kwargs),
            len(given) + 1,
            _picking(tensors),
            alike,
            static,
            tuple(scraps),
            tuple(others),
            (device.type, torch.get_autocast_dtype(device.type)) if cast else None,
        )


def _picking(places: list[int]) -> _Pick:
    """What takes the items at these places."""
    return itemgetter(*places) if len(places) > 1 else itemgetter(slice(places[0], places[0] + 1))


def _is_same(value: Any, other: Any) -> bool:
    same: bool = type(other) is type(value) and other == value
    return same and (value != 0 or str(other) == str(value))  # zeros have signs


def _is_constant(value: Any) -> bool:
    return type(value) in _CONSTANT or (type(value) is tuple and all(map(_is_constant, value)))


def _alike(tensors: list[Tensor]) -> Callable[..., bool] | None:
    """Tells whether other tensors are alike; None if not even these are (one is there twice)."""
    if TensorGuards is None:
        return None
    known = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    return known.check if known.check(*tensors) else None
