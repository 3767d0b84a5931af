"""`Monitor`: watch the gradient error and the noise ratio of a converted model while it trains.

What is hard: errors and noise change with training, and no policy knows its later ones. They are measured in
the user's own loop, so cheaply that it hardly slows, and so that the training goes on bit for bit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mesa_tune.conversion.trial import LOSS, Trial
from mesa_tune.errors import BudgetError, RunError
from mesa_tune.measure.errors.sampled import FEW_SAMPLES, Estimate, Sample, SampledError
from mesa_tune.notice import say, warn_once
from mesa_tune.policy import Policy
from mesa_tune.retune import Retune
from mesa_tune.runs.folder import DEFAULT_RUN
from mesa_tune.search.again.replan import Replan
from mesa_tune.search.objectives import MAX_NOISE_RATIO
from mesa_tune.workload.batches import batch_size
from mesa_tune.workload.instance.rank_zero import require_alone, text_of_rank_zero
from mesa_tune.workload.user_code import mixed_seed

FIRST_STEP = 50
"""The first step that is measured, if `every` is None; each further one is at twice as many steps."""
GROWTH = 3.0
"""The ratio may grow to so many times what was promised: it grows in every training."""
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

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Reading:
        """Return the reading of these values from JSON."""
        ends = {name: value and tuple(value) for name, value in values.items() if name.endswith("_interval")}
        names = {name: tuple(values[name]) for name in ("faulty", "exact")}
        return Reading(**{**values, **ends, **names})


class Monitor:
    """Measure the converted `model` in its training, and warn where its policy does harm.

    `loss(model, batch)`: the loss of the training, autocast included, without a GradScaler. If it uses
    `compress_saved`, these layers are measured, too. Call `step(batch)` after each optimizer step: it
    measures after 50, 100, 200, 400, ... of them, or after every `every`-th. It runs 8 slices of the batch
    plain, and every second one compressed: each is 1/32 of the batch, and at least 2 samples, with batch norm
    8. `samples`: another number. The order of the samples must be random, and the loss a mean over them.
    `history`: all readings.

    A warning is given once each time that

    * the noise ratio, by all of its interval, passes `limit`: by default three times that of a search, 0.005,
      or what the header of the policy predicts if that is more;
    * the compressed gradient is not finite: the warning names the layers whose codec did it;
    * the plain gradient is not finite either: then it is the model.

    `remedy`, for the first two: None changes nothing. "exact" stores layers exactly, those with the largest
    errors, until the noise ratio is at most `limit`, which takes memory. "plan" solves the plan of the folder
    `run` again, with the prices of its profile, corrected by what was read: the model is converted with a
    policy for the same budget, and where none helps the warning names the budget that would. A compiled model
    is not converted. A `Retune` measures and searches again. Layers that are not finite are made exact,
    whatever the remedy.

    Without a remedy the training goes on bit for bit as without a monitor: parameters, buffers, gradients,
    random states, rounding noise. Hooks of modules and parameters run, those after accumulation excepted.
    While it measures, two gradients (twice the bytes of the trained parameters) and the activations of one
    slice are alive besides what the training holds. A compiled model is measured in eager mode. Under
    DistributedDataParallel every process measures and acts alone, without communication.

    With the remedy "plan", a reading takes at most the time of two plain steps and no more memory than the
    plan's peak; where that is not possible, as for fewer than 4 samples, a line says so and `step` returns
    None. All processes must call `step`; rank 0 measures and solves, the others get its reading and
    its policy.

    Raise ValueError for arguments out of range, RunError for sharded parameters (FSDP2).
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[nn.Module, Any], Tensor],
        *,
        every: int | None = None,
        limit: float | None = None,
        remedy: Literal["exact", "plan"] | Retune | None = None,
        run: str | Path = DEFAULT_RUN,
        samples: int | None = None,
        seed: int = 0,
    ) -> None:
        for name, number in (("every", every), ("samples", samples)):
            if number is not None and number < 1:
                raise ValueError(f"`{name} >= 1` must hold, but got ({name}={number})")
        if limit is not None and not limit > 0:
            raise ValueError(f"`limit > 0` must hold, but got (limit={limit})")
        if remedy not in (None, "exact", "plan") and not isinstance(remedy, Retune):
            raise ValueError(f'`remedy` must be None, "exact", "plan" or a Retune, but got {remedy!r}')
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
        self.may_convert = not any(map(_is_compiled, model.modules()))
        self._replan = Replan(run) if remedy == "plan" else None
        self._trouble: Trouble | None = None
        self._planned: str | None = None

    @property
    def is_next_due(self) -> bool:
        """Whether the next call of `step` measures."""
        steps = self.steps + 1
        if self.every is not None:
            return steps % self.every == 0
        doublings, rest = divmod(steps, FIRST_STEP)
        return rest == 0 and doublings & (doublings - 1) == 0

    def step(self, *batches: Any) -> Reading | None:
        """Count one optimizer step on its batch; return the reading if this step was measured.

        `batches`: the batch, or the micro-batches of which gradients were accumulated. If a remedy was
        applied, it is the reading after it where there is one, and the one before it precedes it in
        `history`. Raise RunError if the model is not converted, or if its parts were converted one by one.
        """
        is_due = self.is_next_due
        self.steps += 1
        if not is_due:
            return None
        if self._replan is None:
            self._look(batches)
            return self.history[-1]
        count = len(self.history)
        outcome = json.loads(text_of_rank_zero(partial(self._look_and_plan, self._replan, batches)))
        self.history[count:] = [Reading.from_dict(values) for values in outcome["readings"]]
        if outcome["policy"] is not None:
            self._convert(Policy.parse(outcome["policy"], source="the monitor"))
        return self.history[-1] if len(self.history) > count else None

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps, the policy and the corrections, for a checkpoint."""
        policy = self._policy.dumps()
        return {"steps": self.steps, "policy": policy, "corrections": self._replan and self._replan.factors}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as at a checkpoint: convert the model with its policy, where it is another one."""
        self.steps = state["steps"]
        if self._replan is not None:
            self._replan.factors = dict(state["corrections"] or {})
        policy = Policy.parse(state["policy"], source="the checkpoint")
        if policy != self._policy:
            self._convert(policy)

    @property
    def _policy(self) -> Policy:
        return Trial(self.model, 1.0).original.policy

    def _convert(self, policy: Policy) -> None:
        Trial(self.model, 1.0).convert(policy, seed=torch.initial_seed() + self.steps)

    def _look(self, batches: Sequence[Any], room: Callable[[int], int] | None = None) -> None:
        """Read, and where there is trouble, apply the remedy and warn."""
        before = self._trouble
        sampled, sample = self._measured(batches, room)
        self._read(sample, faulty=_infinite(sampled.alone) if self._trouble == "codec" else ())
        if self._trouble not in (None, before):
            text = self._described(self.history[-1], self._limit(sampled.policy))
            warn_once(f"mesa-tune: at step {self.steps} {text}\n{self._remedied(batches, sampled, sample)}")

    def _look_and_plan(self, replan: Replan, batches: Sequence[Any]) -> str:
        """Read in this process alone; return as JSON the readings and, if it should change, the policy."""
        count, self._planned = len(self.history), None
        try:
            require_alone(self.model)
            if sum(map(batch_size, batches)) < FEW_SAMPLES:
                raise RunError(f"a step of fewer than {FEW_SAMPLES} samples does not show how much they vary")
            held = sum(one.grad.nbytes for one in self.model.parameters() if one.grad is not None)
            self._look(batches, lambda samples: replan.room(samples) - held)
        except (RunError, BudgetError) as error:
            say(f"no reading of the noise ratio: {error}")
        readings = [asdict(reading) for reading in self.history[count:]]
        return json.dumps({"readings": readings, "policy": self._planned})

    def _measured(
        self, batches: Sequence[Any], room: Callable[[int], int] | None = None
    ) -> tuple[SampledError, Sample]:
        """Measure on a step's batches, and note whether there is trouble."""
        seed = mixed_seed(self.seed, self.steps)
        sampled = SampledError(self.model, self.loss, batches, seed=seed, samples=self.samples, room=room)
        sample = sampled.measure()
        self._trouble = _trouble_in(sample, self._limit(sampled.policy))
        return sampled, sample

    def _limit(self, policy: Policy) -> float:
        return self.limit or GROWTH * max(MAX_NOISE_RATIO, policy.header.noise_ratio or 0.0)

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

    def _remedied(self, batches: Sequence[Any], sampled: SampledError, sample: Sample) -> str:
        """Apply the remedy and read again; return what was done, or what the user can do."""
        if self._trouble == "model":
            return "look at the loss, the learning rate and the dtype"
        if self.remedy is None:
            return 'search a policy with these weights, or let the monitor act: remedy="exact"'
        if self._replan is not None and self._trouble == "ratio":
            return self._planned_again(self._replan, sampled, sample)
        if isinstance(self.remedy, Retune) and self._trouble == "ratio":
            self.remedy.again(batches[-1])
            self._read(self._measured(batches)[1])
            done = "the policy was searched again"
        else:
            exact, sample = self._store_exactly(batches, sampled, sample)
            self._read(sample, exact=exact)
            self._planned = self._policy.dumps()  # also for the other processes
            done = (
                f"now exact: {_listed(exact)}" if exact else "layers of compress_saved cause it: change those"
            )
        ratio = self.history[-1].noise_ratio
        return f"{done}; noise ratio after it: {'unknown' if ratio is None else f'{ratio:.2g}'}"

    def _planned_again(self, replan: Replan, sampled: SampledError, sample: Sample) -> str:
        """Note the policy to convert with, if one helps; return what was found."""
        if not self.may_convert:
            return "the model is compiled, so its policy stays: search again, and compile with that"
        try:
            found = replan.solve(sampled.policy, sample, self._limit(sampled.policy))
        except (RunError, BudgetError) as error:
            return f"the plan cannot be solved again: {error}"
        if found.policy is not None:
            self._planned, self._trouble = found.policy.dumps(), None
        return found.text

    def _store_exactly(
        self, batches: Sequence[Any], sampled: SampledError, sample: Sample
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
            sampled, sample = self._measured(batches)
        return tuple(exact), sample


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


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
