"""`verify`: measure real training steps under a policy and plain ones, to compare with the prediction.

What is hard: a machine's speed drifts, so the two kinds of steps are timed in turn; and where the plain step
does not fit in memory, everything that does not depend on it must still be measured.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mesa_tune.conversion import compress_saved, convert
from mesa_tune.errors import RunError, options
from mesa_tune.files import read_document, schema, typed, write_document
from mesa_tune.policy import Policy
from mesa_tune.profiler.draws import longest_batch, look
from mesa_tune.profiler.errors.at_checkpoints import AtCheckpoint
from mesa_tune.profiler.errors.by_group import GroupError
from mesa_tune.profiler.errors.joint_error import NOISE_STEPS
from mesa_tune.profiler.errors.unseen import BATCHES, unseen_errors, unseen_errors_by_group
from mesa_tune.profiler.memory.meter import StepMemory, measure_second_step, unless_out_of_memory
from mesa_tune.profiler.profile import Prediction
from mesa_tune.profiler.shown import QUANTITIES, quantities_html
from mesa_tune.profiler.timing.heap import steady_heap
from mesa_tune.workload.clock import clock_of
from mesa_tune.workload.workload import Workload

_REMEDY = "make it again with `mesa-tune verify --force`"
_OF_PARAMETERS = ("gradient_noise_ratio", "worst_parameter", "worst_own_ratio")


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured bytes of a training step, and its median time. None: the step did not fit in memory.

    On the CPU, the time is processor time: see `workload.clock`.
    """

    peak_bytes: int | None
    saved_bytes: int | None
    step_ms: float | None


@dataclass(frozen=True, slots=True)
class Ratio:
    """Ratio of the step time under the policy to plain, over pairs of steps: median and quartiles."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Verification:
    """Measurements of a workload's steps under a policy, of its plain steps, and the prediction.

    `gradient_errors`: relative squared errors, batch by batch, one for each rounding seed; `gradient_error`
    is their mean, `gradient_noise_ratio` that of more batches beside the parameters' own noise on these, and
    `worst_own_ratio` the largest of a parameter, or part of one.
    `checkpoints`: error and noise with the weights of each checkpoint of the workload.
    `step_ratio`: None if the two steps could not be timed in turn. `groups`: errors by group of parameters,
    the first of all; empty unless asked for.
    """

    baseline: Measured
    policy: Measured
    gradient_errors: tuple[float, ...]
    step_ratio: Ratio | None
    predicted: Prediction | None
    device: str
    batch_size: int
    torch: str
    steps: int
    gradient_noise_ratio: float | None = None
    checkpoints: tuple[AtCheckpoint, ...] = ()
    groups: tuple[GroupError, ...] = ()
    worst_parameter: str | None = None
    worst_own_ratio: float | None = None

    @property
    def gradient_error(self) -> float | None:
        """Mean of `gradient_errors`; None where exact gradients did not fit, even with checkpoints."""
        return statistics.fmean(self.gradient_errors) if self.gradient_errors else None

    @property
    def gradient_error_interval(self) -> tuple[float, float] | None:
        """Two standard errors on each side of the mean, from batch to batch; None for one batch."""
        seeds = max(1, len(self.gradient_errors) // BATCHES)
        starts = range(0, len(self.gradient_errors), seeds)
        means = [statistics.fmean(self.gradient_errors[start : start + seeds]) for start in starts]
        if len(means) < 2:
            return None
        half, mean = 2 * statistics.stdev(means) / math.sqrt(len(means)), statistics.fmean(means)
        return max(0.0, mean - half), mean + half

    @property
    def step_ms_interval(self) -> tuple[float, float] | None:
        """Middle half of the step times under the policy, as ratios to the plain step; None if unknown."""
        ratio, plain_ms = self.step_ratio, self.baseline.step_ms
        return None if ratio is None or plain_ms is None else (ratio.low * plain_ms, ratio.high * plain_ms)

    @property
    def worst_noise_ratio(self) -> float | None:
        """The largest noise ratio, of the model as given and at all checkpoints; None if none is known."""
        ratios = [self.gradient_noise_ratio, *(entry.gradient_noise_ratio for entry in self.checkpoints)]
        return max((ratio for ratio in ratios if ratio is not None), default=None)

    def predicted_beside(self, profiled_ms: float | None) -> Prediction | None:
        """Return the prediction with its step time scaled to the measured plain step.

        `profiled_ms`: time of the plain step in the profile. The machine may have been busier then, so only
        the ratio of the times is a prediction.
        """
        predicted, plain_ms = self.predicted, self.baseline.step_ms
        if predicted is None or predicted.step_ms is None or plain_ms is None or not profiled_ms:
            return predicted
        return replace(predicted, step_ms=predicted.step_ms / profiled_ms * plain_ms)

    def compared(self, predicted: Prediction | None) -> list[dict[str, Any]]:
        """Return predictions beside measurements: `quantity, unit, plain, predicted, measured, difference`.

        `difference` is measured / predicted − 1. `predicted_low, predicted_high, measured_low,
        measured_high`: ends of the intervals. None: unknown.
        """
        return [self._compared(name, unit, predicted) for name, unit in QUANTITIES.items()]

    def _compared(self, name: str, unit: str, predicted: Prediction | None) -> dict[str, Any]:
        expected, measured = getattr(predicted, name, None), self.to_dict()["policy"][name]
        sides = {"predicted": predicted, "measured": self}
        ends = {side: getattr(values, f"{name}_interval", None) for side, values in sides.items()}
        return {
            "quantity": name,
            "unit": unit,
            "plain": 0.0 if name.startswith("gradient_") else getattr(self.baseline, name),
            "predicted": expected,
            "measured": measured,
            "difference": measured / expected - 1 if expected and measured is not None else None,
            **{f"{side}_low": pair and pair[0] for side, pair in ends.items()},
            **{f"{side}_high": pair and pair[1] for side, pair in ends.items()},
        }

    def _repr_html_(self) -> str:
        ratio = self.step_ratio
        return quantities_html(
            f"Verification at batch {self.batch_size} on {self.device}",
            self.compared(self.predicted),
            ("plain", "predicted", "measured"),
            "the predicted step time is by the clock of the profile"
            + ("" if ratio is None else f"; a step takes {ratio.median:.2f} times the plain one"),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document `mesa-tune.verify/2`."""
        measured = {
            "gradient_error": self.gradient_error,
            "gradient_noise_ratio": self.gradient_noise_ratio,
            "worst_parameter": self.worst_parameter,
            "worst_own_ratio": self.worst_own_ratio,
        }
        return {
            "schema": schema("verify"),
            "device": self.device,
            "batch_size": self.batch_size,
            "torch": self.torch,
            "steps": self.steps,
            "baseline": asdict(self.baseline),
            "policy": {**asdict(self.policy), **measured},
            "predicted": self.predicted.to_dict() if self.predicted else None,
            "step_ratio": asdict(self.step_ratio) if self.step_ratio else None,
            "gradient_errors": list(self.gradient_errors),
            "checkpoints": [asdict(entry) for entry in self.checkpoints],
            "groups": [asdict(group) for group in self.groups],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Verification:
        """Return the verification with this `to_dict`; raise KeyError, TypeError or ValueError for others."""
        ratio, predicted = values["step_ratio"], values["predicted"]
        parts = {
            "baseline": _measured_from(values["baseline"]),
            "policy": _measured_from(values["policy"]),
            "gradient_errors": tuple(float(error) for error in values["gradient_errors"]),
            **{name: values["policy"].get(name) for name in _OF_PARAMETERS},
            "step_ratio": None if ratio is None else typed(Ratio, ratio),
            "predicted": None if predicted is None else Prediction.from_dict(predicted),
            "checkpoints": tuple(typed(AtCheckpoint, entry) for entry in values.get("checkpoints", ())),
            "groups": tuple(typed(GroupError, group) for group in values.get("groups", ())),
        }
        return typed(
            cls, {**{name: values[name] for name in ("device", "batch_size", "torch", "steps")}, **parts}
        )

    def save(self, path: str | Path) -> None:
        """Write the document to `path`, whole or not at all. Raise RunError if it cannot be written."""
        write_document(path, self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> Verification:
        """Return the verification saved at `path`. Raise RunError for a missing, damaged or other file."""
        return read_document(path, "verify", cls.from_dict, _REMEDY)


def most_steps(steps: int = 5, seeds: int = 3) -> int:
    """Return about how many steps `verify` takes at most: for memory, times, errors, and noise."""
    return 4 + 2 * (steps + 1) + BATCHES * (1 + seeds) + NOISE_STEPS * 3 // 2


def verify(
    workload: Workload,
    policy: Policy,
    *,
    predicted: Prediction | None = None,
    steps: int = 5,
    seeds: int = 3,
    by_group: bool = False,
) -> Verification:
    """Measure memory, time and gradient error of real training steps of `workload` under `policy`.

    Memory is measured in the second step of the plain model, and in the first and the second step of a
    converted one, whichever takes more, on the longest of the first draws of the batch. `steps` pairs of
    steps, plain and policy in turn, are timed after a warm-up pair. The gradient error is measured on
    `BATCHES` batches, with `seeds` rounding seeds each, after the first steps that `Workload.steps_before`
    says, and at each checkpoint of the workload on `seeds` batches. `by_group`: also measure it within each
    group of the optimizer (of one with a single group: within each top-level module), and with gradients
    divided by √v̂ + ε of Adam, after `STATE_STEPS` plain steps have made its state. `predicted` becomes part
    of the result. Random generators are restored. If the plain step runs out of memory, its bytes and times
    are None; exact gradients are then computed by running modules again in backward.

    Raises:
        PolicyError: the policy was made for another model.
        WorkloadError: the workload's functions fail.
        RunError: the step under the policy does not fit in memory, or its gradient is not finite.
    """
    if steps < 1 or seeds < 1:
        raise RunError(f"`steps >= 1` and `seeds >= 1` must hold, but got (steps={steps}, seeds={seeds}).")
    with workload.same_random_state():
        longest = longest_batch(workload)
        if workload.random_state is None:
            looked = unless_out_of_memory(lambda: look(workload, workload.build(), longest, draws=0))
            workload = workload if looked is None else looked.workload
        draw = longest.draw
        plain = unless_out_of_memory(lambda: _memory(workload, None, draw))
        # After a plain step the optimizer has its state, and the first step of a converted model takes all.
        packed = unless_out_of_memory(lambda: _memory(workload, policy, draw, after_plain=plain is not None))
        if packed is None:
            raise RunError(
                f"out of memory on {workload.device}: a step of batch size {workload.batch_size} does not "
                "fit under this policy\n"
                f"search again with a smaller {options('budget')} or {options('batch_size')}"
            ) from MemoryError()
        times = _times(workload, policy, draw, steps, plain_fits=plain is not None)
        if plain is None:
            found = unless_out_of_memory(lambda: unseen_errors(workload, policy, seeds, checkpointed=True))
        else:
            found = unseen_errors(workload, policy, seeds)
        errors, noise, entries = found or ([], None, ())
        groups = (
            unseen_errors_by_group(workload, policy, seeds, checkpointed=plain is None) if by_group else ()
        )
    worst = None if noise is None else noise.worst
    return Verification(
        baseline=_measured(plain, times.plain),
        policy=_measured(packed, times.packed),
        gradient_errors=tuple(errors),
        gradient_noise_ratio=None if noise is None else noise.measured_ratio,
        worst_parameter=None if worst is None else worst[0],
        worst_own_ratio=None if worst is None else worst[1],
        checkpoints=tuple(entries),
        groups=groups,
        step_ratio=times.ratio,
        predicted=predicted,
        device=workload.device,
        batch_size=workload.batch_size,
        torch=torch.__version__,
        steps=steps,
    )


class _Training:
    """A model of the workload with optimizer and a drawn batch; converted if there is a policy."""

    def __init__(self, workload: Workload, policy: Policy | None, draw: int, *, later: bool = False) -> None:
        self.workload = workload
        self.policy = policy
        self.model = workload.build()
        if not later:
            self.convert()
        self.batch = workload.make_batch(draw=draw)
        self.optimizer = workload.make_optimizer(self.model)
        self.stepper = workload.stepper(self.optimizer, check=False)
        self.clock = clock_of(workload.device)

    def convert(self) -> None:
        """Convert the model, if there is a policy."""
        if self.policy is not None:
            convert(self.model, self.policy, seed=self.workload.seed)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Return the context of a forward and its loss: all steps skip the same layers."""
        with (
            self.workload.same_random_state(),
            nullcontext() if self.policy is None else compress_saved(self.policy),
        ):
            yield

    def timed_step(self) -> float:
        """Run one step; return the milliseconds that it took on the clock of the device."""
        begin = self.clock.now()
        self.stepper.run(self.model, self.batch, self.forward)
        return self.clock.ms([begin, self.clock.now()])[0]


@dataclass(frozen=True, slots=True)
class _Times:
    plain: float | None
    packed: float
    ratio: Ratio | None


def _memory(workload: Workload, policy: Policy | None, draw: int, *, after_plain: bool = False) -> StepMemory:
    training = _Training(workload, policy, draw, later=after_plain)
    if workload.step is None:
        # Checks the loss once: a loss that is NaN or no scalar raises an error about itself here.
        workload.compute_loss(training.model, training.batch)
    convert = training.convert if after_plain else None
    stepper, model, batch = training.stepper, training.model, training.batch
    with workload.same_random_state():  # also of the first step, which makes the optimizer's state
        return measure_second_step(stepper, model, batch, training.forward, convert=convert)


def _times(workload: Workload, policy: Policy, draw: int, steps: int, *, plain_fits: bool) -> _Times:
    """Return times of both steps, taken in turn, so that a busy machine slows both.

    If two models do not fit in memory, the steps are timed one after the other, without a ratio.
    """
    both = unless_out_of_memory(lambda: _in_turn(workload, policy, draw, steps)) if plain_fits else None
    if both is not None:
        return both
    alone = _alone(workload, None, draw, steps) if plain_fits else None
    return _Times(alone, _alone(workload, policy, draw, steps), None)


@steady_heap()
def _in_turn(workload: Workload, policy: Policy, draw: int, steps: int) -> _Times:
    plain, packed = _Training(workload, None, draw), _Training(workload, policy, draw)
    for training in (plain, packed):
        training.timed_step()
    pairs = [(plain.timed_step(), packed.timed_step()) for _ in range(steps)]
    low, median, high = np.percentile([after / before for before, after in pairs], [25, 50, 75])
    medians = [statistics.median(side) for side in zip(*pairs, strict=True)]
    return _Times(medians[0], medians[1], Ratio(float(median), float(low), float(high)))


def _alone(workload: Workload, policy: Policy | None, draw: int, steps: int) -> float:
    training = _Training(workload, policy, draw)
    training.timed_step()
    return statistics.median(training.timed_step() for _ in range(steps))


def _measured(memory: StepMemory | None, step_ms: float | None) -> Measured:
    if memory is None:
        return Measured(None, None, None)
    return Measured(memory.peak_bytes, memory.saved_bytes, step_ms)


def _measured_from(values: Mapping[str, Any]) -> Measured:
    return typed(Measured, {name: values[name] for name in Measured.__dataclass_fields__})
