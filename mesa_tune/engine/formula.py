"""What a function of ours is: PyTorch's own forward, and a backward over what was kept.

The two halves are plain functions without side effects, so that training (`function.py`) and the profiler,
which runs a backward again with differently stored tensors, use the very same formula.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mesa_tune.ops.maps import Mapped

Static = tuple[Any, ...]
"""Everything about a call that is not a tensor: hashable, constant under `torch.compile`."""

Needs = tuple[bool, ...]
"""For each tensor input, whether its gradient is wanted."""


class Result(NamedTuple):
    """What a forward gives back: its output, what may be stored in fewer bits, and what must stay exact."""

    output: Tensor
    lossy: tuple[Tensor | Mapped, ...] = ()
    exact: tuple[Tensor | None, ...] = ()
    in_place: bool = False


Tensors = Sequence[Tensor]
References = Sequence[Tensor | None]


@dataclass(frozen=True, eq=False)
class Rebuild:
    """How a function's output is made again from what the function keeps (`store: derive`).

    `run(static, lossy, exact, references, inputs)` is the output again. `kept` names, for each lossy tensor
    of the function, the input that it is (`kept_is_input`), or whose shape and dtype it has. `exact` are
    places in `Result.exact`; `references` inputs that are there anyway (parameters), `inputs` ones that are
    made again themselves. `when(static, needs)`: whether a call keeps what that takes.
    """

    run: Callable[[Static, Tensors, Tensors, References, Tensors], Tensor]
    kept: tuple[int, ...] = (0,)
    kept_is_input: bool = False
    exact: tuple[int, ...] = ()
    references: tuple[int, ...] = ()
    inputs: tuple[int, ...] = ()
    when: Callable[[Static, Needs], bool] = lambda static, needs: True


@dataclass(frozen=True, eq=False)
class Formula:
    """One function, `name`: `forward(static, needs, *tensors) -> Result` and its backward.

    `backward(static, needs, lossy, exact, grad)` returns a gradient (or None) for each of `tensors`; `lossy`
    and `exact` are what the forward named, in the same order, `lossy` as decoded. `keeps` says in words what
    is kept. `independent` lists inputs whose gradient does not involve the lossy tensors as long as the other
    inputs are parameters (a linear layer's input): the profiler skips those. `lossless`: nothing is lossy,
    whatever the settings. `piecewise` is the same backward without whole decoded copies, over what is held in
    place of `lossy`; it may return None, and `backward` then has its turn. `rebuild`: how other layers have
    its output again; None if they cannot.
    """

    name: str
    forward: Callable[..., Result]
    backward: Callable[..., tuple[Tensor | None, ...]]
    keeps: str
    independent: tuple[int, ...] = ()
    lossless: bool = False
    piecewise: Callable[..., tuple[Tensor | None, ...] | None] | None = None
    rebuild: Rebuild | None = None


class Route(NamedTuple):
    """Where a torch function goes: `serve(call, *args, **kwargs)` names the formula and its tensors.

    `name` stands in layer names (`attn.softmax.0`), `tag` in policies.
    """

    name: str
    tag: str
    serve: Callable[..., Any]


Routes = dict[Callable[..., Any], Route]
Layers = dict[type[nn.Module], Callable[..., Any]]
"""Modules whose own computation is one call of a routed function: that call's layer has the module's name."""


def wanted(grads: Sequence[Tensor | None], needs: Needs) -> tuple[Tensor | None, ...]:
    """Of the gradients that a kernel makes all at once, for as many inputs as there are, those wanted."""
    if False not in needs:
        return tuple(grads[: len(needs)])
    return tuple([each if want else None for each, want in zip(grads, needs, strict=False)])


_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype to which autocast would cast a matrix product of `x`; None outside autocast."""
    if not (torch.compiler.is_compiling() or torch._C._is_any_autocast_enabled()):
        return None
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or x.dtype == torch.float64 or not x.is_floating_point():
        return None
    return torch.get_autocast_dtype(kind)


def cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """`tensor` in `dtype`, itself if that is None (or its own: asking for that takes a microsecond)."""
    return tensor if dtype is None or tensor.dtype is dtype else tensor.to(dtype)


Like = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor."""


def like(tensor: Tensor) -> Like:
    """Return the shape and dtype of `tensor`."""
    return tuple(tensor.shape), tensor.dtype


def gathered(grad: Tensor, operand: Like) -> Tensor:
    """Return `grad` summed over what an operand was repeated along, in the operand's dtype."""
    shape, dtype = operand
    return cast(grad if grad.shape == shape else grad.sum_to_size(shape), dtype)


def narrowed(index: Tensor, size: int) -> Tensor:
    """Return indices of a dimension of this size in as few bytes as hold them: 1, 2 or 4."""
    return index.to(torch.uint8 if size <= 1 << 8 else torch.int16 if size <= 1 << 15 else torch.int32)


def unviewed(tensor: Tensor) -> Tensor:
    """`tensor`, no view to autograd: an in-place operation on a view that a Function returns would fail."""
    if torch.compiler.is_compiling():
        return renewed(tensor)
    return tensor if tensor._base is None else tensor.data


def renewed(tensor: Tensor) -> Tensor:
    """The same memory as another tensor, no view to autograd: an input must not be returned as it is."""
    result: Tensor = _UNSAFE_VIEW(tensor, tensor.shape)
    return result


def layout_of(x: Tensor) -> torch.memory_format:
    """The memory format in which backward wants the decoded copy of `x`."""
    for dim, layout in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if x.dim() == dim and x.is_contiguous(memory_format=layout) and not x.is_contiguous():
            return layout
    return torch.contiguous_format
