"""A call that was served once is served again without asking everything anew, as long as it is alike.

What a route decides, and what `Call.apply` finds out, takes longer than the call itself may. It goes by the
arguments' kinds and values, by the geometry of tensors among them, and by the layer's settings; and a layer's
call is mostly the twin of its last one.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mesa_tune.functional.apply import Plan, applied

Likeness = tuple[Any, ...]
_CONSTANT = {int, float, bool, str, type(None), tuple, torch.Size, torch.dtype}


class Settled(NamedTuple):
    """How a call was served: by `plan`, with the arguments at `places` (None: no tensor) as its tensors.

    `alike`: what its arguments were like.
    """

    alike: Likeness
    plan: Plan
    places: tuple[int | None, ...]

    def again(self, key: Callable[[torch.device], Tensor], args: Sequence[Any], kwargs: Any) -> Any:
        """The output for other arguments, which are alike."""
        given = (*args, *kwargs.values()) if kwargs else args
        tensors = [None if place is None else given[place] for place in self.places]
        return applied(self.plan, key(tensors[0].device), None, *tensors)  # type: ignore[union-attr]

    @staticmethod
    def of(
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        alike: Likeness | None,
        served: tuple[Plan, Sequence[Tensor | None]],
        output: Any,
    ) -> "Settled | None":
        """A call `served` by a plan with these tensors; None if they are not its own arguments, if it worked
        in place, or if nothing is `alike`.
        """
        given, (plan, tensors) = [*args, *kwargs.values()], served
        found = {id(each): place for place, each in enumerate(given)}
        if alike is None or id(output) in found:
            return None
        if any(each is not None and id(each) not in found for each in tensors):
            return None
        return Settled(alike, plan, tuple([None if each is None else found[id(each)] for each in tensors]))


def likeness(
    args: Sequence[Any], kwargs: Mapping[str, Any], is_static: Callable[[Tensor], bool]
) -> Likeness | None:
    """What two calls that are served alike have in common; None under autocast, for tensors without strides,
    and for values that may change while they stay the same object.
    """
    if torch._C._is_any_autocast_enabled():
        return None
    found: list[Any] = [*kwargs]
    for given in (*args, *kwargs.values()) if kwargs else args:
        if type(given) in _CONSTANT:
            found += type(given), given
        elif not isinstance(given, Tensor) or given.layout is not torch.strided or given.is_nested:
            return None
        else:
            found += (
                given.shape,
                given.stride(),
                given.dtype,
                given.device,
                given.requires_grad,
                is_static(given),
            )
    return tuple(found)
