"""Tensors that consist of another tensor: a DTensor of its shard, the result of a collective of what arrives.

PyTorch calls them traceable wrapper subclasses. No formula takes them: a kernel would need to know how its
result is distributed. PyTorch's own call does, so it runs, and the hooks store its inputs: of each the shard.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

from torch import Tensor

from mesa_tune.codecs import Spec
from mesa_tune.notice import warn_once

INPUTS: Final = {"linear", "matmul", "addmm", "mul", "gelu", "silu", "layer_norm", "rms_norm"}
"""Functions whose formulas, too, store nothing but their inputs, or what has the shape of these."""

NOT_COMPILED: Final = "mesa-tune: under torch.compile, calls on distributed tensors stay uncompressed."
NOT_STORED: Final = "mesa-tune: complex, sparse and nested tensors stay uncompressed: no codec stores them."


class WrappedCall(NamedTuple):
    """A call on tensors that consist of others, and how the hooks store its inputs.

    `storages`, `shapes`: those of the inputs. What has the shape of an input counts as one: RMSNorm's product
    with the inverse root, which its weight's gradient is linear in.
    """

    spec: Spec
    storages: frozenset[int]
    shapes: frozenset[tuple[int, ...]]

    @staticmethod
    def of(spec: Spec, inputs: Iterable[Tensor]) -> WrappedCall:
        """Return the call that stores `inputs`, none of them static, under `spec`."""
        inner = [opened(tensor)[0] for tensor in inputs]
        return WrappedCall(spec, frozenset(map(_storage, inner)), frozenset(tuple(t.shape) for t in inner))

    def stores(self, tensor: Tensor) -> bool:
        """Return whether `tensor`, which autograd saves and which is not static, counts as an input."""
        inner = opened(tensor)[0]
        return _storage(inner) in self.storages or tuple(inner.shape) in self.shapes


class _State(threading.local):
    call: WrappedCall | None = None


state = _State()
"""The call on tensors that consist of others which runs now."""


def run_hooked(run: Callable[[], Any], call: WrappedCall) -> Any:
    """Return `run()`, whose inputs the hooks store as `call` says."""
    before, state.call = state.call, call
    try:
        return run()
    finally:
        state.call = before


def compute_themselves(kinds: Iterable[type]) -> bool:
    """Return whether tensors of classes with a `__torch_function__` have functions of their own.

    Those are wrapper subclasses, such as torchao's quantized weights: no formula can take their values. Warn
    of nested tensors.
    """
    own = [kind for kind in kinds if hasattr(kind, "__tensor_flatten__")]
    if any(kind.__name__ == "NestedTensor" for kind in own):
        warn_once(NOT_STORED)
    return bool(own)


def is_wrapper(tensor: Any) -> bool:
    """Return whether this is a tensor that consists of others."""
    return hasattr(type(tensor), "__tensor_flatten__") and isinstance(tensor, Tensor)


def opened(tensor: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return the tensor that `tensor` consists of, and a function that makes one like `tensor` of another.

    A tensor that consists of none or of several is returned itself.
    """
    if not is_wrapper(tensor):
        return tensor, _same
    wait = getattr(tensor, "trigger_wait", None)
    if wait is not None:  # the result of a collective, which may still be under way
        return wait(), _same
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    parts = {name: getattr(tensor, name) for name in names}
    tensors = [name for name, part in parts.items() if isinstance(part, Tensor)]
    if len(tensors) != 1:
        return tensor, _same
    inner = parts.pop(tensors[0])
    remade: Any = type(tensor).__tensor_unflatten__  # type: ignore[attr-defined]
    size, stride = tensor.shape, tensor.stride()
    return opened(inner)[0], lambda other: remade({**parts, tensors[0]: other}, context, size, stride)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _storage(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address
