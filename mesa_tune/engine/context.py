"""Which modules of conversions run in this thread, and what is known of each run."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._C import _autograd
from torch.autograd import forward_ad

from mesa_tune.codecs import Spec
from mesa_tune.engine.cache import Settled
from mesa_tune.engine.formula import Route
from mesa_tune.engine.function import Memories
from mesa_tune.engine.rematerialize import Traced
from mesa_tune.notice import warn_once


class Host(Protocol):
    """What routing needs of a conversion."""

    owed: int
    waits: bool
    settled: dict[str, Settled]
    shapes: dict[str, list[torch.Size | None]]

    def begin(self, batch: Sequence[Tensor], root: nn.Module | None = None) -> None: ...
    def end(self) -> None: ...
    def spec(self, layer: str, tag: str, module: str) -> Spec | None: ...
    def key(self, device: torch.device) -> Tensor: ...
    def note(self, layer: str) -> None: ...
    def memory(self, layer: str) -> Memories | None: ...
    def is_static(self, tensor: Tensor) -> bool: ...


class Frame:
    """One running module: its name, its own route, and how often each function was called in this run.

    `hooks` and `task` are the saved-tensor hooks and the backward under which it began. `prefix` begins the
    names of its calls.
    """

    __slots__ = ("batch", "counts", "hooks", "host", "is_loss", "module", "own", "prefix", "task", "traced")

    def __init__(
        self,
        host: Host,
        module: str,
        own: Route | None,
        batch: list[Tensor],
        traced: Traced,
        hooks: Any,
        task: int,
        is_loss: bool = False,
    ) -> None:
        self.host = host
        self.module = module
        self.own = own
        self.batch = batch
        self.traced = traced
        self.hooks = hooks
        self.task = task
        self.is_loss = is_loss
        self.prefix = module
        self.counts: dict[str, int] = {}

    def within(self, name: str) -> Frame:
        """Return the frame of a Python function of PyTorch, called in this module under this name."""
        frame = Frame(
            self.host, self.module, None, self.batch, self.traced, self.hooks, self.task, self.is_loss
        )
        frame.prefix = name
        return frame

    def surrounds(self) -> bool:
        """Whether what runs now is this module's own run.

        It is not below somebody else's saved-tensor hooks, nor in a backward that began since (one called in
        the body of `compress_saved` sees the mode and the hooks of the forward), nor under a transform that
        began in it. Not for traced code.
        """
        return self.hooks is top_hooks() and current_task() == self.task and not transformed()

    def layer(self, route: Route) -> str:
        """The name of the layer whose call comes next."""
        if self.own is not None and self.own.name == route.name:
            self.own = None
            return self.module
        return self.numbered(route.name)

    def numbered(self, function: str) -> str:
        """`prefix.function.position`; counts the call."""
        position = self.counts.get(function, 0)
        self.counts[function] = position + 1
        return f"{self.prefix}.{function}.{position}" if self.prefix else f"{function}.{position}"

    def is_static(self, tensor: Tensor) -> bool:
        """Whether `tensor` is (a view of) a parameter, a buffer or part of the batch: never encoded, never
        counted.

        A loss is entered without arguments, so whatever has no gradient there counts as batch.
        """
        if type(tensor) is nn.Parameter or (self.is_loss and not tensor.requires_grad):
            return True
        base = tensor._base
        base = tensor if base is None else base
        if type(base) is not Tensor and isinstance(base, nn.Parameter):  # asking a Parameter's class is slow
            return True
        if torch.compiler.is_compiling():
            return any(base is given or tensor is given for given in self.batch)
        return self.host.is_static(tensor)


class _State(threading.local):
    """`function` is the torch function that runs; `layer` its name, once somebody asked for it.

    `began`: the number of the first autograd node that the last routed call under an observer could make.
    """

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.active = False
        self.paused = False
        self.began = 0
        self.function: Any = None
        self.layer: str | None = None


state = _State()

top_saved_hooks = _autograd._top_saved_tensors_default_hooks
current_task = torch._C._current_graph_task_id


def top_hooks() -> Any:
    """The innermost saved-tensor hooks: what packs."""
    top = top_saved_hooks(True)
    return None if top is None else top[0]  # type: ignore[redundant-expr]


def transformed() -> bool:
    """Whether a transform of `torch.func` or forward-mode differentiation is on: ours know neither."""
    if not (torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0):
        return False
    warn_once(
        "mesa-tune: what runs under transforms of torch.func (grad, vjp, jvp, vmap) or forward-mode "
        "differentiation stores as PyTorch does, uncompressed; loss.backward() stores by the policy."
    )
    return True


def inside_backward() -> bool:
    """Whether this runs inside autograd's backward (a checkpointed part being computed again)."""
    return not torch.compiler.is_compiling() and current_task() != -1


def running(host: Host) -> bool:
    """Whether a module of `host` is running in this thread."""
    return bool(state.frames) and state.frames[-1].host is host


def surroundings() -> tuple[Any, int]:
    """The saved-tensor hooks and the backward under which a module begins."""
    return (None, -1) if torch.compiler.is_compiling() else (top_hooks(), current_task())
