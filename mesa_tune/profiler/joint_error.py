"""The joint gradient error of a policy on a workload: ‖ĝ − g‖² / ‖g‖² over all trained parameters, measured.

What is hard is to compare like with like. Exact and compressed gradient must see the same batch, the same
dropout masks and the same buffers, and two policies the same batches and rounding seeds, or chance decides
between them. So a measurement is named by a pair (draw of the batch, rounding seed), gives the same number
whenever it is repeated, and leaves buffers and random generators as they were.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from mesa_tune.conversion import compress_saved, convert, revert
from mesa_tune.conversion.model import conversion_of
from mesa_tune.errors import WorkloadError
from mesa_tune.policy import Policy
from mesa_tune.workload.user_code import mixed_seed, seeded
from mesa_tune.workload.workload import Workload

Pair = tuple[int, int]
"""Draw of the batch, rounding seed."""
Gradient = list[Tensor | None]

_REMEMBERED = 4
_SPREAD = 1_000_003


class Objective(Protocol):
    """What a study minimises."""

    def errors(self, policy: Policy, pairs: Sequence[Pair]) -> list[float]:
        """The error of `policy` at each pair, infinite for a gradient with NaN; the same whenever asked."""
        ...


class JointError:
    """The relative squared error of the whole gradient under a policy, on a workload's batches."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.model = workload.build()
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._exact: dict[int, tuple[Any, Gradient, float]] = {}

    def errors(self, policy: Policy, pairs: Sequence[Pair]) -> list[float]:
        """The gradient error of `policy` at each pair.

        WorkloadError where the exact gradient is zero or not finite, or the workload's functions fail.
        """
        return [self._error(policy, draw, seed) for draw, seed in pairs]

    def _error(self, policy: Policy, draw: int, seed: int) -> float:
        batch, exact, size = self._exact_at(draw)
        noise = draw * _SPREAD + seed
        convert(self.model, policy, seed=noise)
        try:
            if _needs_a_forward(policy):
                self._settle(policy, batch, draw)
            error = squared(self._gradient(batch, draw, policy, noise), exact) / size
            return error if math.isfinite(error) else math.inf
        finally:
            revert(self.model)

    def _settle(self, policy: Policy, batch: Any, draw: int) -> None:
        """One forward, after which calls of functions have the indices that `policy` names them by, and it
        is known who derives from whom; and its backward, where parts of it run again there.
        """
        with self._undisturbed(draw), compress_saved(policy, seed=0):
            loss = self.workload.compute_loss(self.model, batch)
            conversion = conversion_of(self.model)
            if conversion is not None and conversion.waits:
                loss.backward()

    def _exact_at(self, draw: int) -> tuple[Any, Gradient, float]:
        """Batch, exact gradient and its squared norm; the last few draws are remembered."""
        if draw not in self._exact:
            while len(self._exact) >= _REMEMBERED:
                del self._exact[next(iter(self._exact))]
            batch = self.workload.make_batch(draw=draw)
            gradient = self._gradient(batch, draw, None, 0)
            size = squared(gradient, [None] * len(gradient))
            if not 0 < size < float("inf"):
                raise WorkloadError(
                    f"the gradient on batch {draw} has the squared norm {size:g}: no error relates to it\n"
                    "give the model weights and batches from which training can go on"
                )
            self._exact[draw] = batch, gradient, size
        return self._exact[draw]

    def _gradient(self, batch: Any, draw: int, policy: Policy | None, noise: int) -> Gradient:
        for parameter in self.parameters:
            parameter.grad = None
        with self._undisturbed(draw):
            if policy is None:
                loss = self.workload.compute_loss(self.model, batch)
            else:
                with compress_saved(policy, seed=noise):
                    loss = self.workload.compute_loss(self.model, batch)
            loss.backward()
        gradient = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        return gradient

    @contextmanager
    def _undisturbed(self, draw: int) -> Iterator[None]:
        """The body runs under random states that `draw` decides; buffers and states are then as before."""
        kept = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        try:
            with seeded(mixed_seed(self.workload.seed, -1 - draw), self.workload.device):
                yield
        finally:
            with torch.no_grad():
                for buffer, value in kept:
                    buffer.copy_(value)


def squared(gradient: Sequence[Tensor | None], other: Sequence[Tensor | None]) -> float:
    """‖gradient − other‖² over all parameters; a gradient that is None counts as zero."""
    total = 0.0
    for mine, its in zip(gradient, other, strict=True):
        given = [tensor.double() for tensor in (mine, its) if tensor is not None]
        if given:
            difference = given[0] - given[1] if len(given) == 2 else given[0]
            total += float(difference.square().sum())
    return total


def _needs_a_forward(policy: Policy) -> bool:
    """True if layers are first stored in another way than later: if rules tell calls of functions apart by
    index alone, or what layers derive shows in a forward.
    """
    by_index = any(rule.indices != "all" and rule.names is None for rule in policy.rules)
    return by_index or any(dict(rule.keys).get("store") == "derive" for rule in policy.rules)
