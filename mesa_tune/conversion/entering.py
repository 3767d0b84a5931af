"""Entering the forward of a converted module: its frame, the mode, and our saved-tensor hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mesa_tune.conversion.hooks import HOOKS, hooks_possible
from mesa_tune.conversion.opened import OPENED
from mesa_tune.engine.formula import Route
from mesa_tune.engine.routing import (
    Frame,
    Host,
    RoutingMode,
    current_task,
    inside_backward,
    running,
    state,
    surroundings,
    top_hooks,
)
from mesa_tune.errors import RunError
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
        with RoutingMode(ROUTES, OPENED, HOOKS):
            if torch.compiler.is_compiling():
                yield
            elif not hooks_possible():
                state.frames[-1].host.waits = True
                yield
            else:
                with _explained(), torch.autograd.graph.saved_tensors_hooks(*HOOKS):
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
