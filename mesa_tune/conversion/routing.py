"""Routing: which torch call, in which module, goes to which function of ours.

What is hard about it: the same call can run twice (checkpointing runs a part of the forward again inside
backward, outside any mode that surrounded the model), and both runs must save the same tensors. Hence every
module's forward enters here anew with its own name, and a call is left alone while somebody else's saved-
tensor hooks lie above the module's own, which is how a checkpointed bare function looks from inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._C import _autograd
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from mesa_tune.codecs import Spec
from mesa_tune.conversion.hooks import hooks_possible, pack, pop_hooks, push_hooks, showing, unpack, unpaused
from mesa_tune.conversion.opened import OPENED, Opened
from mesa_tune.engine.cache import Settled
from mesa_tune.engine.call import Call, Links
from mesa_tune.engine.context import (
    Frame,
    Host,
    current_task,
    inside_backward,
    running,
    state,
    surroundings,
    top_hooks,
)
from mesa_tune.engine.formula import Route
from mesa_tune.engine.function import watch
from mesa_tune.engine.rematerialize import changed
from mesa_tune.errors import RunError
from mesa_tune.formulas.attention import mask_sum
from mesa_tune.formulas.table import ROUTES


class Entrant(Protocol):
    """What enters: a module of a conversion, with its name there and its own route."""

    module: nn.Module
    name: str
    own: Route | None

    @property
    def conversion(self) -> Host: ...

    def plain(self, *args: Any, **kwargs: Any) -> Any: ...


def enter(entrant: Entrant, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Runs `forward(*args, **kwargs)` as the module of `entrant`."""
    frames = state.frames
    frame, begins, active = _below(entrant), False, True
    if frame is None:
        frame, begins, active = _anew(entrant, args, kwargs)
    frames.append(frame)
    try:
        result = forward(*args, **kwargs) if active else _activated(forward, args, kwargs)
        if begins:
            entrant.conversion.end()
        return result
    finally:
        frames.pop()


def pass_over(entrant: Entrant, args: Any, kwargs: Any) -> Any:
    """Runs the plain forward of a module that needs no gradients inside one that does.

    Its calls are not counted as the other's: those after it have the same names as with gradients.
    """
    frames, above = state.frames, state.frames[-1]
    frames.append(Frame(above.host, entrant.name, None, above.batch, above.traced, above.hooks, above.task))
    try:
        return entrant.plain(*args, **kwargs)
    finally:
        frames.pop()


def _below(entrant: Entrant) -> Frame | None:
    """The frame of a module in the same run of one of its conversion: most are, and have it from above."""
    if torch.compiler.is_compiling() or not (state.frames and state.active):
        return None
    above = state.frames[-1]
    if above.host is not entrant.conversion or not above.surrounds():
        return None
    return Frame(above.host, entrant.name, entrant.own, above.batch, above.traced, above.hooks, above.task)


def _anew(entrant: Entrant, args: Any, kwargs: Any) -> tuple[Frame, bool, bool]:
    """The frame of any module; whether a forward of its conversion begins; whether the mode is on."""
    host, frames = entrant.conversion, state.frames
    outermost = not running(host)
    batch = _batch(entrant.module, args, kwargs) if outermost else frames[-1].batch
    begins = outermost and (not inside_backward() or _comes_late(host))
    if begins:
        host.begin(batch, entrant.module)
    active = _is_active()
    traced = [] if outermost else frames[-1].traced
    frame = Frame(host, entrant.name, entrant.own, batch, traced, *surroundings())
    if active and frame.hooks is not frames[-1].hooks:
        host.waits = True
    return frame, begins, active


def _is_active() -> bool:
    """Whether the mode is on. A backward called inside a forward may run without it, so modules in it enter
    anew.
    """
    if torch.compiler.is_compiling() or not state.active:
        return state.active
    return state.frames[-1].task == current_task()


def _batch(root: nn.Module, args: Any, kwargs: Any) -> list[Tensor]:
    given = [
        leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and not leaf.requires_grad
    ]
    if not torch.compiler.is_compiling():
        return given
    # Storages cannot be asked for in traced code, so tensors are compared as objects there.
    parameters: Iterator[Tensor] = root.parameters()
    swapped = [each for each in parameters if not isinstance(each, nn.Parameter)]
    return [*given, *root.buffers(), *swapped]


def _comes_late(host: Host) -> bool:
    """Whether this run in backward is the first with gradients: reentrant checkpointing around the whole
    model.
    """
    return host.owed > 0 and top_hooks() is None


@contextmanager
def entered(host: Host, name: str) -> Iterator[None]:
    """The body runs as a loss named `name` of `host`."""
    host.begin([])
    active = _is_active()
    state.frames.append(Frame(host, name, None, [], [], *surroundings(), is_loss=True))
    try:
        if active:
            yield
        else:
            with _activation():
                yield
        host.end()
    finally:
        state.frames.pop()


@contextmanager
def _activation() -> Iterator[None]:
    before, state.active = state.active, True
    try:
        with RoutingMode():
            if torch.compiler.is_compiling():
                yield
            elif not hooks_possible():
                state.frames[-1].host.waits = True
                yield
            else:
                with _explained(), torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                    state.frames[-1].hooks = top_hooks()
                    yield
    finally:
        state.active = before


@contextmanager
def _explained() -> Iterator[None]:
    """What `torch.func` says of saved-tensor hooks inside is said of the model that has them."""
    try:
        yield
    except RuntimeError as error:
        if "support saved tensor hooks" not in str(error):
            raise
        raise RunError(
            "torch.func.grad, vjp, jacrev and hessian cannot run inside the forward of a converted model, "
            "which has saved-tensor hooks\n"
            "use torch.autograd.grad there, call the transform outside of the forward, or mt.revert(model)"
        ) from error


def _activated(forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    with _activation():
        return forward(*args, **kwargs)


class RoutingMode(TorchFunctionMode):
    """Sends torch calls to our functions while a module of a conversion runs."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling() and state.frames:
            return _traced(func, args, kwargs)
        route = ROUTES.get(func)
        if route is not None:
            return _serve(route, func, args, kwargs, False)
        opened = OPENED.get(func)
        if opened is not None and _is_served():
            return _inside(opened, args, kwargs)
        output = _passed(func, args, kwargs)
        if func in mask_sum.ADDITIONS:
            mask_sum.note(output, args, kwargs)
        return output


def _run_as_it_is(code: CodeType) -> None:
    """Lets torch.compile inline `code` where it traces a call, and leave it and its calls alone elsewhere.

    After a graph break the mode is on in code that is not traced. Compiled by itself, its method took one
    attribute of a tensor for another: guards cannot tell their getters apart.
    """
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(code, skip)


_run_as_it_is(RoutingMode.__torch_function__.__code__)


def _traced(func: Any, args: Any, kwargs: Any) -> Any:
    if func is torch.Tensor.unflatten:
        func = torch.unflatten  # the method calls super(), which cannot be traced under a mode
    elif func is torch.Tensor.norm:
        func = torch.norm  # a method in Python, which tracing does not find in a table
    traced = state.frames[-1].traced
    known = len(traced)
    route, opened = ROUTES.get(func), OPENED.get(func)
    if route is not None:
        result = _serve(route, func, args, kwargs, True)
    elif opened is not None and not state.paused:
        result = _inside(opened, args, kwargs)
    else:
        result = _passed(func, args, kwargs)
    changed(func, args, kwargs, traced, known)
    return result


def _is_served() -> bool:
    """Return whether calls that have a route are served now."""
    frames = state.frames
    return bool(frames) and not state.paused and torch.is_grad_enabled() and frames[-1].surrounds()


def _inside(opened: Opened, args: Any, kwargs: Any) -> Any:
    """Run the body of a Python function of PyTorch with the mode on, under a name of its own."""
    frames = state.frames
    frame = frames[-1]
    frames.append(frame.within(frame.numbered(opened.name)))
    try:
        with RoutingMode():
            return opened.body(*args, **kwargs)
    finally:
        frames.pop()


def _passed(func: Any, args: Any, kwargs: Any) -> Any:
    """The output of a function that has no route."""
    state.function, state.layer = func, None
    try:
        return func(*args, **kwargs) if watch.observer is None else _observed(None, func, args, kwargs)
    finally:
        state.function = None


def _observed(layer: str | None, func: Any, args: Any, kwargs: Any, call: Call | None = None) -> Any:
    """`func` under the eyes of the observer; with a `call` before its arguments, if one is given."""
    assert watch.observer is not None
    watch.observer.begin(layer, (args, kwargs))
    output = func(*args, **kwargs) if call is None else func(call, *args, **kwargs)
    watch.observer.end(layer, output)
    return output


def _serve(route: Route, func: Any, args: Any, kwargs: Any, traced: bool) -> Any:
    frames = state.frames
    if state.paused or not frames:
        return func(*args, **kwargs)
    frame = frames[-1]
    layer = frame.layer(route)
    if not (torch.is_grad_enabled() and (traced or frame.surrounds())):
        return func(*args, **kwargs) if watch.observer is None else _observed(None, func, args, kwargs)
    known = None if traced or watch.observer is not None else frame.host.settled.get(layer)
    output = None if known is None or known.func is not func else _served_again(known, frame, args, kwargs)
    return _served_anew(route, frame, layer, func, args, kwargs) if output is None else output


def _served_again(known: Settled, frame: Frame, args: Any, kwargs: Any) -> Any:
    """The output of a call that may be like its layer's last one; None if it is not."""
    if frame.hooks is not pack:
        return known.again(args, kwargs, frame.is_static)
    pop_hooks()
    try:
        return known.again(args, kwargs, frame.is_static)
    finally:
        push_hooks(pack, unpack)


def _served_anew(route: Route, frame: Frame, layer: str, func: Any, args: Any, kwargs: Any) -> Any:
    """The output of a call by the settings of its layer."""
    observed = watch.observer is not None
    own = frame.host.spec(layer, route.tag, frame.module)
    spec = own.alone if own is not None and runs_twice(frame) else own
    paused, state.paused, state.function, state.layer = state.paused, True, func, layer
    # Nothing in there is for our hooks, except to show the observer what PyTorch keeps.
    unhooked = frame.hooks is pack and not observed
    if unhooked:
        pop_hooks()
    try:
        if observed:
            state.began = _autograd._get_sequence_nr()
            call = None if spec is None else _call(frame, layer, spec, func, args, kwargs)
            with showing(layer):
                return _observed(layer, func if call is None else route.serve, args, kwargs, call)
        if spec is None:
            return func(*args, **kwargs)
        call = _call(frame, layer, spec, func, args, kwargs)
        output = route.serve(call, *args, **kwargs)
        if spec is own and not torch.compiler.is_compiling():
            _settle(frame, call, func, args, kwargs, output)
        return output
    finally:
        if unhooked:
            push_hooks(pack, unpack)
        state.paused, state.function = paused, None


def runs_twice(frame: Frame) -> bool:
    """Whether a module may be a checkpointed part, in its first run or in its second, in backward.

    The first run's packed tensors die at once, the second's do not: a call that derives from another's could
    do so in the second run only, and would not save the same tensors. There each layer stores its own copy.
    """
    return frame.task != -1 or not (frame.hooks is None or frame.hooks is pack)


def _settle(frame: Frame, call: Call, func: Any, args: Any, kwargs: Any, output: Any) -> None:
    """Remembers how a call was served, if its layer's last one had the same shapes: to find out all that
    makes a call like this one would take too long where shapes differ from step to step.
    """
    if call.served is None:
        return
    shapes = [None if each is None else each.shape for each in call.served.tensors]
    if frame.host.shapes.get(call.layer) != shapes:
        frame.host.shapes[call.layer] = shapes
        return
    now = Settled.of(func, args, kwargs, call.served, output, frame.is_static, frame.host.key)
    if now is not None:
        frame.host.settled[call.layer] = now


def _call(frame: Frame, layer: str, spec: Spec, func: Any, args: Any, kwargs: Any) -> Call:
    memory = frame.host.memory(layer) if spec.remembers else None
    links = Links(frame.traced, frame.host.note) if spec.derive or spec.serves else None
    call = Call(layer, spec, frame.host.key, frame.is_static, lambda: func(*args, **kwargs), memory, links)
    call.hooked = lambda: unpaused(frame, lambda: func(*args, **kwargs))
    if func in OPENED:
        call.opened = lambda: unpaused(frame, lambda: _inside(OPENED[func], args, kwargs))
    return call
