"""`mt.explain_oom`: when memory runs out, what the training step takes, layer by layer, and what would fit.

What is hard: when it is asked, the step is gone, and no memory is left. So of each call of a model its sizes
are remembered. When the error has left the script, and with its frames what they held, the step is traced
on fake tensors.
"""

from __future__ import annotations

import atexit
import gc
import os
import re
import shlex
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from mesa_tune.estimation import Estimate, estimate, fitting
from mesa_tune.free_memory import MMAP_THRESHOLD, free_memory, usable_bytes
from mesa_tune.notice import say
from mesa_tune.policy import Policy
from mesa_tune.units import format_bytes, format_table, wrapped
from mesa_tune.workload.boundaries import autocast_dtype
from mesa_tune.workload.instance.optimizers import unwrapped
from mesa_tune.workload.user_code import is_out_of_memory, unexplained

_LARGEST, _HEADER = 10, ("layer", "tag", "layers", "saves")
"""So many kinds of layers are named."""
_CONVERT = "mt.convert(model, mt.Policy.uniform(level=16))"
_PLAIN_VALUES = (bool, int, float, str, type(None), torch.dtype)
_installed: list[_Calls] = []


def explain_oom() -> None:
    """Explain, if memory runs out in this process, what the training step takes and what would fit.

    Call it once, anywhere before the training. When an out-of-memory error leaves the script (from a forward,
    a loss, a backward or an optimizer's step), standard error then also says what the plain step of the model
    takes, by kind and by the ten largest layers, and what would fit in the memory that there is: 4 bits
    everywhere, the largest batch, or a search. Error and exit status stay as they are.

    Until then, a hook before every module's forward remembers the sizes of the outermost one's arguments.
    The loss counts as the output's `loss`, or else as a mean square of the outputs; the optimizer with its
    state, also before its first step. Calls of compiled models are not seen.
    """
    if not _installed:
        _installed.append(_Calls())
        _installed[0].start()


def start(_: Path, module: nn.Module) -> None:
    """Explain errors of this process, in which a call of `module` has begun (`mesa-tune run`)."""
    explain_oom()
    _installed[0].note(module)


class _Sizes(NamedTuple):
    """Geometry of a tensor among the arguments of a model."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class _Call:
    """The last call of a model with gradients, and autocast's dtype.

    `leaves`, `spec`: its arguments, `_Sizes` in place of tensors. `limit`: the bytes that a training step
    could use when the model was first called, as `room` says.
    """

    leaves: list[Any]
    spec: TreeSpec
    autocast: str | None
    limit: int
    room: str

    @cached_property
    def batch_size(self) -> int:
        """The first dimension of the first tensor that has one."""
        shapes = (leaf.shape for leaf in self.leaves if isinstance(leaf, _Sizes))
        return next((max(1, shape[0]) for shape in shapes if shape), 1)

    def batch(self, samples: int) -> Any:
        """Return arguments of so many samples."""

        def made(value: Any) -> Any:
            if not isinstance(value, _Sizes):
                return value
            counts = bool(value.shape) and value.shape[0] == self.batch_size
            return torch.zeros((samples, *value.shape[1:]) if counts else value.shape, dtype=value.dtype)

        return tree_unflatten([made(leaf) for leaf in self.leaves], self.spec)


class _Calls:
    """The calls of outermost modules that have parameters."""

    def __init__(self) -> None:
        self.known: WeakKeyDictionary[nn.Module, _Call] = WeakKeyDictionary()
        self.inside: set[int] = set()
        self.begun: _Call | None = None

    def start(self) -> None:
        """Remember calls, and explain errors that leave the script."""
        self._handle = register_module_forward_pre_hook(self.note)
        self._before = before = sys.excepthook

        def explained(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            before(kind, error, trace)
            if is_out_of_memory(error) and (found := self.explanation(trace)) is not None:
                atexit.register(found.say)

        sys.excepthook = explained

    def stop(self) -> None:
        """Undo `start`."""
        self._handle.remove()
        sys.excepthook = self._before

    def note(self, module: nn.Module, _: Any = None) -> None:
        """Remember a call, if it is one of an outermost module."""
        tracing: Any = torch._C._get_tracing_state()
        if tracing or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        if id(module) not in self.inside:
            with suppress(Exception):  # the training goes on, whatever its arguments are
                self._note_outermost(module)
        elif self.begun is not None:  # a wrapper of the forward may have entered autocast
            self.begun.autocast, self.begun = self.begun.autocast or _autocast(), None

    def _note_outermost(self, module: nn.Module) -> None:
        parameter = next(module.parameters(), None)
        if parameter is None or isinstance(parameter, FakeTensor):
            return
        before = self.known.get(module)
        if before is None:
            self.inside.update(id(part) for part in module.modules() if part is not module)
            free, room = free_memory(str(parameter.device))
            limit = free + sum(one.nbytes for one in (*module.parameters(), *module.buffers()))
        else:
            limit, room = before.limit, before.room
        leaves, spec = tree_flatten(_arguments(module))
        sizes = [_sized(leaf) for leaf in leaves]
        self.known[module] = self.begun = _Call(sizes, spec, _autocast(), limit, room)

    def explanation(self, trace: TracebackType | None) -> _Explanation | None:
        """Return that of the largest model that was called in training; None if there is none."""
        models = [(model, call) for model, call in self.known.items() if model.training]
        if not models:
            return None
        model, call = max(models, key=lambda pair: sum(one.numel() for one in pair[0].parameters()))
        return _Explanation(model, call, _where(model, trace))


def _sized(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _Sizes(tuple(value.shape), value.dtype)
    return value if isinstance(value, _PLAIN_VALUES) else None


def _arguments(module: nn.Module) -> tuple[Any, Any]:
    """Return the arguments of the running call of `module`: torch gives a hook those without names alone."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_call_impl":  # asking the locals of other frames would copy them
            call = frame.f_locals
            if call.get("self") is module:
                return tuple(call["args"]), dict(call["kwargs"])
        frame = frame.f_back
    return (), {}


def _autocast() -> str | None:
    return autocast_dtype("cuda") or autocast_dtype("cpu")


def _where(model: nn.Module, trace: TracebackType | None) -> str:
    """Return in which phase memory ran out, and in which layer if the traceback tells."""
    names = {module: name for name, module in model.named_modules() if name}
    phase, layer = "the forward", None
    for frame, _ in traceback.walk_tb(trace):
        owner = frame.f_locals.get("self")
        if isinstance(owner, Optimizer):
            return "the optimizer's step"
        if frame.f_globals.get("__name__", "").startswith("torch.autograd"):
            phase = "the backward"
        if isinstance(owner, nn.Module):
            layer = names.get(owner, layer)
    return f"{phase} of {layer}" if layer else phase


class _Explanation:
    """What the training step of `model` takes after `call`, and what fits."""

    def __init__(self, model: nn.Module, call: _Call, where: str) -> None:
        self.model, self.call, self.where = model, call, where
        self.device = "cuda" if next(model.parameters()).is_cuda else "cpu"
        self.optimizer = _optimizer_of(model)
        self.loss = ""

    def say(self) -> None:
        """Write the explanation as the process ends, when the frames of the error are gone."""
        for name in ("last_exc", "last_value", "last_traceback"):
            setattr(sys, name, None)
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()
        try:
            for line in self.lines():
                sys.stderr.write(f"{line}\n")
        except Exception as failure:  # noqa: BLE001 - the script ends with its own error
            say(f"the step cannot be explained: {unexplained(failure).splitlines()[0]}")

    def lines(self) -> Iterator[str]:
        """Yield the explanation, line by line."""
        plain = self._estimate(None)
        kind = "no optimizer, as none was found"
        if self.optimizer is not None:
            kind = f"{type(self.optimizer).__name__} with its state"
        yield ""
        yield from wrapped(
            f"memory ran out in {self.where}. At batch size {self.call.batch_size} a plain step needs "
            f"{format_bytes(plain.needed_bytes)}, and {format_bytes(self.call.limit)} were there "
            f"({self.call.room}).",
            11,
            first="mesa-tune: ",
        )
        yield from wrapped(f"Its peak is {plain.at_peak.text}.", 2, first="  ")
        yield from wrapped(f"Counted: {kind}, and {self.loss}.", 2, first="  ")
        yield ""
        yield from (f"  {line}" for line in format_table(_HEADER, _largest(plain), 78))
        yield ""
        yield from self._remedies(plain)

    def _remedies(self, plain: Estimate) -> Iterator[str]:
        limit = self.call.limit
        if plain.fits(limit):
            yield "  By this count it fits: something else has taken memory."
            return
        packed = self._estimate(Policy.uniform(level=16))
        size = format_bytes(packed.needed_bytes)
        most = fitting(lambda size: packed.at(size).needed_bytes, self.call.batch_size, limit)
        if not most:
            yield "  Not even a batch of one fits: weights, gradients and optimizer state fill the memory."
            return
        yield "  What fits:"
        if self.device == "cpu" and MMAP_THRESHOLD not in os.environ:
            yield f"    (on the CPU with {MMAP_THRESHOLD}=65536 in the environment: a process"
            yield "    otherwise keeps much of what was freed)"
        fits = packed.fits(limit)
        yield f"    4 bits everywhere, {size}:" if fits else f"    batch size {most} at 4 bits:"
        yield f"      {_CONVERT}"
        if as_it_is := fitting(lambda size: plain.at(size).needed_bytes, self.call.batch_size, limit):
            yield f"    batch size {as_it_is} as it is" + (f", {most} at 4 bits" if fits else "")
        budget = usable_bytes(limit, plain.static_bytes, plain.library_bytes, cuda=self.device == "cuda")
        yield "    the fastest plan: profile the script at a batch size that fits, then search"
        yield f"      mesa-tune profile --stop -- python {shlex.join(sys.argv)}"
        yield f"      mesa-tune search --budget {budget // 10**6}MB --batch-size {self.call.batch_size}"

    def _estimate(self, policy: Policy | None) -> Estimate:
        return estimate(
            self.model,
            self.call.batch,
            self._loss,
            policy,
            optimizer=self.optimizer or _without_state,
            autocast=self.call.autocast,
            batch_size=self.call.batch_size,
            device=self.device,
        )

    def _loss(self, model: nn.Module, batch: Any) -> Tensor:
        arguments, keywords = batch
        output = model(*arguments, **keywords)
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if isinstance(loss, Tensor):
            self.loss = "the loss that the model returns"
            return loss
        self.loss = "as the loss a mean square of what the model returns"
        parts = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        return torch.stack([(part.float() - 1).square().mean() for part in parts]).sum()


def _largest(plain: Estimate) -> list[list[str]]:
    """Return rows of the layers that save the most; those that differ in their numbers alone are one."""
    alike: dict[tuple[str, str, int], list[str]] = {}
    for layer, tag, _, size in plain.rows():
        numbered = re.sub(r"(?<![^.])\d+(?![^.])", "*", layer)
        alike.setdefault((numbered, tag, size), []).append(layer)
    kinds = sorted(alike.items(), key=lambda pair: -pair[0][2] * len(pair[1]))[:_LARGEST]
    return [
        [name if len(each) > 1 else each[0], tag, str(len(each)), format_bytes(len(each) * size)]
        for (name, tag, size), each in kinds
    ]


def _optimizer_of(model: nn.Module) -> Optimizer | None:
    """Return the optimizer of most parameters of `model`; None if there is none."""
    own = {id(parameter) for parameter in model.parameters()}
    found = [
        (sum(id(one) in own for group in item.param_groups for one in group["params"]), item)
        for item in gc.get_objects()
        if issubclass(type(item), Optimizer) and unwrapped(item) is item
    ]
    count, optimizer = max(found, key=lambda pair: pair[0], default=(0, None))
    return optimizer if count else None


def _without_state(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.0)
