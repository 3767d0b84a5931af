"""One training step as the user takes it: said by what it is made of, or a function of the user's (Rule 11).

Tracing, pricing, verifying and timing all run this step. What is hard: they need to know where a forward ends
and a backward begins, and the user's function does not say it. So it is observed from inside. And gradients
that survive from one forward to the next are alive where the step's memory peaks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import _get_current_function_mode_stack

from mesa_tune.engine.routing import top_hooks
from mesa_tune.errors import WorkloadError
from mesa_tune.workload.boundaries import BackwardCall, StepEvents, watching_backwards

Context = AbstractContextManager[Any]
_NOTHING = nullcontext()
_UNOBSERVED = StepEvents()


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


def _bad(name: str, value: object, wanted: str) -> WorkloadError:
    return WorkloadError(
        f"{name} = {value!r}: must be {wanted}\ncorrect it in the model file, or leave it out"
    )


class Stepper(Protocol):
    """Takes training steps with one optimizer.

    `may_keep_gradients`: whether gradients may be alive in the forward in which memory peaks. `forward`, in
    all methods: makes the context of each forward and its loss. `events`: told of each backward. `state`:
    what has tensors that live from step to step.
    """

    may_keep_gradients: bool
    state: Sequence[object]

    def begin(self) -> None:
        """Drop the gradients of the last step, if the step does so first."""

    def run(
        self,
        model: nn.Module,
        batch: Any,
        forward: Callable[[], Context] = nullcontext,
        events: StepEvents = _UNOBSERVED,
    ) -> None:
        """Take a step, and free everything that it made."""

    def run_last(
        self, model: nn.Module, batch: Any, forward: Callable[[], Context], events: StepEvents
    ) -> None:
        """Take the part of a step in which memory peaks, after `prepare`."""

    def prepare(self, model: nn.Module, batch: Any, forward: Callable[[], Context]) -> None:
        """Run a backward as in `run`, and change no parameter."""


class LossStepper:
    """Stepper of a `TrainingStep` with a loss. `backward` and `update`: contexts for these parts."""

    def __init__(
        self,
        step: TrainingStep,
        optimizer: Optimizer,
        loss: Callable[[nn.Module, Any], Tensor],
        backward: Context = _NOTHING,
        update: Context = _NOTHING,
    ) -> None:
        self.step, self.optimizer, self.loss = step, optimizer, loss
        self.backward, self.update = backward, update
        self.may_keep_gradients = step.accumulation > 1 or not step.set_to_none
        self.parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        device = self.parameters[0].device.type if self.parameters else "cpu"
        self.scaler = torch.amp.GradScaler(device, enabled=step.scaler)
        self.state: Sequence[object] = (optimizer.state, self.scaler)

    def begin(self) -> None:
        """Drop the gradients of the last step, or set them to zero."""
        self.optimizer.zero_grad(set_to_none=self.step.set_to_none)

    def run(
        self,
        model: nn.Module,
        batch: Any,
        forward: Callable[[], Context] = nullcontext,
        events: StepEvents = _UNOBSERVED,
    ) -> None:
        """Take a step, all its micro-batches on `batch`, and free everything that it made."""
        if self.step.accumulation > 1:
            self.begin()
        for _ in range(self.step.accumulation - 1):
            self._add_gradients(model, batch, forward, events)
        self.run_last(model, batch, forward, events)

    def run_last(
        self, model: nn.Module, batch: Any, forward: Callable[[], Context], events: StepEvents
    ) -> None:
        """Take the last micro-batch of a step, and the optimizer's step."""
        if self.step.accumulation == 1:
            self.begin()
        self._add_gradients(model, batch, forward, events)
        with self.update:
            self._update()

    def prepare(self, model: nn.Module, batch: Any, forward: Callable[[], Context]) -> None:
        """Run the forward and backward of one micro-batch."""
        self._add_gradients(model, batch, forward, _UNOBSERVED)

    def _add_gradients(
        self, model: nn.Module, batch: Any, forward: Callable[[], Context], events: StepEvents
    ) -> None:
        with forward():
            loss = self.loss(model, batch)
        events.backward_begins(BackwardCall([loss]))
        count = self.step.accumulation
        with self.backward:
            self.scaler.scale(loss / count if count > 1 else loss).backward()
        del loss
        events.backward_ended()

    def _update(self) -> None:
        """Clip the gradients, and take the optimizer's step."""
        if self.step.clip_norm is not None:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.parameters, self.step.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()


StepFunction = Callable[[nn.Module, Any, Optimizer], object]
"""The user's whole step."""


class FunctionStepper:
    """Stepper of the user's own function. `explained`: context in which it runs; `fault`: makes an error."""

    may_keep_gradients = True

    def __init__(
        self,
        step: StepFunction,
        optimizer: Optimizer,
        explained: Context = _NOTHING,
        fault: Callable[[str, str], WorkloadError] = lambda what, remedy: WorkloadError(f"{what}\n{remedy}"),
    ) -> None:
        self.step, self.optimizer, self.explained, self.fault = step, optimizer, explained, fault
        self.state: Sequence[object] = (optimizer.state,)

    def begin(self) -> None:
        """Do nothing: the function itself drops gradients."""

    def run(
        self,
        model: nn.Module,
        batch: Any,
        forward: Callable[[], Context] = nullcontext,
        events: StepEvents = _UNOBSERVED,
        *,
        updates: bool = True,
        retain: bool = False,
    ) -> None:
        """Take a step. `updates=False`: the optimizer's steps do nothing. `retain`: graphs are retained.

        A closure, which some optimizers (LBFGS) call as often as values tell, runs once: all steps are alike.
        Raise WorkloadError for a function without a backward, or without a step of the optimizer.
        """
        phases = _Phases(forward, events, self.fault)
        update = phases.watched(self.optimizer.step, updates)
        stepping, watching = (
            patch.object(self.optimizer, "step", update),
            watching_backwards(phases, retain=retain),
        )
        with phases, self.explained, stepping, watching:
            self.step(model, batch, self.optimizer)
        if not phases.backwards:
            raise self.fault("called no backward()", "a step computes gradients with loss.backward()")
        if not phases.updates:
            remedy = "end it so; a GradScaler that skips its first step needs a smaller init_scale"
            raise self.fault("did not call optimizer.step()", remedy)

    run_last = run

    def prepare(self, model: nn.Module, batch: Any, forward: Callable[[], Context]) -> None:
        """Take a step that changes no parameter."""
        self.run(model, batch, forward, updates=False)


class _Phases(StepEvents):
    """Enters a context for each forward of a step: all that is no backward and no step of the optimizer.

    `fault` makes the error about a context of the user's that would have to end first.
    """

    def __init__(
        self, forward: Callable[[], Context], events: StepEvents, fault: Callable[[str, str], WorkloadError]
    ) -> None:
        self.forward, self.events, self.fault = forward, events, fault
        self.backwards = self.updates = 0
        self._entered = ExitStack()

    def __enter__(self) -> None:
        self._entered.enter_context(self.forward())
        self._inside = _modes()

    def __exit__(self, *error: Any) -> None:
        self._entered.close()

    def _end_forward(self) -> None:
        if _modes() != self._inside:
            raise self.fault(
                "calls backward() or optimizer.step() inside saved-tensor hooks or a torch function mode",
                "such contexts, `with torch.device(…)` too, must end before",
            )
        self._entered.close()

    def backward_begins(self, call: BackwardCall) -> None:
        self._end_forward()
        self.backwards += 1
        self.events.backward_begins(call)

    def backward_ended(self) -> None:
        self.events.backward_ended()
        self.__enter__()

    def _forward(self, closure: Callable[[], Any]) -> Any:
        """Run a closure of the optimizer, which is a forward and its backward."""
        self.__enter__()
        try:
            return closure()
        finally:
            self._end_forward()

    def watched(self, step: Callable[..., Any], updates: bool) -> Callable[..., Any]:
        """Return a step of the optimizer that is no forward, but for its closure."""

        @functools.wraps(step)
        def run(closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
            self.updates += 1
            given = None if closure is None else functools.partial(self._forward, closure)
            self._end_forward()
            try:
                if updates:
                    arguments = () if given is None else (functools.cache(given),)
                    return step(*arguments, **kwargs)
                with torch.enable_grad():
                    return given() if given else None
            finally:
                self.__enter__()

        return run


def _modes() -> tuple[object, ...]:
    return *_get_current_function_mode_stack(), top_hooks()
