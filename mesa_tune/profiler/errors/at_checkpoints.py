"""Gradient error and noise with the weights of checkpoints: at several points of training.

What is hard: both change with training. Measured with a model's first weights, they say little about its last
ones.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from mesa_tune.errors import WorkloadError
from mesa_tune.policy import Policy
from mesa_tune.profiler.errors.joint_error import JointError
from mesa_tune.profiler.errors.weights import load_weights
from mesa_tune.workload.workload import Workload


@dataclass(frozen=True, slots=True)
class AtCheckpoint:
    """Gradient error of a policy, and the noise of the batches, with the weights of a checkpoint.

    `checkpoint`: the path of its file; `gradient_noise`: variance of the gradient from batch to batch over
    ‖g‖², see `Noise`; `gradient_noise_ratio`: None if all batches are the same.
    """

    checkpoint: str
    gradient_error: float
    gradient_noise: float
    gradient_noise_ratio: float | None


def at_checkpoints(
    workload: Workload,
    model: nn.Module,
    policy: Policy,
    *,
    batches: int,
    first_seed: int = 0,
    checkpointed: bool = False,
) -> Iterator[AtCheckpoint]:
    """Yield error and noise of `policy` at each checkpoint of `workload`; `model` has its weights afterwards.

    The error is the mean over the first `batches` draws, each with a rounding seed of its own.
    `checkpointed`: see `JointError`.

    Raise WorkloadError for a file that is not of this model, or with whose weights no step can be taken.
    """
    for path in workload.checkpoints:
        load_weights(model, path)
        joint = JointError(workload, model, checkpointed=checkpointed)
        try:
            errors = joint.errors(policy, [(draw, first_seed + draw) for draw in range(batches)])
            noise = joint.noise(fewest=batches)
        except WorkloadError as error:
            raise WorkloadError(f"checkpoint {path}: {error}") from error
        yield AtCheckpoint(str(path), statistics.fmean(errors), noise.relative, noise.ratio(errors))
