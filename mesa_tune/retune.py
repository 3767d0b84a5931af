"""`Retune`: search the policy again at intervals while the model trains, as GACT's adaptation does.

The hard part is to measure the model that is training without changing it. Afterwards parameters, buffers,
gradients, training modes and random states are bitwise as before, and every rank has the same policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from mesa_tune.conversion import convert
from mesa_tune.errors import MesaTuneError, RunError
from mesa_tune.measure.profiling import profile
from mesa_tune.notice import warn_once
from mesa_tune.policy import Policy
from mesa_tune.policy.settings import EXACT, MIN_ELEMENTS, LayerSettings
from mesa_tune.profiles.profile import Profile
from mesa_tune.search import Plan, search_policy
from mesa_tune.units import parse_bytes
from mesa_tune.workload.batches import batch_size
from mesa_tune.workload.instance.given_batches import GivenBatches
from mesa_tune.workload.instance.optimizers import remade
from mesa_tune.workload.step import StepFunction
from mesa_tune.workload.workload import Workload

OPTIONS = tuple(LayerSettings(level=2**bits) for bits in (1, 2, 4, 8))
FEW_SAMPLES, MOST_SAMPLES = 4, 8
SHARE = 8
"""A slice is at most 1/8 of the batch: a measurement must cost far less than the steps between two."""
HIDDEN = 0.02
"""Largest fraction of the saved bytes whose tensors may be encoded in a batch, but too small in a slice."""


class Retune:
    """Convert `model` with the policy of least gradient error for `budget`, measured again as it trains.

    `loss(model, batch)`: the loss of the training, autocast included. Calls in the loss, outside the model,
    are not compressed. `own_step(model, batch, optimizer)`: instead of a loss, which is then None, the whole
    step of the training; it gets another optimizer, and must change nothing else but the model.
    `budget`: as in `search_policy`, for batches of the size that `step` receives.
    `optimizer`: that of the training, for the bytes of its state; without it AdamW's state is counted.

    Call `step(batch)` after each optimizer step. The first call, and then every `every`-th, measures the
    model on a slice of the batch that fits the budget, solves for the budget, and converts the model. Equal
    calls on equal models give equal policies. With several ranks all must call, and all use the plan of
    rank 0. `plan` is the latest plan, `policy` its policy.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[nn.Module, Any], Tensor] | None,
        budget: int | str,
        *,
        every: int = 1000,
        seed: int = 0,
        optimizer: Optimizer | None = None,
        own_step: StepFunction | None = None,
    ) -> None:
        if every < 1:
            raise ValueError(f"`every >= 1` must hold, but got (every={every})")
        parse_bytes(budget)
        self.model = model
        self.loss = loss
        self.budget = budget
        self.every = every
        self.seed = seed
        self.optimizer = optimizer
        self.own_step = own_step
        self.steps = 0
        self.plan: Plan | None = None
        self.policy: Policy | None = None
        self._samples: int | None = None

    def step(self, batch: Any) -> bool:
        """Count one optimizer step on `batch`; return True if the model was measured again.

        Raise BudgetError if the first measurement finds no policy for the budget. Later measurements warn
        instead, and the policy stays.
        """
        due = self.steps % self.every == 0
        self.steps += 1
        if due:
            self._retune(batch, _of_rank_0)
        return due

    def again(self, batch: Any) -> None:
        """Measure, solve and convert now, in this process alone: other ranks may have other policies.

        Raise or warn as `step` does.
        """
        self._retune(batch, lambda text: text)

    def _retune(self, batch: Any, agreed: Callable[[str | None], str | None]) -> None:
        failure: MesaTuneError | None = None
        text = None
        try:
            self.plan = self._search(batch)
            text = self.plan.policy.dumps()
        except MesaTuneError as error:
            failure = error
        text = agreed(text)
        if text is not None:
            self.policy = Policy.parse(text, source="retune")
            convert(self.model, self.policy, seed=torch.initial_seed() + self.steps)
        elif self.policy is None:
            raise failure or RunError("retune: rank 0 found no policy\nits own message says why")
        else:
            warn_once(f"mesa-tune: retune at step {self.steps} leaves the policy as it is: {failure}")

    def _search(self, batch: Any) -> Plan:
        size = batch_size(batch)
        modes = [(module, module.training) for module in self.model.modules()]
        try:
            workload = self._view(batch, self._slice_size(batch, size))
            profiled = profile(workload, options=OPTIONS, seeds=1)
        finally:
            for module, mode in modes:
                module.training = mode
        pins = {layer.name: EXACT for layer in profiled.layers if layer.name.startswith("loss.")}
        return search_policy(
            profiled,
            self.budget,
            trials=0,
            batch_size=size,
            objective="error",
            pins=pins,
            seed=self.seed,
        )

    def _view(self, batch: Any, samples: int) -> Workload:
        """Return a workload of this very model on the first `samples` of `batch`."""
        model = self.model.module if isinstance(self.model, DistributedDataParallel) else self.model
        device = next((str(parameter.device) for parameter in model.parameters()), "cpu")
        return Workload(
            lambda: model,
            GivenBatches(batch),  # the noise is that of samples drawn from it
            self.loss,
            self._new_optimizer,
            batch_size=samples,
            device=device,
            seed=self.seed,
            step=self.own_step,
        )

    def _new_optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return AdamW(parameters) if self.optimizer is None else remade(self.optimizer, self.model)(parameters)

    def _slice_size(self, batch: Any, size: int) -> int:
        """Return how many samples fit the budget in an exact step with the gradients recorded beside it.

        It is computed once, from the bytes of a few samples. It exceeds `MOST_SAMPLES` only where the tensors
        of a smaller slice are too small to be encoded, and so could not be measured.
        """
        if self._samples is None:
            few = min(FEW_SAMPLES, size)
            profiled = profile(self._view(batch, few), options=[], seeds=1)
            budget = parse_bytes(self.budget).of(profiled.timeline.at(size).peak_bytes({}))
            samples = max(few, min(MOST_SAMPLES, size // SHARE))
            while samples < size and _hides(profiled, samples, size):
                samples = min(2 * samples, size)
            while samples > few and _needed_bytes(profiled, samples) > budget:
                samples = max(few, samples // 2)
            self._samples = samples
        return min(self._samples, size)


def _hides(profiled: Profile, samples: int, size: int) -> bool:
    """Return True if tensors that only the whole batch encodes have more than `HIDDEN` of the saved bytes."""
    hidden = 0
    for tensor in profiled.tensors:
        per_sample = prod(tensor.shape) / profiled.batch_size
        if per_sample * samples <= MIN_ELEMENTS < per_sample * size:
            hidden += tensor.bytes
    return hidden > HIDDEN * profiled.saved_bytes


def _needed_bytes(profiled: Profile, samples: int) -> int:
    sized = profiled.timeline.at(samples)
    return sized.peak_bytes({}) + sized.saved_bytes({}) + profiled.static_bytes


def _of_rank_0(text: str | None) -> str | None:
    """Return the `text` of rank 0; all ranks must call. Without torch.distributed return `text` itself."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return text
    objects = [text]
    torch.distributed.broadcast_object_list(objects, src=0)
    return objects[0]
