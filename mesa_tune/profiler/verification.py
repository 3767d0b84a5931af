"""`verify`: real training steps under a policy, beside plain ones. Predicted then stands beside measured."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from mesa_tune.conversion import compress_saved, convert
from mesa_tune.errors import RunError
from mesa_tune.files import read_document, schema, typed, write_document
from mesa_tune.policy import Policy
from mesa_tune.profiler.meter import StepMemory, measure_step, take_step
from mesa_tune.profiler.profile import Prediction
from mesa_tune.workload.user_code import is_out_of_memory, seeded
from mesa_tune.workload.workload import Workload

Value = TypeVar("Value")

UNUSED_SEEDS = 500_000
_REMEDY = "make it again with `mesa-tune verify --force`"


@dataclass(frozen=True, slots=True)
class Measured:
    """A training step as measured: bytes, and the median time of a step. None: it did not fit in memory."""

    peak_bytes: int | None
    saved_bytes: int | None
    step_ms: float | None


@dataclass(frozen=True, slots=True)
class Ratio:
    """Step time under the policy over plain, pair by pair: the median and the middle half's ends."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Verification:
    """What a policy does to real steps of a workload, beside the plain ones and beside the prediction.

    `gradient_errors` holds one relative squared error a rounding seed, all on the same batch and random
    state; `gradient_error` is their mean. `step_ratio` is None where the two could not be timed in turn.
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

    @property
    def gradient_error(self) -> float | None:
        """Mean over the rounding seeds; None where the plain step did not fit."""
        return statistics.fmean(self.gradient_errors) if self.gradient_errors else None

    def predicted_beside(self, profiled_ms: float | None) -> Prediction | None:
        """What was predicted, with the step's time on the clock of the measured plain step.

        `profiled_ms`: the plain step's time in the profile. The machine may have been busier then: of times
        only the ratio is predicted.
        """
        predicted, plain_ms = self.predicted, self.baseline.step_ms
        if predicted is None or predicted.step_ms is None or plain_ms is None or not profiled_ms:
            return predicted
        return replace(predicted, step_ms=predicted.step_ms / profiled_ms * plain_ms)

    def to_dict(self) -> dict[str, Any]:
        """The JSON document `mesa-tune.verify/1`."""
        measured = {"gradient_error": self.gradient_error, "gradient_noise_ratio": None}
        return {
            "schema": schema("verify"),
            "device": self.device,
            "batch_size": self.batch_size,
            "torch": self.torch,
            "steps": self.steps,
            "baseline": _plain(self.baseline),
            "policy": {**_plain(self.policy), **measured},
            "predicted": self.predicted.to_dict() if self.predicted else None,
            "step_ratio": _plain(self.step_ratio) if self.step_ratio else None,
            "gradient_errors": list(self.gradient_errors),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Verification:
        """The verification that `to_dict` made `values` of; KeyError, TypeError or ValueError otherwise."""
        ratio, predicted = values["step_ratio"], values["predicted"]
        parts = {
            "baseline": _measured(values["baseline"]),
            "policy": _measured(values["policy"]),
            "gradient_errors": tuple(float(error) for error in values["gradient_errors"]),
            "step_ratio": None if ratio is None else typed(Ratio, ratio),
            "predicted": None if predicted is None else Prediction.from_dict(predicted),
        }
        return typed(
            cls, {**{name: values[name] for name in ("device", "batch_size", "torch", "steps")}, **parts}
        )

    def save(self, path: str | Path) -> None:
        """Write the document to `path`, whole or not at all. RunError where it cannot be written."""
        write_document(path, self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> Verification:
        """The verification saved at `path`; RunError for a file that is missing, damaged or foreign."""
        return read_document(path, "verify", cls.from_dict, _REMEDY)


def verify(
    workload: Workload,
    policy: Policy,
    *,
    predicted: Prediction | None = None,
    steps: int = 5,
    seeds: int = 3,
) -> Verification:
    """What `policy` does to real training steps of `workload`: memory, time and gradient error, measured.

    Memory is that of the second step, of the plain model and of a converted one. `steps` pairs of steps,
    plain and policy in turn, are timed after a warm-up pair. The gradient error is measured with `seeds`
    rounding seeds on one batch. `predicted` is kept beside them. Random generators are afterwards as before.
    Where the plain step runs out of memory, what depends on it is None.

    Raises:
        PolicyError: the policy was made for another model.
        WorkloadError: the workload's functions fail.
        RunError: the step under the policy does not fit in memory.
    """
    if steps < 1 or seeds < 1:
        raise RunError(f"`steps >= 1` and `seeds >= 1` must hold, but got (steps={steps}, seeds={seeds}).")
    with seeded(workload.seed, workload.device):
        plain = _unless_out_of_memory(lambda: _memory(workload, None))
        packed = _unless_out_of_memory(lambda: _memory(workload, policy))
        if packed is None:
            raise _does_not_fit(workload) from MemoryError()
        times = _times(workload, policy, steps, plain_fits=plain is not None)
        errors = _gradient_errors(workload, policy, seeds) if plain is not None else ()
    return Verification(
        baseline=_joined(plain, times.plain),
        policy=_joined(packed, times.packed),
        gradient_errors=errors,
        step_ratio=times.ratio,
        predicted=predicted,
        device=workload.device,
        batch_size=workload.batch_size,
        torch=torch.__version__,
        steps=steps,
    )


class _Training:
    """A model of the workload with all that a step needs; converted if there is a policy."""

    def __init__(self, workload: Workload, policy: Policy | None) -> None:
        self.workload = workload
        self.policy = policy
        self.model = workload.build()
        if policy is not None:
            convert(self.model, policy, seed=workload.seed)
        self.batch = workload.make_batch()
        self.optimizer = workload.make_optimizer(self.model)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        with nullcontext() if self.policy is None else compress_saved(self.policy):
            return self.workload.compute_loss(model, batch, check=False)

    def timed_step(self) -> float:
        """Milliseconds that one step takes, the device's work included."""
        self._wait()
        begin = time.perf_counter()
        take_step(self.model, self.batch, self.loss, self.optimizer)
        self._wait()
        return 1000 * (time.perf_counter() - begin)

    def _wait(self) -> None:
        if self.workload.device.startswith("cuda"):
            torch.cuda.synchronize(self.workload.device)


@dataclass(frozen=True, slots=True)
class _Times:
    plain: float | None
    packed: float
    ratio: Ratio | None


def _memory(workload: Workload, policy: Policy | None) -> StepMemory:
    training = _Training(workload, policy)
    # Once with its value looked at: a loss that is NaN or no scalar gets its own message here.
    workload.compute_loss(training.model, training.batch)
    return measure_step(training.model, training.batch, training.loss, training.optimizer)


def _times(workload: Workload, policy: Policy, steps: int, *, plain_fits: bool) -> _Times:
    """In turn, so that what slows the machine down slows both; alone where memory does not hold both."""
    both = _unless_out_of_memory(lambda: _in_turn(workload, policy, steps)) if plain_fits else None
    if both is not None:
        return both
    alone = _alone(workload, None, steps) if plain_fits else None
    return _Times(alone, _alone(workload, policy, steps), None)


def _in_turn(workload: Workload, policy: Policy, steps: int) -> _Times:
    plain, packed = _Training(workload, None), _Training(workload, policy)
    for training in (plain, packed):
        training.timed_step()
    pairs = [(plain.timed_step(), packed.timed_step()) for _ in range(steps)]
    low, median, high = np.percentile([after / before for before, after in pairs], [25, 50, 75])
    medians = [statistics.median(side) for side in zip(*pairs, strict=True)]
    return _Times(medians[0], medians[1], Ratio(float(median), float(low), float(high)))


def _alone(workload: Workload, policy: Policy | None, steps: int) -> float:
    training = _Training(workload, policy)
    training.timed_step()
    return statistics.median(training.timed_step() for _ in range(steps))


def _gradient_errors(workload: Workload, policy: Policy, seeds: int) -> tuple[float, ...]:
    """On the first batch, with rounding seeds that neither profile nor search has used."""
    from mesa_tune.profiler.joint_error import JointError

    pairs = [(0, UNUSED_SEEDS + number) for number in range(seeds)]
    return tuple(JointError(workload).errors(policy, pairs))


def _joined(memory: StepMemory | None, step_ms: float | None) -> Measured:
    if memory is None:
        return Measured(None, None, None)
    return Measured(memory.peak_bytes, memory.saved_bytes, step_ms)


def _unless_out_of_memory(measure: Callable[[], Value]) -> Value | None:
    try:
        return measure()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    # Outside the handler: the error holds the frames, and they the tensors.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None


def _does_not_fit(workload: Workload) -> RunError:
    return RunError(
        f"out of memory on {workload.device}: a step of batch size {workload.batch_size} does not fit under "
        "this policy\nsearch again with a smaller --budget or --batch-size"
    )


def _plain(value: Measured | Ratio) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def _measured(values: Mapping[str, Any]) -> Measured:
    return typed(Measured, {name: values[name] for name in Measured.__dataclass_fields__})
