"""Saved-tensor hooks: what functions without a formula save, stored where that is safe (Rule 10)."""

from __future__ import annotations

import sys
from types import FrameType

import torch
from torch import Tensor
from torch._C import _autograd

from mesa_tune.codecs import Spec
from mesa_tune.conversion.hooked import HOOKED
from mesa_tune.engine.observer import watch
from mesa_tune.engine.routing import Frame, Hooks, state, top_hooks
from mesa_tune.engine.storage import Packing, decided, restore, store


def hooks_possible() -> bool:
    """Whether our hooks may be installed: never above those of somebody else, who would lose tensors."""
    return _autograd._saved_tensors_hooks_is_enabled() and top_hooks() is None  # type: ignore[attr-defined]


class _Hooked:
    """A tensor that a hook has taken: encoded, or as it was with the version it had."""

    __slots__ = ("layer", "packing", "parts", "spec", "version")

    def __init__(
        self, layer: str, parts: list[Tensor], packing: Packing | None, spec: Spec | None, version: int
    ) -> None:
        self.layer, self.parts, self.packing, self.spec, self.version = layer, parts, packing, spec, version


def _unchanged(tensor: Tensor) -> _Hooked:
    # A node that held its own output would never die, as in the graph of a loss that is only logged.
    alias = tensor if tensor.is_leaf or _was_given(tensor) else tensor.detach()
    return _Hooked("", [alias], None, None, tensor._version)


def _was_given(tensor: Tensor) -> bool:
    """Whether a routed call, which comes here under an observer only, did not make `tensor` itself.

    PyTorch holds such a tensor as it is, and other layers find it by that.
    """
    return state.paused and tensor.grad_fn is not None and tensor.grad_fn._sequence_nr() < state.began


def pack(tensor: Tensor) -> _Hooked:
    frame = state.frames[-1] if state.frames else None
    if frame is None or not frame.surrounds():
        return _unchanged(tensor)
    if watch.observer is not None:
        watch.observer.saved(other_layer(frame), tensor)
    spec = None if state.paused else _other_spec(frame, tensor)
    if spec is None:
        return _unchanged(tensor)
    layer = other_layer(frame)
    packing = decided(tensor, spec, layer)
    if not packing.packed and spec.levels > 0:
        return _unchanged(tensor)
    parts = store(tensor.detach(), packing, spec, frame.key(tensor.device))
    packing = packing.in_parts(len(parts))
    if watch.observer is not None:
        watch.observer.stored(layer, (tensor,), (packing,), (parts,), [], 0)
    return _Hooked(layer, parts, packing, spec, 0)


def other_layer(frame: Frame) -> str:
    """Return the name of the call that saves a tensor."""
    if state.function is None:
        name = _function_class()  # one layer, however many of its calls there are
        return f"{frame.prefix}.{name}.0" if frame.prefix else f"{name}.0"
    if state.layer is None:
        state.layer = frame.numbered(getattr(state.function, "__name__", "call").strip("_"))
    return state.layer


def _function_class() -> str:
    """Return the class of the `autograd.Function` that runs, which is no torch function and has no name."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _APPLY:
        frame = frame.f_back
    return "call" if frame is None else str(frame.f_locals["cls"].__name__)


_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]


def _other_spec(frame: Frame, tensor: Tensor) -> Spec | None:
    # No torch function: somebody's autograd.Function, whose formula is unknown (Rule 7), or a checkpoint's
    # inputs.
    if state.function not in HOOKED or tensor.layout is not torch.strided or not tensor.is_floating_point():
        return None
    if frame.is_static(tensor):
        return None
    spec = frame.host.spec(other_layer(frame), "other", frame.module)
    if spec is None or tensor.numel() <= spec.min_elements:
        return None
    return spec.hooked if spec.levels else spec


def unpack(hooked: _Hooked) -> Tensor:
    if hooked.packing is not None and hooked.spec is not None:
        tensor = restore(hooked.parts, hooked.packing, hooked.spec)
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
