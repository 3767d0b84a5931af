"""Saved-tensor hooks: pack what functions without a formula save, if the function is on a list (Rule 10).

What is hard: the hooks see every tensor that autograd saves, also those of somebody's own
`autograd.Function`, of a checkpoint, and of calls that formulas handle under an observer. These stay as they
are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._C import _autograd

from mesa_tune.codecs import Spec
from mesa_tune.conversion.hooked import HOOKED
from mesa_tune.engine import wrappers
from mesa_tune.engine.observer import watch
from mesa_tune.engine.routing import Frame, Hooks, state, top_hooks, top_saved_hooks
from mesa_tune.engine.storage import Packing, decided, restore, store
from mesa_tune.engine.wrappers import opened


def hooks_possible() -> bool:
    """Return whether our hooks may be installed: never above somebody else's, who would miss tensors."""
    return _autograd._saved_tensors_hooks_is_enabled() and top_hooks() is None  # type: ignore[attr-defined]


class HookedTensor:
    """A tensor that autograd saved through our hooks: packed, or as it was, with its version."""

    __slots__ = ("layer", "like", "packing", "parts", "spec", "version")

    def __init__(
        self,
        layer: str,
        parts: list[Tensor],
        packing: Packing | None,
        spec: Spec | None,
        version: int,
        like: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.layer, self.parts, self.packing, self.spec, self.version = layer, parts, packing, spec, version
        self.like = like


def _unpacked(tensor: Tensor) -> HookedTensor:
    # A node that refers to its own output is never freed, as in the graph of a loss that is only logged.
    alias = tensor if tensor.is_leaf or _is_input(tensor) else tensor.detach()
    return HookedTensor("", [alias], None, None, tensor._version)


def _is_input(tensor: Tensor) -> bool:
    """Return whether `tensor` existed before the routed call that saves it; known only under an observer.

    Such a tensor must be saved as the same object: other layers that save it, too, are found by that.
    """
    return state.paused and tensor.grad_fn is not None and tensor.grad_fn._sequence_nr() < state.began


def pack(tensor: Tensor) -> HookedTensor:
    """Return what autograd saves for `tensor`."""
    frame = state.frames[-1] if state.frames else None
    if frame is None or not frame.surrounds():
        return _unpacked(tensor)
    if watch.observer is not None:
        watch.observer.saved(other_layer(frame), tensor)
    spec = None if state.paused else _other_spec(frame, tensor)
    if spec is None:
        return _unpacked(tensor)
    layer = other_layer(frame)
    inner, like = opened(tensor.detach())
    packing = decided(inner, spec, layer)
    if not packing.packed and spec.levels > 0:
        return _unpacked(tensor)
    parts = store(inner, packing, spec, frame.key(inner.device))
    packing = packing.in_parts(len(parts))
    if watch.observer is not None:
        watch.observer.stored(layer, (tensor,), (packing,), (parts,), [], 0)
    return HookedTensor(layer, parts, packing, spec, 0, like)


@contextmanager
def naming() -> Iterator[None]:
    """Name the layers of the body that hooks will store when it runs again, under a checkpoint's hooks now.

    Layers get their indices after the first forward, so it must show these, too.
    """
    top = top_saved_hooks(True)
    assert top is not None

    def named(tensor: Tensor) -> Any:
        frame = state.frames[-1] if state.frames else None
        if frame is not None and frame.surrounds() and not state.paused:
            _other_spec(frame, tensor)
        return top[0](tensor)

    with torch.autograd.graph.saved_tensors_hooks(named, top[1]):
        yield


def other_layer(frame: Frame) -> str:
    """Return the name of the call that saves a tensor."""
    if state.function is None:
        name = _function_class()  # all its calls are one layer
        return f"{frame.prefix}.{name}.0" if frame.prefix else f"{name}.0"
    if state.layer is None:
        name = getattr(state.function, "__name__", "call")  # of an operator: with its overload, `.default`
        state.layer = frame.numbered(name.partition(".")[0].strip("_"))
    return state.layer


def _function_class() -> str:
    """Return the class name of the `autograd.Function` that runs, which a mode does not see."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _APPLY:
        frame = frame.f_back
    return "call" if frame is None else str(frame.f_locals["cls"].__name__)


_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]


def _other_spec(frame: Frame, tensor: Tensor) -> Spec | None:
    if (call := wrappers.state.call) is not None:
        return call.spec if not frame.is_static(tensor) and call.stores(tensor) else None
    # Without a torch function it is an autograd.Function of unknown formula (Rule 7), or a checkpoint's
    # input.
    if state.function not in HOOKED or tensor.layout is not torch.strided or not tensor.is_floating_point():
        return None
    if frame.is_static(tensor):
        return None
    spec = frame.host.spec(other_layer(frame), "other", frame.module)
    if spec is None or tensor.numel() <= spec.min_elements:
        return None
    return spec.hooked if spec.levels else spec


def unpack(hooked: HookedTensor) -> Tensor:
    """Return the tensor that autograd saved; raise RuntimeError if it was changed in place since."""
    if hooked.packing is not None and hooked.spec is not None:
        tensor = restore(hooked.parts, hooked.packing, hooked.spec)
        tensor = tensor if hooked.like is None else hooked.like(tensor)
        return tensor if watch.observer is None else watch.observer.unpacked(hooked.layer, tensor)
    tensor = hooked.parts[0]
    if tensor._version != hooked.version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"a tensor of shape {tuple(tensor.shape)} is at version {tensor._version}; "
            f"expected version {hooked.version} instead."
        )
    return tensor


HOOKS = Hooks(pack, unpack)
