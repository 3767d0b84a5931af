"""The linear layer behind a tensor of logits, and which of its rows they are (`tile` of a loss).

A tiled loss goes backward past its logits, to the input and the weight of the layer that made them (the
head). What is hard is to be sure of that layer. The autograd graph tells by which operations the loss's input
was made of its output, and versions tell that nothing has written to either since. The same operations on
small index tensors then tell which row of the head, and which class, each element is.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils._python_dispatch import _disable_current_modes


@dataclass(frozen=True, eq=False, slots=True)
class Head:
    """One call of a linear layer: input, weight and bias with their versions, and its output.

    `counter` has no elements, but the version counter of the output, and refers to nothing else of it.
    `dtype`: what autocast casts to; None without autocast.
    """

    inputs: tuple[ref[Tensor] | None, ...]
    versions: tuple[int, ...]
    output: ref[Tensor]
    counter: Tensor
    version: int
    dtype: torch.dtype | None

    @staticmethod
    def of(inputs: tuple[Tensor | None, ...], output: Tensor, dtype: torch.dtype | None) -> "Head":
        """Return the head that made `output`."""
        counter = output.detach()
        counter.data = output.new_empty(0)
        present = [tensor for tensor in inputs if tensor is not None]
        references = tuple([None if tensor is None else ref(tensor) for tensor in inputs])
        versions = tuple([tensor._version for tensor in present])
        return Head(references, versions, ref(output), counter, counter._version, dtype)

    def tensors(self) -> tuple[Tensor | None, ...] | None:
        """Return input, weight and bias; None if one is gone (FSDP frees weights), or has changed."""
        tensors = tuple([None if each is None else each() for each in self.inputs])
        present = [tensor for tensor in tensors if tensor is not None]
        same = tuple([tensor._version for tensor in present]) == self.versions
        return tensors if same and all(tensor.untyped_storage().nbytes() for tensor in present) else None


@dataclass(frozen=True, eq=False, slots=True)
class Logits:
    """The input of a loss, of this shape and dtype, with the head that made it.

    Its row `i`, counted over all dimensions but that of the classes, is row `rows[i]` of the head (None: the
    same row), and its classes are `classes` of the head's. `probe` takes part in the loss's graph without a
    gradient; see `has_watchers`.
    """

    head: Head
    tensor: ref[Tensor]
    shape: torch.Size
    dtype: torch.dtype
    rows: Tensor | None
    classes: slice
    probe: Tensor
    node: Node

    def has_watchers(self) -> bool:
        """Return whether somebody may want the gradient of the logits themselves; called in backward.

        A hook or `retain_grad` may show it. So may `autograd.grad` and `backward(inputs=...)`, under which
        the engine runs only nodes that lead to what was asked for: not the probe's.
        """
        alive = [
            tensor for reference in (self.tensor, self.head.output) if (tensor := reference()) is not None
        ]
        if any(tensor.retains_grad or tensor._backward_hooks for tensor in alive):
            return True
        return not torch._C._will_engine_execute_node(self.node)


def logits_of(tensor: Tensor) -> Logits | None:
    """Return the head that made `tensor`, an input `(N, C)`, `(N, C, d1, …)` or `(C,)` of a loss.

    Return None if it is not, through views and at most one copy (a cast), an unchanged output of a head;
    eager only.
    """
    path = _path(tensor)
    if path is None:
        return None
    head, steps = path
    tensors = head.tensors()
    if tensors is None or not _is_unchanged(tensor, head, steps):
        return None
    x, weight, _ = tensors
    assert x is not None
    assert weight is not None
    with _disable_current_modes():
        replayed = _replayed(x, weight, steps) if weight.device == tensor.device else None
        if replayed is None:
            return None
        rows, classes = replayed
        same = torch.equal(rows, torch.arange(x.shape[:-1].numel(), device="cpu"))
    moved = None if same else rows.to(tensor.device, non_blocking=True)
    probe = torch.empty(0, device=tensor.device, requires_grad=True)
    node = get_gradient_edge(probe).node
    return Logits(head, ref(tensor), tensor.shape, tensor.dtype, moved, classes, probe, node)


def is_made_by_head(_: Any, tensor: Tensor) -> bool:
    """Return whether `logits_of` finds a head; a question of a `Call`."""
    return logits_of(tensor) is not None


def _path(tensor: Tensor) -> tuple[Head, list[Any]] | None:
    """Return the head, and the autograd nodes between its output and `tensor`, first to last."""
    node: Any = tensor.grad_fn
    steps: list[Any] = []
    while node is not None:
        head = getattr(node, "head", None)
        if isinstance(head, Head):
            return head, steps[::-1]
        if node.name() not in _STEPS:
            return None
        steps.append(node)
        node = node.next_functions[0][0]
    return None


def _is_unchanged(tensor: Tensor, head: Head, steps: list[Any]) -> bool:
    """Return whether nothing was written to the output of `head`, or to the copy of it, since it was made."""
    copies = sum(step.name() in _COPIES for step in steps)
    expected = head.version if copies == 0 else 0
    return copies <= 1 and head.counter._version == head.version and tensor._version == expected


def _replayed(x: Tensor, weight: Tensor, steps: list[Any]) -> tuple[Tensor, slice] | None:
    """Return rows and classes of the last tensor, found by running `steps` on the numbers of both."""
    lead, width = x.shape[:-1], weight.shape[0]
    rows = torch.arange(lead.numel(), device="cpu").view(*lead, 1).expand(*lead, width)
    classes = torch.arange(width, device="cpu").expand(*lead, width)
    try:
        for step in steps:
            rows, classes = (_STEPS[step.name()](index, step) for index in (rows, classes))
    except RuntimeError:  # a view that joins rows and classes
        return None
    axis = 0 if rows.dim() == 1 else 1
    others = [dim for dim in range(rows.dim()) if dim != axis]
    if rows.numel() == 0 or _varies(rows, axis) or any(_varies(classes, dim) for dim in others):
        return None
    column = classes.movedim(axis, -1)[(0,) * len(others)]
    first, count = int(column[0]), len(column)
    if not torch.equal(column, torch.arange(first, first + count, device="cpu")):
        return None
    return rows.select(axis, 0).flatten(), slice(first, first + count)


def _varies(index: Tensor, dim: int) -> bool:
    """Return whether the numbers may differ along `dim`: they do not where they were expanded."""
    return index.shape[dim] > 1 and index.stride(dim) != 0


def _signed(number: int) -> int:
    """Return an argument that a node shows as unsigned."""
    return number - (1 << 64) if number > sys.maxsize else number


def _view(index: Tensor, node: Any) -> Tensor:
    return index.view(node._input_metadata[0].shape)


def _slice(index: Tensor, node: Any) -> Tensor:
    start, end, step = (_signed(n) for n in (node._saved_start, node._saved_end, node._saved_step))
    sliced: Tensor = torch.ops.aten.slice.Tensor(index, _signed(node._saved_dim), start, end, step)
    return sliced


def _select(index: Tensor, node: Any) -> Tensor:
    return index.select(_signed(node._saved_dim), _signed(node._saved_index))


def _transpose(index: Tensor, node: Any) -> Tensor:
    return index.transpose(_signed(node._saved_dim0), _signed(node._saved_dim1))


def _permute(index: Tensor, node: Any) -> Tensor:
    return index.permute([_signed(dim) for dim in node._saved_dims])


def _copy(index: Tensor, _: Any) -> Tensor:
    """Return `index` in the layout of a contiguous copy, where only what was expanded stays so."""
    core = index[tuple([slice(0, 1) if stride == 0 else slice(None) for stride in index.stride()])]
    return core.contiguous().expand(index.shape)


_VIEWS = ("View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze")
_COPIES = {"ToCopyBackward0": _copy, "CloneBackward0": _copy}
_STEPS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    **{f"{name}Backward{number}": _view for name in _VIEWS for number in range(3)},
    **_COPIES,
    "AliasBackward0": lambda index, _: index,
    "SliceBackward0": _slice,
    "SelectBackward0": _select,
    "TransposeBackward0": _transpose,
    "TBackward0": lambda index, _: index.t(),
    "PermuteBackward0": _permute,
}
"""By the name of an autograd node, its operation on an index tensor."""
