"""The gradient of one training step, whose parameters do not change.

What is hard: the user's own step scales, clips and drops what backwards accumulate. So the gradient of a step
is what its backwards add to the parameters' gradients, all of it, before anything else happens to it. Where
weights move between backwards (SAM), it is that of the backwards since.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from mesa_tune.conversion.python_state.watch import Watch, undone
from mesa_tune.workload.boundaries import BackwardCall, StepEvents
from mesa_tune.workload.step import Context
from mesa_tune.workload.user_code import seeded
from mesa_tune.workload.workload import Workload


def step_gradient(
    workload: Workload,
    model: nn.Module,
    parameters: Sequence[nn.Parameter],
    batches: Sequence[Any],
    forward: Callable[[int], Context],
) -> list[Tensor | None]:
    """Return the sum of the gradients of `parameters` over all backwards of a step, unscaled by its length.

    `batches`: the micro-batches of a loss; for the user's own step, one batch, and its optimizer does
    nothing. `forward`: makes the context of a forward, by its number. Parameters have no gradient afterwards.
    """
    for parameter in parameters:
        parameter.grad = None
    try:
        if workload.step is not None:
            return _of_function(workload, model, parameters, batches[0], forward)
        for index, batch in enumerate(batches):
            with forward(index):
                loss = workload.compute_loss(model, batch)
            loss.backward()
        return [parameter.grad for parameter in parameters]
    finally:
        for parameter in parameters:
            parameter.grad = None


def _of_function(
    workload: Workload,
    model: nn.Module,
    parameters: Sequence[nn.Parameter],
    batch: Any,
    forward: Callable[[int], Context],
) -> list[Tensor | None]:
    numbers, added = count(), _Added(parameters)
    with added.to(parameters):
        stepper = workload.function_stepper(workload.make_optimizer(model))
        stepper.run(model, batch, lambda: forward(next(numbers)), added, updates=False)
    return [added.total.get(parameter) for parameter in parameters]


class Versions:
    """Tells whether tensors were changed in place since it was asked last."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self.known = [tensor._version for tensor in tensors]

    def have_changed(self) -> bool:
        """Return whether one was changed since the last call, or since the beginning."""
        before, self.known = self.known, [tensor._version for tensor in self.tensors]
        return before != self.known


class _Added(StepEvents):
    """What backwards add to the gradients of parameters; `torch.autograd.grad` adds nothing."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.total: dict[nn.Parameter, Tensor] = {}
        self._open, self._versions = False, Versions(parameters)

    @contextmanager
    def to(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Observe the backwards of the body."""
        handles = [parameter.register_hook(partial(self._add, parameter)) for parameter in parameters]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def backward_begins(self, call: BackwardCall) -> None:
        self._open = True
        if self._versions.have_changed():
            self.total.clear()

    def backward_ended(self) -> None:
        self._open = False

    def _add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        if self._open:
            before, gradient = self.total.get(parameter), gradient.detach()
            self.total[parameter] = gradient.clone() if before is None else before + gradient


class StepEnded(BaseException):
    """Ends a step in the middle; no error."""


class StepRoots(StepEvents):
    """What the backwards of a step start from, as long as `parameters` stay as they are.

    `moving`: they changed between backwards; what came before is dropped then. `ends_after`: the step ends
    with so many backwards, by `StepEnded`.
    """

    def __init__(self, workload: Workload, parameters: Sequence[Tensor], ends_after: int = 0) -> None:
        self.workload, self.versions, self.ends_after = workload, Versions(parameters), ends_after
        self.backwards, self.moving = 0, False
        self.outputs: list[Tensor] = []
        self.gradients: list[Tensor] = []

    def backward_begins(self, call: BackwardCall) -> None:
        if call.partial:
            raise self.workload.step_error(
                "calls backward(inputs=…), whose gradients cannot be priced",
                "switch requires_grad off where no gradient is wanted instead",
            )
        self.backwards += 1
        if self.versions.have_changed() and self.outputs:
            self.moving = True
            self.outputs, self.gradients = [], []
        for output, gradient in zip(call.outputs, call.gradients, strict=True):
            self.outputs.append(output)
            self.gradients.append(torch.ones_like(output) if gradient is None else gradient)

    def backward_ended(self) -> None:
        if self.backwards == self.ends_after:
            raise StepEnded


@contextmanager
def undisturbed(watch: Watch, seed: int, device: str, *, parameters: bool = False) -> Iterator[None]:
    """Run the body under random states of `seed`; restore these, buffers and Python state of a model.

    `parameters`: restore parameters, too.
    """
    model = watch.module
    owners = [(each._buffers, dict(each._buffers)) for each in model.modules() if type(each._buffers) is dict]
    changed = [*model.buffers(), *(model.parameters() if parameters else ())]
    saved = [(tensor, tensor.detach().clone()) for tensor in changed]
    try:
        with undone(watch), seeded(seed, device):
            yield
    finally:
        for owner, buffers in owners:
            owner.update(buffers)
        with torch.no_grad():
            for tensor, value in saved:
                tensor.copy_(value)
