"""`Formula`: PyTorch's own forward of a function, and a backward from saved tensors.

The two halves are plain functions without side effects, so that training (`function.py`) and a profile,
which runs a backward again with differently stored tensors, use the same formula.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mesa_tune.codecs import Codebook
from mesa_tune.engine.saved import SavedTensor
from mesa_tune.ops.maps import Deferred

Static = tuple[Any, ...]
"""Everything about a call that is not a tensor: hashable, constant under `torch.compile`."""

Needs = tuple[bool, ...]
"""For each tensor input, whether its gradient is needed."""

Grads = tuple[Tensor | None, ...]
"""A gradient, or None, for each tensor input."""


class Result(NamedTuple):
    """What a forward returns: its output, tensors to save in fewer bits, and tensors to save exactly.

    `in_place`: the output is the first input, changed. `marked`: of so many lossy tensors, the first ones,
    `Saved.exact` also has which rows are zero (`storage.pack_zero_rows`), after the exact tensors.
    """

    output: Tensor
    lossy: tuple[Tensor | Deferred, ...] = ()
    exact: tuple[Tensor | None, ...] = ()
    in_place: bool = False
    marked: int = 0


class Saved(NamedTuple):
    """What a backward takes: the call's constants, and the tensors of `Result`, in the same order."""

    static: Static
    needs: Needs
    lossy: Sequence[SavedTensor]
    exact: tuple[Any, ...]


class Ingredients(NamedTuple):
    """The tensors from which a function's output is rematerialized, decoded. See `Rebuild`."""

    static: Static
    lossy: Sequence[Tensor]
    exact: Sequence[Tensor]
    references: Sequence[Tensor | None]
    inputs: Sequence[Tensor]


@dataclass(frozen=True, eq=False)
class Rebuild:
    """How to rematerialize a function's output from what the function saves (`store: derive`).

    `run(ingredients)` returns the output. `saved`: for each lossy tensor of the function, the position of the
    input that it is (`saved_is_input`), or whose shape and dtype it has. `exact`: positions in
    `Result.exact`. `references`: positions of inputs that exist anyway (parameters). `inputs`: positions of
    inputs that are rematerialized first. `when(static, needs)`: whether a call saves all that this takes.
    """

    run: Callable[[Ingredients], Tensor]
    saved: tuple[int, ...] = (0,)
    saved_is_input: bool = False
    exact: tuple[int, ...] = ()
    references: tuple[int, ...] = ()
    inputs: tuple[int, ...] = ()
    when: Callable[[Static, Needs], bool] = lambda static, needs: True


def _no_codebook(static: Static, levels: int) -> Codebook | None:
    return None


@dataclass(frozen=True, eq=False)
class Formula:
    """One function, `name`: `forward(static, needs, *tensors)` and `backward(saved, grad)`.

    `saves` says in words what is saved. `independent`: positions of inputs whose gradient does not involve
    the lossy tensors as long as the other inputs are parameters (a linear layer's input); a profile skips
    these. `lossless`: nothing is lossy, whatever the settings. `views`: the forward may return a view.
    `row_axis`: the axis, from the end, along which the elements of a row of every lossy tensor lie, if each
    gradient is linear in one of them (the setting `rows`); None: no rows are left out. `codebook(static,
    levels)`: fixed values of the only lossy tensor (`store: levels`), None if it has none. `rebuild`:
    how other layers rematerialize the output; None if they cannot. `is_head`: a tiled loss may go backward
    past the output, to the inputs (`engine/head.py`); `static` begins with the dtype of autocast.
    """

    name: str
    forward: Callable[..., Result]
    backward: Callable[[Saved, Tensor], Grads]
    saves: str
    independent: tuple[int, ...] = ()
    lossless: bool = False
    views: bool = False
    rebuild: Rebuild | None = None
    row_axis: Callable[[Static], int] | None = None
    codebook: Callable[[Static, int], Codebook | None] = _no_codebook
    is_head: bool = False


@dataclass(frozen=True)
class Route:
    """The route of a torch function: `serve(call, *args, **kwargs)` names the formula and its tensors.

    `name` is part of layer names (`attn.softmax.0`), `tag` is for policies. `tiles`: the setting `tile` may
    have an effect. `parameters`: the names of those parameters of `serve` that are the torch function's; a
    call with other keywords has no formula.
    """

    name: str
    tag: str
    serve: Callable[..., Any]
    tiles: bool = False
    parameters: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "parameters", frozenset(inspect.signature(self.serve).parameters))

    def spelled(self, *names: str, owners: Sequence[Any] = (torch, Tensor)) -> "Routes":
        """Return this route for the functions of these names: those of `torch` and the methods of tensors."""
        return {getattr(owner, name): self for name in names for owner in owners}


Routes = dict[Callable[..., Any], Route]
Layers = dict[type[nn.Module], Callable[..., Any]]
"""Modules whose own computation is one call of a routed function: that call's layer has the module's name."""
