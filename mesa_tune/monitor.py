"""`Monitor`: watch the gradient error and the noise ratio of a converted model while it trains.

What is hard: errors and noise change with training, and no policy knows its later ones. They are measured in
the user's own loop, so cheaply that it hardly slows, and so that the training goes on bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mesa_tune.conversion.trial import LOSS
from mesa_tune.errors import RunError
from mesa_tune.notice import warn_once
from mesa_tune.policy import Policy
from mesa_tune.profiler.errors.sampled import Estimate, Sample, SampledError
from mesa_tune.retune import Retune
from mesa_tune.search.objectives import MAX_NOISE_RATIO
from mesa_tune.workload.user_code import mixed_seed

_AIM = 0.5
"""Share of the limit that the fallback aims for: the ratio goes on changing."""
_SHOWN = 5
_UNKNOWN = (None, None)

Ends = tuple[float, float]
Trouble = Literal["model", "codec", "ratio"]


@dataclass(frozen=True, slots=True)
class Reading:
    """Gradient error and noise ratio of the model after a step, with their 93 % intervals over batches.

    None: unknown, because a plain gradient is zero or not finite, or because the batch has one sample or
    equal ones. Infinite: only the compressed gradient is not finite, because of what `faulty` layers store.
    `exact`: the layers that this reading made exact. `worst_parameter`: the parameter, or part of one, whose
    error is largest beside its own noise, `worst_own_ratio`.
    """

    step: int
    gradient_error: float | None
    gradient_error_interval: Ends | None
    noise_ratio: float | None
    noise_ratio_interval: Ends | None
    faulty: tuple[str, ...] = ()
    exact: tuple[str, ...] = ()
    worst_parameter: str | None = None
    worst_own_ratio: float | None = None


class Monitor:
    """Measure the converted `model` in its training, and warn where its policy does harm.

    `loss(model, batch)`: the loss of the training, autocast included, without a GradScaler. If it uses
    `compress_saved`, these layers are measured, too. Call `step(batch)` after each optimizer step: every
    `every`-th measures. It runs 8 slices of the batch plain, and every second one compressed: each is 1/32 of
    the batch, and at least 2 samples, with batch norm 8. `samples`: another number. The order of the samples
    must be random, and the loss a mean over them. `history`: all readings.

    A warning is given once each time that

    * the noise ratio, by all of its interval, passes `limit`: by default that of a search, 0.03, or
      what the header of the policy predicts if that is more;
    * the compressed gradient is not finite: the warning names the layers whose codec did it;
    * the plain gradient is not finite either: then it is the model.

    `remedy`, for the first two: None changes nothing. "exact" stores layers exactly, those with the largest
    errors, until the noise ratio is at most `limit`, which takes memory. A `Retune` searches the policy
    again. Layers that are not finite are made exact in both cases.

    Without a remedy the training goes on bit for bit as without a monitor: parameters, buffers, gradients,
    random states, rounding noise. Hooks of modules and parameters run, those after accumulation excepted.
    While it measures, two gradients (twice the bytes of the trained parameters) and the activations of one
    slice are alive besides what the training holds. A compiled model is measured in eager mode. Under
    DistributedDataParallel every process measures and acts alone, without communication.

    Raise ValueError for arguments out of range, RunError for sharded parameters (FSDP2).
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[nn.Module, Any], Tensor],
        *,
        every: int = 100,
        limit: float | None = None,
        remedy: Literal["exact"] | Retune | None = None,
        samples: int | None = None,
        seed: int = 0,
    ) -> None:
        for name, number in (("every", every), ("samples", samples)):
            if number is not None and number < 1:
                raise ValueError(f"`{name} >= 1` must hold, but got ({name}={number})")
        if limit is not None and not limit > 0:
            raise ValueError(f"`limit > 0` must hold, but got (limit={limit})")
        if remedy not in (None, "exact") and not isinstance(remedy, Retune):
            raise ValueError(f'`remedy` must be None, "exact" or a Retune, but got {remedy!r}')
        if any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):
            raise RunError(
                "monitor: the parameters are sharded, so one process has no whole gradient\n"
                "measure with mt.verify before training, or monitor a run with DistributedDataParallel"
            )
        self.model = model
        self.loss = loss
        self.every = every
        self.limit = limit
        self.remedy = remedy
        self.samples = samples
        self.seed = seed
        self.steps = 0
        self.history: list[Reading] = []
        self._trouble: Trouble | None = None

    def step(self, batch: Any) -> Reading | None:
        """Count one optimizer step on `batch`; return the reading if this step was measured.

        If a remedy was applied, it is the reading after it, and the one before it precedes it in `history`.
        Raise RunError if the model is not converted, or if its parts were converted one by one.
        """
        self.steps += 1
        if self.steps % self.every:
            return None
        before = self._trouble
        sampled, sample = self._measured(batch)
        self._read(sample, faulty=_infinite(sampled.alone) if self._trouble == "codec" else ())
        if self._trouble not in (None, before):
            text = self._described(self.history[-1], self._limit(sampled.policy))
            warn_once(f"mesa-tune: at step {self.steps} {text}\n{self._remedied(batch, sampled, sample)}")
        return self.history[-1]

    def _measured(self, batch: Any) -> tuple[SampledError, Sample]:
        """Measure on `batch`, and note whether there is trouble."""
        seed = mixed_seed(self.seed, self.steps)
        sampled = SampledError(self.model, self.loss, batch, seed=seed, samples=self.samples)
        sample = sampled.measure()
        self._trouble = _trouble_in(sample, self._limit(sampled.policy))
        return sampled, sample

    def _limit(self, policy: Policy) -> float:
        return self.limit or max(MAX_NOISE_RATIO, policy.header.noise_ratio or 0.0)

    def _read(self, sample: Sample, faulty: tuple[str, ...] = (), exact: tuple[str, ...] = ()) -> None:
        """Append a reading to `history`."""
        unknown = Estimate(math.inf, None) if sample.model_is_finite else None
        error, error_ends = (sample.gradient_error() if sample.is_finite else unknown) or _UNKNOWN
        ratio, ratio_ends = (sample.noise_ratio() if sample.is_finite else unknown) or _UNKNOWN
        worst = (sample.worst if sample.is_finite else None) or (None, None)
        self.history.append(Reading(self.steps, error, error_ends, ratio, ratio_ends, faulty, exact, *worst))

    def _described(self, reading: Reading, limit: float) -> str:
        """Return what is wrong."""
        if self._trouble == "model":
            return "the gradient of the plain model is not finite either: it is the model, not a codec"
        if self._trouble == "codec":
            return f"the gradient is not finite because of what these layers store: {_listed(reading.faulty)}"
        low, high = reading.noise_ratio_interval or (math.nan, math.nan)
        return (
            f"the gradient noise ratio is {reading.noise_ratio:.2g} ({low:.2g} to {high:.2g}), "
            f"above the limit of {limit:.2g}"
        )

    def _remedied(self, batch: Any, sampled: SampledError, sample: Sample) -> str:
        """Apply the remedy and read again; return what was done, or what the user can do."""
        if self._trouble == "model":
            return "look at the loss, the learning rate and the dtype"
        if self.remedy is None:
            return 'search a policy with these weights, or let the monitor act: remedy="exact"'
        if isinstance(self.remedy, Retune) and self._trouble == "ratio":
            self.remedy.again(batch)
            self._read(self._measured(batch)[1])
            done = "the policy was searched again"
        else:
            exact, sample = self._store_exactly(batch, sampled, sample)
            self._read(sample, exact=exact)
            done = (
                f"now exact: {_listed(exact)}" if exact else "layers of compress_saved cause it: change those"
            )
        ratio = self.history[-1].noise_ratio
        return f"{done}; noise ratio after it: {'unknown' if ratio is None else f'{ratio:.2g}'}"

    def _store_exactly(
        self, batch: Any, sampled: SampledError, sample: Sample
    ) -> tuple[tuple[str, ...], Sample]:
        """Make the layers with the largest errors exact, until the noise ratio is at most the limit.

        Return them, and what is then measured. Layers of `compress_saved` stay as they are.
        """
        left = {name: error for name, error in sampled.alone.items() if error > 0 and name != LOSS}
        limit, exact = self._limit(sampled.policy), []
        while left and _ratio(sample) > limit:
            names = _largest(left, _AIM * limit / _ratio(sample))
            sampled.make_exact(names, seed=torch.initial_seed() + self.steps)
            exact += names
            left = {name: error for name, error in left.items() if name not in names}
            sampled, sample = self._measured(batch)
        return tuple(exact), sample


def _trouble_in(sample: Sample, limit: float) -> Trouble | None:
    if not sample.model_is_finite:
        return "model"
    if not sample.is_finite:
        return "codec"
    ratio = sample.noise_ratio()
    return "ratio" if ratio and ratio.interval and ratio.interval[0] > limit else None


def _ratio(sample: Sample) -> float:
    """Return the noise ratio; 0 if it is unknown, infinite if the compressed gradient is not finite."""
    ratio = sample.noise_ratio() if sample.is_finite else Estimate(math.inf, None)
    return ratio.value if ratio else 0.0


def _infinite(errors: Mapping[str, float]) -> tuple[str, ...]:
    return tuple([name for name, error in errors.items() if math.isinf(error)])


def _largest(errors: Mapping[str, float], share: float) -> list[str]:
    """Return the fewest layers without which at most `share` of the sum of `errors` is left.

    Of errors that are not finite, all; then no others. `errors`: the largest first.
    """
    if infinite := _infinite(errors):
        return [*infinite]
    left, names = sum(errors.values()), []
    most = share * left
    for name, error in errors.items():
        if left <= most:
            break
        names.append(name)
        left -= error
    return names


def _listed(names: Sequence[str]) -> str:
    names = [name or "the converted module itself" for name in names]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
