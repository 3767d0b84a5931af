"""`Retune`: a policy that follows the model while it trains, as GACT's adaptation does.

What is hard is to measure a live model and leave no trace: parameters, buffers, gradients, modes and random
states are afterwards bit for bit as before, and every rank ends with the same policy.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer
from torch.utils._pytree import tree_leaves

from mesa_tune.conversion import convert
from mesa_tune.errors import MesaTuneError, RunError
from mesa_tune.notice import warn_once
from mesa_tune.policy import Policy
from mesa_tune.policy.settings import EXACT, MIN_ELEMENTS, LayerSettings
from mesa_tune.profiler.profile import Profile
from mesa_tune.profiler.profiling import profile
from mesa_tune.search import Plan, search_policy
from mesa_tune.units import parse_bytes
from mesa_tune.workload.workload import Workload

OPTIONS = tuple(LayerSettings(level=2**bits) for bits in (1, 2, 4, 8))
FEW_SAMPLES, MOST_SAMPLES = 4, 8
SHARE = 8
"""A slice is at most this part of the batch: a measurement must cost far less than the steps between two."""
HIDDEN = 0.02


class Retune:
    """Keeps `model` under the policy with the least gradient error for `budget`, measured anew as it trains.

    `loss(model, batch)` is the training's own, autocast included; `budget` as in `search_policy`, for a batch
    of the size that `step` is given. Calls in the loss, outside the model, stay as they are. `optimizer`: the
    training's, for the bytes of its state; without it AdamW's are counted.

    After each optimizer step call `step(batch)`: at the first call, and every `every` calls from then on, the
    model is measured on a slice of the batch that fits the budget, the budget is solved for, and the model is
    converted. Deterministic: equal calls on equal models give equal policies; on several ranks, all of which
    must call, rank 0's plan counts. `plan` is the last one, `policy` its policy.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[nn.Module, Any], Tensor],
        budget: int | str,
        *,
        every: int = 1000,
        seed: int = 0,
        optimizer: Optimizer | None = None,
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
        self.steps = 0
        self.plan: Plan | None = None
        self.policy: Policy | None = None
        self._samples: int | None = None

    def step(self, batch: Any) -> bool:
        """One optimizer step on `batch` is done; True if the model got a policy anew.

        Raises BudgetError if the first measurement finds no policy for the budget; later ones then warn and
        leave the policy as it is.
        """
        due = self.steps % self.every == 0
        self.steps += 1
        if due:
            self._retune(batch)
        return due

    def _retune(self, batch: Any) -> None:
        failure: MesaTuneError | None = None
        text = None
        try:
            self.plan = self._measured(batch)
            text = self.plan.policy.dumps()
        except MesaTuneError as error:
            failure = error
        text = _of_rank_0(text)
        if text is not None:
            self.policy = Policy.parse(text, source="retune")
            convert(self.model, self.policy, seed=torch.initial_seed() + self.steps)
        elif self.policy is None:
            raise failure or RunError("retune: rank 0 found no policy\nits own message says why")
        else:
            warn_once(f"mesa-tune: retune at step {self.steps} keeps the policy that was: {failure}")

    def _measured(self, batch: Any) -> Plan:
        size = batch_size(batch)
        modes = [(module, module.training) for module in self.model.modules()]
        try:
            workload = self._view(batch, self._slice_size(batch, size))
            found = profile(workload, options=OPTIONS, seeds=1)
        finally:
            for module, mode in modes:
                module.training = mode
        return search_policy(found, self.budget, trials=0, batch_size=size, pins=_pins(found), seed=self.seed)

    def _view(self, batch: Any, samples: int) -> Workload:
        """The live model and the first `samples` of `batch` as a workload."""
        model = self.model.module if isinstance(self.model, DistributedDataParallel) else self.model
        device = next((str(parameter.device) for parameter in model.parameters()), "cpu")
        size = batch_size(batch)
        return Workload(
            lambda: model,
            lambda count: sliced(batch, count, size),
            self.loss,
            self._new_optimizer,
            batch_size=samples,
            device=device,
            seed=self.seed,
        )

    def _new_optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        if self.optimizer is None:
            return AdamW(parameters)
        kind: Any = type(self.optimizer)
        taken = inspect.signature(kind).parameters
        given = {name: value for name, value in self.optimizer.defaults.items() if name in taken}
        made: Optimizer = kind(parameters, **given)
        return made

    def _slice_size(self, batch: Any, size: int) -> int:
        """So many samples that the exact step, and the gradients recorded beside it, fit the budget.

        Found once, from the bytes of a few samples; more than `MOST_SAMPLES` only where tensors of a smaller
        slice are too small to be encoded, and so could not be measured.
        """
        if self._samples is None:
            few = min(FEW_SAMPLES, size)
            found = profile(self._view(batch, few), options=[], seeds=1)
            budget = parse_bytes(self.budget).of(found.timeline.at(size).peak_bytes({}))
            samples = max(few, min(MOST_SAMPLES, size // SHARE))
            while samples < size and _hides(found, samples, size):
                samples = min(2 * samples, size)
            while samples > few and _needed(found, samples) > budget:
                samples = max(few, samples // 2)
            self._samples = samples
        return min(self._samples, size)


def _hides(found: Profile, samples: int, size: int) -> bool:
    """Whether what are encoded in the whole batch, more than `HIDDEN` of the bytes, are not in a slice."""
    each = [(prod(tensor.shape) / found.batch_size, tensor.bytes) for tensor in found.tensors]
    hidden = [bytes_ for one, bytes_ in each if one * samples <= MIN_ELEMENTS < one * size]
    return sum(hidden) > HIDDEN * found.saved_bytes


def _needed(found: Profile, samples: int) -> int:
    sized = found.timeline.at(samples)
    return sized.peak_bytes({}) + sized.saved_bytes({}) + found.static_bytes


def _pins(found: Profile) -> dict[str, LayerSettings]:
    return {layer.name: EXACT for layer in found.layers if layer.name.startswith("loss.")}


def _of_rank_0(text: str | None) -> str | None:
    """What rank 0 has; all ranks must call. `text` itself where nothing is distributed."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return text
    box = [text]
    torch.distributed.broadcast_object_list(box, src=0)
    return box[0]


def batch_size(batch: Any) -> int:
    """The length of the first dimension of the first tensor in `batch`. RunError if there is none."""
    for leaf in tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch):
        if isinstance(leaf, Tensor) and leaf.dim():
            return leaf.shape[0]
    raise RunError(
        "retune: no tensor with a batch dimension in the batch\n"
        "give step() the batch that loss() takes, in tuples, lists, dicts or dataclasses"
    )


def sliced(batch: Any, count: int, size: int) -> Any:
    """`batch` with the first `count` of every tensor whose first dimension is `size`; containers stay."""
    if isinstance(batch, Tensor):
        return batch[:count] if batch.dim() and batch.shape[0] == size else batch
    if isinstance(batch, Mapping):
        result: Any = copy.copy(batch)
        result.update({key: sliced(value, count, size) for key, value in batch.items()})
        return result
    if isinstance(batch, (list, tuple)):
        values = [sliced(value, count, size) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        result = copy.copy(batch)
        for entry in dataclasses.fields(batch):
            object.__setattr__(result, entry.name, sliced(getattr(batch, entry.name), count, size))
        return result
    return batch
