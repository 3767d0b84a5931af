"""`verify`: measure real training steps under a policy and plain ones, to compare with the prediction.

What is hard: a machine's speed drifts, so the two kinds of steps are timed in turn; and where the plain step
does not fit in memory, everything that does not depend on it must still be measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from mesa_tune.conversion import compress_saved, convert
from mesa_tune.errors import RunError, options
from mesa_tune.measure.draws import longest_batch, look
from mesa_tune.measure.errors.joint_error import NOISE_STEPS
from mesa_tune.measure.errors.unseen import unseen_errors, unseen_errors_by_group
from mesa_tune.measure.memory.meter import StepMemory, measure_second_step, unless_out_of_memory
from mesa_tune.measure.timing.heap import steady_heap
from mesa_tune.policy import Policy
from mesa_tune.profiles.profile import Prediction
from mesa_tune.profiles.verification import BATCHES, Measured, Ratio, Verification
from mesa_tune.workload.clock import clock_of
from mesa_tune.workload.workload import Workload


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
