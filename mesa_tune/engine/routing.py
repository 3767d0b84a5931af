"""Routing: which torch call, in which module, runs by which formula.

What is hard is that the same call can run twice, and both runs must save the same tensors: checkpointing runs
a part of the forward again inside backward, outside any mode that surrounded the model. So every module's
forward enters with its own frame. A call runs as it is while somebody else's saved-tensor hooks are above
those of the module: this is how a checkpointed function that is no module looks from inside.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch._C import _autograd
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from mesa_tune.codecs import STATEFUL, Spec
from mesa_tune.compiling import with_side_effects
from mesa_tune.engine import sums
from mesa_tune.engine.cache import CallCache
from mesa_tune.engine.call import Call
from mesa_tune.engine.formula import Route, Routes
from mesa_tune.engine.function import MISS, Memories, run_cached
from mesa_tune.engine.observer import watch
from mesa_tune.engine.registry import StaticTensors
from mesa_tune.engine.rematerialize import Traced, changed
from mesa_tune.engine.wrappers import compute_themselves, opened
from mesa_tune.notice import warn_once


class Host(Protocol):
    """The part of a conversion that routing uses."""

    calls: CallCache
    keys: dict[torch.device, Tensor]
    specs: dict[str, Spec | None]
    static: StaticTensors

    def spec(self, layer: str, tag: str, module: str) -> Spec | None: ...
    def key(self, device: torch.device) -> Tensor: ...
    def note(self, layer: str) -> None: ...
    def memory(self, layer: str) -> Memories | None: ...


@dataclass(eq=False, slots=True)
class Frame:
    """One running module: its name, the route of its own computation, and how often it called each function.

    `hooks` and `task` are the saved-tensor hooks and the backward under which it began. Names of its calls
    begin with `prefix`.
    """

    host: Host
    module: str
    prefix: str
    own: Route | None
    batch: list[Tensor]
    traced: Traced
    hooks: Any
    task: int
    is_loss: bool = False
    counts: dict[str, int] = field(default_factory=dict)

    def within(self, name: str) -> Frame:
        """Return the frame of a Python function of PyTorch, called in this module under this name."""
        surrounding = (self.batch, self.traced, self.hooks, self.task)
        return Frame(self.host, self.module, name, None, *surrounding, self.is_loss)

    def below(self, module: str, own: Route | None = None) -> Frame:
        """Return the frame of a module that runs inside this one."""
        return Frame(self.host, module, module, own, self.batch, self.traced, self.hooks, self.task)

    def surrounds(self) -> bool:
        """Return whether the code that runs now belongs to this module's run; eager only.

        It does not under somebody else's saved-tensor hooks, in a backward that began since (if called in the
        body of `compress_saved`, it has the mode and the hooks of the forward), or under a transform that
        began since.
        """
        return self.hooks is top_hooks() and current_task() == self.task and not transformed()

    def layer(self, route: Route) -> str:
        """Return the name of the layer whose call comes next."""
        if self.own is not None and self.own.name == route.name:
            self.own = None
            return self.module
        return self.numbered(route.name)

    def numbered(self, function: str) -> str:
        """Count a call of `function`, and return its name: `prefix.function.position`."""
        position = self.counts.get(function, 0)
        self.counts[function] = position + 1
        return f"{self.prefix}.{function}.{position}" if self.prefix else f"{function}.{position}"

    def key(self, device: torch.device) -> Tensor:
        """The one-element int64 tensor that rounding noise depends on."""
        return self.host.keys[device] if device in self.host.keys else self.host.key(device)

    def note(self, layer: str) -> None:
        """Note that another layer rematerializes the output of `layer`."""
        self.host.note(layer)

    def is_static(self, tensor: Tensor) -> bool:
        """Return whether `tensor` is (a view of) a parameter, a buffer or part of the batch: never encoded.

        A loss is entered without arguments, so every tensor without a gradient counts as batch there.
        """
        if type(tensor) is nn.Parameter or (self.is_loss and not tensor.requires_grad):
            return True
        base = tensor._base
        base = tensor if base is None else base
        if type(base) is not Tensor and isinstance(base, nn.Parameter):  # asking a Parameter's class is slow
            return True
        if torch.compiler.is_compiling():
            return any(base is given or tensor is given for given in self.batch)
        return self.host.static.has(opened(tensor)[0])


class _State(threading.local):
    """`function` is the torch function that runs, `layer` its name, computed when it is asked for.

    `began`: number of the first autograd node that the last routed call under an observer could create.
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
    """Return the pack function of the innermost saved-tensor hooks."""
    top = top_saved_hooks(True)
    return None if top is None else top[0]  # type: ignore[redundant-expr]


def transformed() -> bool:
    """Return whether `torch.func` or forward-mode differentiation is on; formulas support neither."""
    if not (torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0):
        return False
    warn_once(
        "mesa-tune: what runs under transforms of torch.func (grad, vjp, jvp, vmap) or forward-mode "
        "differentiation stores as PyTorch does, uncompressed; loss.backward() stores by the policy."
    )
    return True


def inside_backward() -> bool:
    """Return whether this runs inside autograd's backward (a checkpointed part that runs again)."""
    return not torch.compiler.is_compiling() and current_task() != -1


def running(host: Host) -> bool:
    """Return whether a module of `host` is running in this thread."""
    return bool(state.frames) and state.frames[-1].host is host


def surroundings() -> tuple[Any, int]:
    """Return the saved-tensor hooks and the backward under which a module begins."""
    return (None, -1) if torch.compiler.is_compiling() else (top_hooks(), current_task())


push_hooks = _autograd._push_saved_tensors_default_hooks
pop_hooks = _autograd._pop_saved_tensors_default_hooks


class Hooks(NamedTuple):
    """Our saved-tensor hooks."""

    pack: Callable[[Tensor], Any]
    unpack: Callable[[Any], Tensor]

    def runs_twice(self, frame: Frame, _: Any = None) -> bool:
        """Return whether a module may belong to a checkpointed part, which runs again in backward.

        Saved tensors of the first run are freed at once, those of the second are not. So a call could use
        another's only in the second run, and would not save the same tensors. Here each layer stores its own
        copy.
        """
        return frame.task != -1 or not (frame.hooks is None or frame.hooks is self.pack)


class Opened(NamedTuple):
    """The name of a function in layer names, and its copy whose body is routed."""

    name: str
    body: Callable[..., Any]


class RoutingMode(TorchFunctionMode):
    """Runs torch calls by their formulas while a module of a conversion runs.

    `routes` are the functions that have a formula; the bodies of those in `opened` are routed.
    """

    def __init__(self, routes: Routes, opened: Mapping[Callable[..., Any], Opened], hooks: Hooks) -> None:
        super().__init__()
        self.routes, self.opened, self.hooks = routes, opened, hooks

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if types and compute_themselves(types):
            return _passed(func, args, kwargs)
        if torch.compiler.is_compiling() and state.frames:
            return self._traced(func, args, kwargs)
        route = self.routes.get(func)
        if route is not None:
            return self._serve(route, func, args, kwargs, False)
        if func in self.opened and _is_serving():
            return self._inside(func, args, kwargs)
        output = _passed(func, args, kwargs)
        if func in sums.ADDITIONS:
            sums.note(output, args, kwargs)
        return output

    def _traced(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is torch.Tensor.unflatten:
            func = torch.unflatten  # the method calls super(), which cannot be traced under a mode
        elif func is torch.Tensor.norm:
            func = torch.norm  # a method in Python, which tracing does not find in a table
        elif func is checkpoint and args:
            return func(partial(with_side_effects, _without_mode, args[0]), *args[1:], **kwargs)
        traced = state.frames[-1].traced
        count = len(traced)
        route = self.routes.get(func)
        if route is not None:
            result = self._serve(route, func, args, kwargs, True)
        elif func in self.opened and not state.paused:
            result = self._inside(func, args, kwargs)
        else:
            result = _passed(func, args, kwargs)
        changed(func, args, kwargs, traced, count)
        return result

    def _inside(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run the body of a Python function of PyTorch with the mode on, under a name of its own."""
        frames, opened = state.frames, self.opened[func]
        frames.append(frames[-1].within(frames[-1].numbered(opened.name)))
        try:
            with RoutingMode(self.routes, self.opened, self.hooks):
                return opened.body(*args, **kwargs)
        finally:
            frames.pop()

    def _serve(self, route: Route, func: Any, args: Any, kwargs: Any, traced: bool) -> Any:
        frames = state.frames
        if state.paused or not frames:
            return func(*args, **kwargs)
        frame = frames[-1]
        layer = frame.layer(route)
        if not (torch.is_grad_enabled() and (traced or frame.surrounds())):
            return func(*args, **kwargs) if watch.observer is None else _observed(None, func, args, kwargs)
        # Our hooks must not pack what the call saves, but they show the observer what PyTorch saves.
        observed = watch.observer is not None
        unhooked = not observed and frame.hooks is self.hooks.pack
        if unhooked:
            pop_hooks()
        try:
            plans = traced or observed
            output = MISS if plans else run_cached(frame.host.calls.calls, layer, func, args, kwargs, frame)
            if output is MISS:
                output = self._planned(route, frame, layer, func, args, kwargs)
        finally:
            if unhooked:
                push_hooks(*self.hooks)
        if not traced and watch.returned is not None:
            watch.returned(layer, output)
        return output

    def _planned(self, route: Route, frame: Frame, layer: str, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the output of a call by the settings of its layer."""
        specs = frame.host.specs
        known = not torch.compiler.is_compiling() and layer in specs  # no guards on what is known so far
        spec = specs[layer] if known else frame.host.spec(layer, route.tag, frame.module)
        paused, state.paused, state.function, state.layer = state.paused, True, func, layer
        try:
            call = None if spec is None else self._call(frame, layer, spec, func, args, kwargs)
            if watch.observer is not None:
                state.began = _autograd._get_sequence_nr()
                with self._showing(layer):
                    by_route = None if call is None else partial(call.run_by, route)
                    return _observed(layer, func, args, kwargs, by_route)
            if call is None:
                return func(*args, **kwargs)
            output = call.run_by(route)
            if call.cache is not None:
                call.cache.note(layer, call, output)
            return output
        finally:
            state.paused, state.function = paused, None

    def _call(self, frame: Frame, layer: str, spec: Spec, func: Any, args: Any, kwargs: Any) -> Call:
        memories = frame.host.memory(layer) if spec.codec in STATEFUL else None
        cache = None if torch.compiler.is_compiling() or watch.observer is not None else frame.host.calls
        call = Call(layer, spec, frame, func, args, kwargs, memories, cache)
        others = spec.derive or spec.exposes or spec.feeds_tiled or spec.tile > 1
        if others and call.ask(self.hooks.runs_twice, None):
            call.spec = spec.alone
            if spec.tile > 1:
                call.warn_untiled("it may run again in backward (checkpointing, or other saved-tensor hooks)")
        call.hooked = lambda: self._unpaused(frame, lambda: func(*args, **kwargs))
        if func in self.opened:
            call.opened = lambda: self._unpaused(frame, lambda: self._inside(func, args, kwargs))
        return call

    def _unpaused(self, frame: Frame, run: Callable[[], Any]) -> Any:
        """Return the output of a call without a formula, with our hooks on and calls inside it routed."""
        before, state.paused = state.paused, False
        missing = frame.hooks is self.hooks.pack and top_hooks() is None
        if missing:
            push_hooks(*self.hooks)
        try:
            return run()
        finally:
            if missing:
                pop_hooks()
            state.paused = before

    @contextmanager
    def _showing(self, layer: str) -> Iterator[None]:
        """Show the observer the tensors that somebody else's saved-tensor hooks (a checkpoint's) pack."""
        top = top_saved_hooks(True)
        if top is None or top[0] is self.hooks.pack:  # type: ignore[redundant-expr]
            yield
            return

        def shown(tensor: Tensor) -> Any:
            if watch.observer is not None:
                watch.observer.saved(layer, tensor)
            return top[0](tensor)

        with torch.autograd.graph.saved_tensors_hooks(shown, top[1]):
            yield


def _without_mode(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a checkpointed function in traced code: the mode is off in it, so its modules enter it again."""
    state.active = False
    try:
        return function(*args, **kwargs)
    finally:
        state.active = True


# torch.compile inlines the mode's method where it traces a call, and leaves it and its calls alone elsewhere.
# After a graph break the mode is on in code that is not traced. If its method were compiled by itself, it
# would confuse attributes of tensors, whose getters guards cannot distinguish.
_SKIP = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
set_code_exec_strategy(RoutingMode.__torch_function__.__code__, _SKIP)


def _is_serving() -> bool:
    """Return whether calls that have a route run by it now."""
    frames = state.frames
    return bool(frames) and not state.paused and torch.is_grad_enabled() and frames[-1].surrounds()


def _passed(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the output of a function that has no route."""
    state.function, state.layer = func, None
    try:
        return func(*args, **kwargs) if watch.observer is None else _observed(None, func, args, kwargs)
    finally:
        state.function = None


def _observed(
    layer: str | None, func: Any, args: Any, kwargs: Any, by_route: Callable[[], Any] | None = None
) -> Any:
    """Return `func(*args, **kwargs)`, or `by_route()` instead, and show the call to the observer."""
    assert watch.observer is not None
    watch.observer.begin(layer, (args, kwargs))
    output = func(*args, **kwargs) if by_route is None else by_route()
    watch.observer.end(layer, output)
    return output
