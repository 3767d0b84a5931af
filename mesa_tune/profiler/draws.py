"""The batches that a workload draws: whether they can be made again, and which of them is the longest.

What is hard: batches padded to their longest sample differ in length from draw to draw, and the memory that a
training needs is that of the longest. So the longest of the first draws stands for all. Models may skip
layers at random (LayerDrop, stochastic depth), and need most where they skip none: so the random state in
which they compute the most stands for all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.jit import ScriptModule
from torch.utils._pytree import tree_leaves

from mesa_tune.conversion.python_state.watch import Watch
from mesa_tune.notice import warn_once
from mesa_tune.profiler.errors.step_gradient import undisturbed
from mesa_tune.profiler.memory.meter import tensors_in
from mesa_tune.workload.user_code import located
from mesa_tune.workload.workload import Workload

DRAWS = 8
"""How many draws are made to find the longest."""
STATES, MOST_STATES = 8, 32
"""How many random states are tried, and how many where they differ."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class LongestBatch:
    """The batch with the most elements among the first `DRAWS`: its draw, itself, and notes on all of them.

    `differ`: the draws differ in length.
    """

    draw: int
    batch: Any
    differ: bool
    notes: tuple[str, ...]

    def notes_on(self, smaller: Any, size: int, smaller_size: int) -> tuple[str, ...]:
        """Return a note if `smaller`, the same draw with fewer samples, has other lengths than `batch`."""
        scaled = [tuple(smaller_size if n == size else n for n in shape) for shape in _shapes(self.batch)]
        if not self.differ or scaled == _shapes(smaller):
            return ()
        what = f"draw {self.draw} of {smaller_size} samples has other lengths"
        return (f"{what}: bytes at other batch sizes are estimates",)


def longest_batch(workload: Workload) -> LongestBatch:
    """Make the first `DRAWS` batches of `workload`, and return the longest; the first one of equals.

    Make the first one twice, and warn if the two are not equal bit for bit.
    """
    draw, batch = 0, workload.make_batch()
    notes = _irreproducible(workload, batch)
    shapes = [_shapes(batch)]
    for number in range(1, DRAWS):
        other = workload.make_batch(draw=number)
        shapes.append(_shapes(other))
        if _elements(shapes[number]) > _elements(shapes[draw]):
            draw, batch = number, other
    differ = any(drawn != shapes[0] for drawn in shapes)
    return LongestBatch(draw, batch, differ, (*notes, *(_lengths(shapes, draw) if differ else ())))


def in_dearest_state(workload: Workload, model: nn.Module, batch: Any) -> tuple[Workload, tuple[str, ...]]:
    """Return `workload` with the random state in which its forward computes the most; a note if they differ.

    The forward of a loss runs `STATES` times, and `model` stays as it is. The user's own step stays in the
    state that it has.
    """
    if workload.step is not None:
        return workload, ()
    watch, computed = Watch(model), list[int]()
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    while len(computed) < (MOST_STATES if len(set(computed)) > 1 else STATES):
        tried = replace(workload, random_state=len(computed))
        with _counting(model) as sizes, undisturbed(watch, tried.step_seed, tried.device):
            workload.compute_loss(model, batch, check=False)
        computed.append(sum(sizes))
    for parameter, gradient in gradients:  # a loss may call backward() itself
        parameter.grad = gradient
    most = max(computed)
    if most == min(computed):
        return workload, ()
    share = computed.count(most) / len(computed)
    note = (
        f"steps differ, as the model skips layers at random: the dearest of {len(computed)} was traced; "
        f"{share:.0%} are as dear"
    )
    return replace(workload, random_state=computed.index(most)), (note,)


@contextmanager
def _counting(model: nn.Module) -> Iterator[list[int]]:
    """Yield a list that gets the bytes of all that innermost modules return in the body."""
    sizes: list[int] = []

    def count(_: nn.Module, __: Any, output: Any) -> None:
        sizes.extend(tensor.nbytes for tensor in tree_leaves(output) if isinstance(tensor, Tensor))

    leaves = [module for module in model.modules() if not any(True for _ in module.children())]
    handles = [
        module.register_forward_hook(count) for module in leaves if not isinstance(module, ScriptModule)
    ]
    try:
        yield sizes
    finally:
        for handle in handles:
            handle.remove()


def _irreproducible(workload: Workload, batch: Any) -> tuple[str, ...]:
    first, second = tensors_in(batch), tensors_in(workload.make_batch())
    if len(first) == len(second) and all(map(_same_bits, first, second)):
        return ()
    text = (
        f"{located(workload.batch, workload.path)}: batch() makes another batch under the same seed, so no "
        "measurement can be repeated: use the global generators of torch, NumPy or random, or seed its own"
    )
    warn_once(text)
    return (text,)


def _lengths(shapes: list[list[Shape]], longest: int) -> tuple[str, ...]:
    counts = [_elements(drawn) for drawn in shapes]
    ends = shapes[counts.index(min(counts))], shapes[longest]
    low, high = (max(drawn, key=lambda shape: _elements([shape])) for drawn in ends)
    what = f"batches differ in length: the largest tensor of the first {len(shapes)} draws is"
    return (f"{what} {_text(low)} to {_text(high)}; draw {longest}, the longest, was traced",)


def _shapes(batch: Any) -> list[Shape]:
    return [(tensor.numel(),) if tensor.is_nested else tuple(tensor.shape) for tensor in tensors_in(batch)]


def _elements(shapes: list[Shape]) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes)


def _text(shape: Shape) -> str:
    return " × ".join(map(str, shape))


def _same_bits(first: Tensor, second: Tensor) -> bool:
    if _shapes([first]) != _shapes([second]) or first.dtype != second.dtype:
        return False
    if isinstance(first, FakeTensor):  # it has no values
        return True
    return torch.equal(_bytes(first), _bytes(second))


def _bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of all elements, by which NaN equals itself."""
    if tensor.is_nested:
        dense = tensor.values()
    else:
        dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
    return dense.detach().contiguous().view(-1).view(torch.uint8)
