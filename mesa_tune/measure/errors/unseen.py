"""Errors of a policy on batches and with rounding seeds that neither profile nor search uses."""

from __future__ import annotations

import math

from mesa_tune.errors import RunError
from mesa_tune.measure.errors.at_checkpoints import at_checkpoints
from mesa_tune.measure.errors.by_group import errors_by_group
from mesa_tune.measure.errors.joint_error import NOISE_STEPS, JointError
from mesa_tune.measure.errors.noise import Noise
from mesa_tune.measure.memory.meter import unless_out_of_memory
from mesa_tune.policy import Policy
from mesa_tune.profiles.own_noise import AtCheckpoint
from mesa_tune.profiles.verification import BATCHES, GroupError
from mesa_tune.workload.workload import Workload

UNUSED_SEEDS = UNUSED_DRAWS = 500_000
"""The first rounding seed and the first batch that neither profile nor search uses."""


def unseen_errors(
    workload: Workload, policy: Policy, seeds: int, *, checkpointed: bool = False
) -> tuple[list[float], Noise, list[AtCheckpoint]]:
    """Return errors on batches and with rounding seeds that neither profile nor search uses.

    Also return the noise with the errors beside it, and both at each checkpoint.
    """
    joint, draws = (
        JointError(workload, checkpointed=checkpointed),
        range(UNUSED_DRAWS, UNUSED_DRAWS + BATCHES),
    )
    numbers = range(UNUSED_SEEDS, UNUSED_SEEDS + seeds)
    joint.take_first_steps(UNUSED_DRAWS)
    errors = [
        error.error
        for draw in draws
        for error in joint.errors(policy, [(draw, number) for number in numbers])
    ]
    if not all(map(math.isfinite, errors)):
        raise RunError(
            "under this policy a gradient has infinite or NaN elements, that of the plain step has none\n"
            "find the layer by giving parts of the model `enable: False`, and store it in more bits"
        )
    noise = joint.noise(policy, first=UNUSED_DRAWS)
    model = joint.model
    del joint  # it refers to gradients
    entries = at_checkpoints(
        workload, model, policy, batches=seeds, first_seed=UNUSED_SEEDS, checkpointed=checkpointed
    )
    return errors, noise, list(entries)


def unseen_errors_by_group(
    workload: Workload, policy: Policy, seeds: int, *, checkpointed: bool
) -> tuple[GroupError, ...]:
    """Return the errors within groups, on the same batches and with the same seeds; none if out of memory."""
    pairs = [(UNUSED_DRAWS + batch, UNUSED_SEEDS + seed) for batch in range(BATCHES) for seed in range(seeds)]

    def measured() -> list[GroupError]:
        joint = JointError(workload, checkpointed=checkpointed)
        joint.take_first_steps(UNUSED_DRAWS)
        return errors_by_group(joint, policy, pairs, UNUSED_DRAWS + NOISE_STEPS)

    return tuple(unless_out_of_memory(measured) or ())
