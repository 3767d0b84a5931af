"""The gradient of one training step, whose parameters do not change.

What is hard: the user's own step scales, clips and drops what backwards accumulate. So the gradient of a step
is what its backwards add to the parameters' gradients, all of it, before anything else happens to it.
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
    numbers, added = count(), _Added()
    with added.to(parameters):
        stepper = workload.function_stepper(workload.make_optimizer(model))
        stepper.run(model, batch, lambda: forward(next(numbers)), added, updates=False)
    return [added.total.get(parameter) for parameter in parameters]


class _Added(StepEvents):
    """What backwards add to the gradients of parameters; `torch.autograd.grad` adds nothing."""

    def __init__(self) -> None:
        self.total: dict[nn.Parameter, Tensor] = {}
        self._open = False

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

    def backward_ended(self) -> None:
        self._open = False

    def _add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        if self._open:
            before, gradient = self.total.get(parameter), gradient.detach()
            self.total[parameter] = gradient.clone() if before is None else before + gradient


@contextmanager
def undisturbed(watch: Watch, seed: int, device: str, *, parameters: bool = False) -> Iterator[None]:
    """Run the body under random states of `seed`; restore these, buffers and Python state of a model.

    `parameters`: restore parameters, too.
    """
    model = watch.module
    owners = [(module._buffers, dict(module._buffers)) for module in model.modules()]
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
