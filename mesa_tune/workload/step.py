"""One training step as the user takes it: its micro-batches, loss scaling, clipping, the optimizer (Rule 11).

Tracing, pricing, verifying and timing all run this step. What is hard is memory: gradients that survive from
one forward to the next are alive where the step's memory peaks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mesa_tune.errors import WorkloadError

Context = AbstractContextManager[Any]
_NOTHING = nullcontext()


@dataclass(frozen=True)
class TrainingStep:
    """What a step is made of, besides model, batch, loss and optimizer.

    `accumulation`: micro-batches a step, each of the batch size; their losses are divided by this number.
    `clip_norm`: the largest norm of all gradients together. `scaler`: losses are scaled by a GradScaler.
    `set_to_none`: as in `Optimizer.zero_grad`. Raise WorkloadError for other values.
    """

    accumulation: int = 1
    clip_norm: float | None = None
    scaler: bool = False
    set_to_none: bool = True

    def __post_init__(self) -> None:
        count, norm = self.accumulation, self.clip_norm
        if type(count) is not int or count < 1:
            raise _bad("ACCUMULATION", count, "an integer of at least 1: the micro-batches of a step")
        if norm is not None and (type(norm) not in (int, float) or not norm > 0):
            raise _bad("CLIP_NORM", norm, "a positive number: the largest norm of the gradient")
        for name, flag in (("SCALER", self.scaler), ("SET_TO_NONE", self.set_to_none)):
            if type(flag) is not bool:
                raise _bad(name, flag, "True or False")

    def changed(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, as plain values."""
        return {name: value for name, value in vars(self).items() if value != getattr(type(self), name)}

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients are alive in the forward in which memory peaks."""
        return self.accumulation > 1 or not self.set_to_none


def _bad(name: str, value: object, wanted: str) -> WorkloadError:
    return WorkloadError(
        f"{name} = {value!r}: must be {wanted}\ncorrect it in the model file, or leave it out"
    )


class Stepper:
    """Takes training steps with one optimizer."""

    def __init__(self, step: TrainingStep, optimizer: Optimizer) -> None:
        self.step, self.optimizer = step, optimizer
        self.parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        device = self.parameters[0].device.type if self.parameters else "cpu"
        self.scaler = torch.amp.GradScaler(device, enabled=step.scaler)

    def begin(self) -> None:
        """Begin a step: drop the gradients of the last one, or set them to zero."""
        self.optimizer.zero_grad(set_to_none=self.step.set_to_none)

    def backward(self, loss: Tensor) -> None:
        """Run the backward of the loss of one micro-batch."""
        count = self.step.accumulation
        self.scaler.scale(loss / count if count > 1 else loss).backward()

    def update(self) -> None:
        """Clip the gradients, and take the optimizer's step."""
        if self.step.clip_norm is not None:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.parameters, self.step.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def phases(
        self, forward: Callable[[], Tensor], backward: Context = _NOTHING, update: Context = _NOTHING
    ) -> Iterator[Tensor]:
        """Run a step; yield the loss of each micro-batch, `forward()`, before its backward.

        `backward` and `update`: contexts for the calls of these methods.
        """
        self.begin()
        for _ in range(self.step.accumulation):
            loss = forward()
            yield loss.detach()
            with backward:
                self.backward(loss)
            del loss
        with update:
            self.update()

    def run(
        self, forward: Callable[[], Tensor], backward: Context = _NOTHING, update: Context = _NOTHING
    ) -> None:
        """Run a step, as `phases` does, and free everything that it made."""
        for _ in self.phases(forward, backward, update):
            pass
