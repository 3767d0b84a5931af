"""Entering the forward of a converted module: its frame, the routing mode, and our saved-tensor hooks.

What is hard is where a module may begin: inside another one of its conversion, as the outermost module, again
inside backward (checkpointing), or in traced code. Most are of the first kind, so `_nested_frame` handles
these fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mesa_tune.compiling import with_side_effects
from mesa_tune.conversion.conversion import Conversion, replaced_parameters
from mesa_tune.conversion.hooks import HOOKS, hooks_possible
from mesa_tune.conversion.opened import OPENED
from mesa_tune.conversion.wrapping import BindableForward
from mesa_tune.engine.formula import Route
from mesa_tune.engine.routing import (
    Frame,
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


class Entrant(BindableForward):
    """The forward of a module of a conversion, with its name there and the route of its own computation."""

    name: str
    route: Route | None
    conversion: Conversion


def enter(entrant: Entrant, forward: Callable[..., Any], args: Any, kwargs: Any, checked: bool = True) -> Any:
    """Run `forward(*args, **kwargs)` as the module of `entrant`.

    `checked`: the compiler refuses frames of a checkpointed part, which are gone when the part ends.
    """
    frames = state.frames
    frame, begins, active = _nested_frame(entrant), False, True
    if frame is None:
        if checked and torch.compiler.is_compiling():
            return with_side_effects(enter, entrant, forward, args, kwargs, False)
        frame, begins, active = _new_frame(entrant, args, kwargs)
    frames.append(frame)
    try:
        if active:
            result = forward(*args, **kwargs)
        else:
            with _activation(entrant.conversion):
                result = forward(*args, **kwargs)
        if begins:
            entrant.conversion.end()
        return result
    finally:
        frames.pop()


def run_without_gradients(entrant: Entrant, args: Any, kwargs: Any) -> Any:
    """Run the plain forward of a module without gradients, inside a module with gradients.

    It has its own frame, so that the calls after it in the outer module have the same names as otherwise.
    """
    frames, above = state.frames, state.frames[-1]
    frames.append(above.below(entrant.name))
    try:
        return entrant.plain(*args, **kwargs)
    finally:
        frames.pop()


def _nested_frame(entrant: Entrant) -> Frame | None:
    """Return the frame of a module inside a run of another one of its conversion; None if it is not."""
    if torch.compiler.is_compiling() or not (state.frames and state.active):
        return None
    above = state.frames[-1]
    if above.host is not entrant.conversion or not above.surrounds():
        return None
    return above.below(entrant.name, entrant.route)


def _new_frame(entrant: Entrant, args: Any, kwargs: Any) -> tuple[Frame, bool, bool]:
    """Return a module's frame, whether an outermost forward begins with it, and whether the mode is on."""
    host, frames = entrant.conversion, state.frames
    outermost = not running(host)
    batch = _batch(entrant.module, args, kwargs) if outermost else frames[-1].batch
    # A run in backward may be the first with gradients (reentrant checkpoint of the model).
    begins = outermost and (not inside_backward() or (host.owed > 0 and top_hooks() is None))
    if begins:
        host.begin(batch, entrant.module)
    active = _is_active()
    traced = [] if outermost else frames[-1].traced
    frame = Frame(host, entrant.name, entrant.name, entrant.route, batch, traced, *surroundings())
    if active and frame.hooks is not frames[-1].hooks:
        host.waits = True
    return frame, begins, active


def _is_active() -> bool:
    """Return whether the mode is on. A backward that a forward calls may run without it."""
    if torch.compiler.is_compiling() or not state.active:
        return state.active
    return state.frames[-1].task == current_task()


def _batch(root: nn.Module, args: Any, kwargs: Any) -> list[Tensor]:
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    batch = [tensor for tensor in tensors if not tensor.requires_grad]
    if not torch.compiler.is_compiling():
        return batch
    # Traced code cannot ask for storages, so it compares tensors as objects.
    return [*batch, *root.buffers(), *replaced_parameters(root)]


@contextmanager
def enter_loss(host: Conversion) -> Iterator[None]:
    """Run the body as the loss of `host`: names of its calls begin with `loss`."""
    host.begin([])
    active = _is_active()
    state.frames.append(Frame(host, "loss", "loss", None, [], [], *surroundings(), is_loss=True))
    try:
        with nullcontext() if active else _activation(host):
            yield
        host.end()
    finally:
        state.frames.pop()


@contextmanager
def _activation(host: Conversion) -> Iterator[None]:
    before, state.active = state.active, True
    try:
        with RoutingMode(ROUTES, OPENED, HOOKS):
            if torch.compiler.is_compiling():
                yield
            elif not hooks_possible():
                host.waits = True
                yield
            else:
                with _transform_errors(), torch.autograd.graph.saved_tensors_hooks(*HOOKS):
                    state.frames[-1].hooks = top_hooks()
                    yield
    finally:
        state.active = before


@contextmanager
def _transform_errors() -> Iterator[None]:
    """Replace the error of `torch.func` about saved-tensor hooks by one that names the converted model."""
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
