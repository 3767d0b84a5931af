"""Observe from inside where the phases of somebody else's training step begin and end.

What is hard: `loss.backward()` calls `torch.autograd.backward`, and a reentrant checkpoint calls it again
inside the backward. Only the outermost call is a backward of the step. Both names are replaced meanwhile.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol
from unittest.mock import patch

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle


class StepEvents(Protocol):
    """What is told of the phases of a step."""

    def backward_begins(self, outputs: Sequence[Tensor]) -> None:
        """Note that a backward of `outputs` begins."""

    def backward_ended(self) -> None:
        """Note that this backward has ended."""

    def step_ended(self, optimizer: Optimizer, /) -> None:
        """Note that `optimizer.step()` has ended."""


@contextmanager
def watching_backwards(events: StepEvents) -> Iterator[None]:
    """In the body, tell `events` of every outermost backward."""
    running = 0

    def watched(backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal running
            outermost = not running
            if outermost:
                events.backward_begins(_outputs(args, kwargs))
            running += 1
            try:
                return backward(*args, **kwargs)
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


def _outputs(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that a call of backward starts from."""
    given = args[0] if args else kwargs.get("tensors")
    tensors = [given] if isinstance(given, Tensor) else list(given or ())
    return [tensor for tensor in tensors if isinstance(tensor, Tensor)]
