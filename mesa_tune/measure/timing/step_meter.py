"""Measure what a study of policies needs: joint gradient errors, times of steps taken in turn, and peaks."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from mesa_tune.files import locked
from mesa_tune.measure.errors.joint_error import JointError
from mesa_tune.measure.fake_steps import PolicyTracer
from mesa_tune.measure.timing.step_time import StepTimer
from mesa_tune.policy import Policy
from mesa_tune.profiles.own_noise import GradientError, OwnNoise, Pair
from mesa_tune.profiles.profile import Profile
from mesa_tune.workload.clock import clock_of
from mesa_tune.workload.preserve import preserved
from mesa_tune.workload.workload import Workload

WARM_UP = 2
"""Rounds that are not counted: in the first, calls are planned and what is derived is found."""
_USER = os.getuid() if hasattr(os, "getuid") else 0
_LOCK = Path(tempfile.gettempdir()) / f"mesa-tune-step-times-{_USER}.lock"


class StepMeter:
    """Measures gradient errors, beside `own` noise, and step times of a workload, on one model.

    `tracer`: traces peaks, at the batch size that is planned for.
    """

    def __init__(self, workload: Workload, own: OwnNoise, tracer: PolicyTracer) -> None:
        self.workload = workload
        self.joint = JointError(workload, own=own)
        self.tracer = tracer

    def peak(self, policy: Policy) -> int | None:
        """Return the traced peak, in bytes; None where it cannot be traced."""
        step = self.tracer.trace(policy)
        return None if step is None else step.peak

    def errors(self, policy: Policy, pairs: Sequence[Pair]) -> list[GradientError]:
        """Return the gradient error of `policy` at each pair of a batch's draw and a rounding seed."""
        return self.joint.errors(policy, pairs)

    def step_times(self, policies: Sequence[Policy], rounds: int) -> list[list[float]]:
        """Return milliseconds of whole steps on one batch: for each of `rounds`, one under each policy.

        All start from the same parameters, which are restored afterwards. Only one process of this machine
        measures times at once: the others wait.
        """
        workload, model = self.workload, self.joint.model
        optimizer = workload.make_optimizer(model)
        with locked(_LOCK), preserved(model, optimizer) as restore:
            timer = StepTimer(workload, model, optimizer, restore, clock_of(workload.device))
            return timer.in_turn(policies, WARM_UP + rounds)[WARM_UP:]


@contextmanager
def measuring(profile: Profile, tracer: PolicyTracer) -> Iterator[StepMeter]:
    """Measure a model after its first steps (`JointError.take_first_steps`), and restore it afterwards.

    Errors and times are those at the profiled batch size; peaks are those of the `tracer`, of whose workload
    the model is.
    """
    assert profile.own_noise is not None
    # A plain step of the planned batch may not fit in memory; one of the profiled batch did.
    workload = tracer.workload.with_batch_size(profile.batch_size)
    meter = StepMeter(workload, profile.own_noise, tracer)
    with preserved(meter.joint.model):
        meter.joint.take_first_steps()
        yield meter
