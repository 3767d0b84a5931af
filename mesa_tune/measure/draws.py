"""The batches that a workload draws: whether they can be made again, and which of them is the longest.

What is hard: batches padded to their longest sample differ in length from draw to draw, and the memory that a
training needs is that of the longest. So the longest of the first draws stands for all. Models may skip
layers at random (LayerDrop, stochastic depth), and need most where they skip none: so the random state in
which they compute the most stands for all.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.jit import ScriptModule
from torch.utils._pytree import tree_leaves

from mesa_tune.conversion.python_state.watch import Watch
from mesa_tune.measure.errors.step_gradient import undisturbed
from mesa_tune.measure.memory.meter import tensors_in
from mesa_tune.notice import warn_once
from mesa_tune.workload.user_code import located
from mesa_tune.workload.workload import Workload

DRAWS = 8
"""How many draws are made to find the longest."""
STATES, MOST_STATES = 8, 32
"""How many random states are tried, and how many where they differ."""

FURTHER = 3
"""How many further batches are looked at: steps may differ by what they contain."""

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

    def further(self, workload: Workload, count: int) -> Iterator[tuple[int, Any]]:
        """Yield number and batch of the first `count` other draws."""
        numbers = [draw for draw in range(count + 1) if draw != self.draw][:count]
        return ((draw, workload.make_batch(draw=draw)) for draw in numbers)

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


class Ran(NamedTuple):
    """A step that was looked at: random state, draw, the modules that ran, bytes of the innermost ones."""

    random_state: int
    draw: int
    modules: frozenset[str]
    nbytes: int


@dataclass(frozen=True)
class Looked:
    """A workload in the random state in which its step computes the most, and notes.

    `others`: random states and draws of further steps, of which each runs modules that none before it does,
    and in which share of the steps these run. `shares`: of the steps in which each module runs.
    """

    workload: Workload
    notes: tuple[str, ...] = ()
    others: tuple[tuple[int, int, float], ...] = ()
    shares: Mapping[str, float] = field(default_factory=dict)


def look(workload: Workload, model: nn.Module, longest: LongestBatch, *, draws: int = FURTHER) -> Looked:
    """Run steps in several random states, and on further `draws`; `model` stays as it is.

    The forward of a loss, or the user's own step, runs `STATES` times, or once if it draws no random numbers.
    """
    with _looking(workload, model) as run:
        states = [run(0, longest.draw, longest.batch)]
        drawing = run.drew
        while drawing and len(states) < (MOST_STATES if len({ran.nbytes for ran in states}) > 1 else STATES):
            states.append(run(len(states), longest.draw, longest.batch))
        dearest = max(states, key=lambda ran: ran.nbytes)
        further = longest.further(workload, draws)
        ran = [*states, *(run(dearest.random_state, *drawn) for drawn in further)]
    others, seen = list[tuple[int, int, float]](), dearest.modules
    for one in ran:
        if new := one.modules - seen:
            share = sum(bool(new & other.modules) for other in ran) / len(ran)
            others.append((one.random_state, one.draw, share))
            seen |= new
    counts = Counter(name for one in ran for name in one.modules)
    looked = Looked(workload, (), tuple(others), {name: count / len(ran) for name, count in counts.items()})
    sizes = [one.nbytes for one in states]
    if len(set(sizes)) == 1:
        return looked
    share = sizes.count(dearest.nbytes) / len(sizes)
    note = (
        f"steps differ, as the model skips layers at random: the dearest of {len(sizes)} was traced; "
        f"{share:.0%} are as dear"
    )
    return replace(looked, workload=replace(workload, random_state=dearest.random_state), notes=(note,))


def _generators(device: str) -> list[Any]:
    """Return the states of the generators that models draw from."""
    tensors = [torch.get_rng_state()]
    if torch.device(device).type == "cuda":
        tensors.append(torch.cuda.get_rng_state(device))
    return [random.getstate(), repr(np.random.get_state()), *(tensor.tolist() for tensor in tensors)]


class _Steps:
    """Steps of a workload of which the modules that run are seen; `drew`: the last drew numbers."""

    def __init__(self, workload: Workload, model: nn.Module) -> None:
        self.workload, self.model, self.watch = workload, model, Watch(model)
        self.modules: set[str] = set()
        self.nbytes, self.drew = 0, False

    def see(self, name: str, module: nn.Module, _: Any, output: Any) -> None:
        """Note that a module ran, and the bytes that an innermost one made: a hook of it."""
        self.modules.add(name)
        if next(module.children(), None) is None:
            self.nbytes += sum(tensor.nbytes for tensor in tree_leaves(output) if isinstance(tensor, Tensor))

    def __call__(self, state: int, draw: int, batch: Any) -> Ran:
        """Take a step, and undo what it does."""
        tried, own = replace(self.workload, random_state=state), self.workload.step is not None
        self.modules, self.nbytes = set(), 0
        with undisturbed(self.watch, tried.step_seed, tried.device, parameters=own):
            before = _generators(tried.device)
            if own:
                tried.take_step(self.model, batch, tried.make_optimizer(self.model))
            else:
                tried.compute_loss(self.model, batch, check=False)
            self.drew = before != _generators(tried.device)
        return Ran(state, draw, frozenset(self.modules), self.nbytes)


@contextmanager
def _looking(workload: Workload, model: nn.Module) -> Iterator[_Steps]:
    """Yield what takes steps of the body; gradients are as before."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    steps = _Steps(workload, model)
    handles = [
        module.register_forward_hook(partial(steps.see, name))
        for name, module in model.named_modules()
        if not isinstance(module, ScriptModule)
    ]
    try:
        yield steps
    finally:
        for handle in handles:
            handle.remove()
        for parameter, gradient in gradients:  # a loss may call backward() itself
            parameter.grad = gradient


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
