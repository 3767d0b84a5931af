"""Measure what a study of policies needs: joint gradient errors, and times of whole steps taken in turn."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from mesa_tune.files import locked
from mesa_tune.policy import Policy
from mesa_tune.profiler.errors.joint_error import GradientError, JointError, Pair
from mesa_tune.profiler.errors.noise import OwnNoise
from mesa_tune.profiler.timing.step_time import StepTimer
from mesa_tune.workload.clock import clock_of
from mesa_tune.workload.preserve import preserved
from mesa_tune.workload.workload import Workload

WARM_UP = 2
"""Rounds that are not counted: in the first, calls are planned and what is derived is found."""
_USER = os.getuid() if hasattr(os, "getuid") else 0
_LOCK = Path(tempfile.gettempdir()) / f"mesa-tune-step-times-{_USER}.lock"


class StepMeter:
    """Measures a workload's gradient errors, beside `own` noise, and step times, on one model."""

    def __init__(self, workload: Workload, own: OwnNoise) -> None:
        self.workload = workload
        self.joint = JointError(workload, own=own)

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
def measuring(workload: Workload, own: OwnNoise) -> Iterator[StepMeter]:
    """Measure a model after its first steps (`JointError.take_first_steps`), and restore it afterwards."""
    meter = StepMeter(workload, own)
    with preserved(meter.joint.model):
        meter.joint.take_first_steps()
        yield meter
