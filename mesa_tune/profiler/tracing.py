"""Trace the steps of a workload that a timeline is built from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mesa_tune.policy import Policy
from mesa_tune.profiler.memory.kinds import BATCH, GRADIENTS, OPTIMIZER_STATE, WEIGHTS
from mesa_tune.profiler.memory.meter import bytes_of, gradients_of, tensors_in
from mesa_tune.profiler.memory.step_trace import StepTrace
from mesa_tune.profiler.memory.trace import trace_step
from mesa_tune.profiler.memory.traced_steps import TracedSteps
from mesa_tune.workload.session import session
from mesa_tune.workload.step import Stepper
from mesa_tune.workload.workload import Workload

Tags = dict[str, tuple[str, int]]
"""Tag and index of each layer."""


@dataclass(frozen=True)
class StepTracer:
    """Traces steps of a model; `restore` restores its parameters."""

    workload: Workload
    model: nn.Module
    optimizer: Optimizer
    restore: Callable[[], None]

    def traced(self, batch: Any, batch_size: int) -> tuple[TracedSteps, Tags]:
        """Return the traced steps on `batch`, of `batch_size` samples, and tag and index of each layer."""
        plain, _ = self._trace(batch, Policy.parse(""))
        packed, tags = self._trace(batch, Policy.uniform(level=16))
        derived, _ = self._trace(batch, Policy.uniform(level=16, store="derive"), second=True)
        return TracedSteps(batch_size, self._static_bytes(batch), plain, packed, derived), tags

    def _trace(self, batch: Any, policy: Policy, *, second: bool = False) -> tuple[StepTrace, Tags]:
        """Trace the first or the second step under `policy`; the first shows which layers derive from which.

        All traces start from the same weights and random state, because both decide how tokens are routed.
        """
        self.restore()
        stepper = Stepper(self.workload.step, self.optimizer)
        with session(self.workload, self.model, policy) as running:
            if second or self.workload.step.keeps_gradients:
                with self.workload.same_random_state():
                    stepper.backward(running.loss(batch))
            with self.workload.same_random_state():
                trace = trace_step(stepper, lambda: running.loss(batch), self._static(batch))
            return trace, running.layers()

    def _static(self, batch: Any) -> list[torch.Tensor]:
        return [tensor for tensors in self._static_kinds(batch).values() for tensor in tensors]

    def _static_kinds(self, batch: Any) -> dict[str, list[torch.Tensor]]:
        """Return what is alive when a step begins; of accumulated steps, when the last micro-batch begins."""
        if not self.workload.step.keeps_gradients:
            self.optimizer.zero_grad()
        return {
            WEIGHTS: [*self.model.parameters(), *self.model.buffers()],
            GRADIENTS: gradients_of(self.model),
            OPTIMIZER_STATE: tensors_in(self.optimizer.state),
            BATCH: tensors_in(batch),
        }

    def _static_bytes(self, batch: Any) -> dict[str, int]:
        """Return the bytes of each kind; a storage of two kinds is counted as the first."""
        totals = accumulate(self._static_kinds(batch).values())
        sizes = [0, *(bytes_of(tensors) for tensors in totals)]
        return dict(
            zip(self._static_kinds(batch), (after - before for before, after in pairwise(sizes)), strict=True)
        )
