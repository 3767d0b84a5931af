"""Observe from inside where the phases of the user's training step begin and end.

What is hard: `loss.backward()` calls `torch.autograd.backward`, and a reentrant checkpoint calls it again
inside the backward. Only the outermost call is a backward of the step. Both names are replaced meanwhile.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle


class BackwardCall(NamedTuple):
    """What a backward starts from. `partial`: it computes the gradients of some tensors alone."""

    outputs: Sequence[Tensor]
    gradients: Sequence[Tensor | None] = (None,)
    partial: bool = False


class StepEvents:
    """What is told of the phases of a step; each method does nothing here."""

    def backward_begins(self, call: BackwardCall) -> None:
        """Note that a backward begins, and so a forward has ended."""

    def backward_ended(self) -> None:
        """Note that this backward has ended."""

    def step_ended(self, optimizer: Optimizer, /) -> None:
        """Note that `optimizer.step()` has ended."""


@contextmanager
def watching_backwards(events: StepEvents, *, retain: bool = False) -> Iterator[None]:
    """In the body, tell `events` of every outermost backward. `retain`: these retain their graphs."""
    running = 0

    def watched(backward: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(backward)

        @functools.wraps(backward)
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal running
            outermost = not running
            given = signature.bind(*args, **kwargs)
            if outermost:
                events.backward_begins(_call(given.arguments))
            if outermost and retain:
                given.arguments["retain_graph"] = True
            running += 1
            try:
                return backward(*given.args, **given.kwargs)
            finally:
                running -= 1
                if outermost:
                    events.backward_ended()

        return run

    with (
        patch.object(Tensor, "backward", watched(Tensor.backward)),
        patch.object(torch.autograd, "backward", watched(torch.autograd.backward)),
    ):
        yield


def watch_optimizers(events: StepEvents) -> RemovableHandle:
    """Tell `events` of every step of an optimizer. The handle must not be used during such a step."""
    return register_optimizer_step_post_hook(lambda optimizer, *_: events.step_ended(optimizer))


def autocast_dtype(kind: str) -> str | None:
    """Return the name of the dtype that autocast has now on devices of this kind; None without autocast."""
    if not torch.is_autocast_enabled(kind):
        return None
    return str(torch.get_autocast_dtype(kind)).removeprefix("torch.")


def _call(given: Mapping[str, Any]) -> BackwardCall:
    """Return what a backward with these arguments starts from: one tensor's own, or a function of several."""
    outputs = _tensors(given.get("self", given.get("tensors")))
    gradients = _tensors(given.get("gradient", given.get("grad_tensors")))
    return BackwardCall(outputs, gradients or [None] * len(outputs), given.get("inputs") is not None)


def _tensors(given: Any) -> list[Any]:
    if given is None:
        return []
    return [given] if isinstance(given, Tensor) else list(given)
