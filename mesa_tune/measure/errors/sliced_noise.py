"""The noise of whole steps from the gradients of slices of their batches.

What is hard: the noise shows on about 64 gradients, and 64 steps are a long time. But where the loss is a
mean over samples, the gradient of a batch is the mean of those of its slices, and the variance of one of n
slices is n times that of the batch: 64 slices take about eight steps. This is no use with batch norm and for
losses that couple samples or sum them, nor where the samples of a batch are more alike than those of two
batches. So both are looked at first, and where they do not hold, whole steps show the noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mesa_tune.errors import WorkloadError
from mesa_tune.measure.errors.joint_error import Gradient, JointError, add_to
from mesa_tune.measure.errors.noise import Noise, noise_of
from mesa_tune.measure.errors.sampled import normalizes
from mesa_tune.notice import Progress, unshown
from mesa_tune.profiles.own_noise import Floats, OwnNoise
from mesa_tune.workload.batches import batch_size, select

SLICES, BATCHES = 8, 8
"""So many batches are cut into so many slices each."""
_OTHER_RANDOMNESS = 7_000_000
"""The first of the random states of slices: dropout in one says nothing about another."""
_NO_MEAN, _TWO_RANDOM = 0.2, 1.5
"""A batch's gradient differs from the mean of its slices' by at most this share of the noise, and so many
times what it differs from itself with other random numbers."""
_ALIKE = 2.5
"""Means of slices vary from batch to batch by at most so many times what slices let expect."""


def noise_of_steps(
    joint: JointError,
    *,
    fewest: int = 1,
    show: Progress = unshown,
    goes_on: Callable[[], bool] = lambda: True,
) -> Noise:
    """Return the noise of whole steps: from slices of batches, or from `fewest` and more whole gradients.

    `goes_on`: asked whether there is time for more. Errors count beside this noise from then on.
    """
    if not normalizes(joint.model) and joint.workload.batch_size >= SLICES:
        try:
            noise = _Slices(joint).noise(show, goes_on)
        except WorkloadError:  # of a loss that takes no fewer samples
            noise = None
        if noise is not None:
            joint.own = noise.own
            return noise
    return joint.noise(fewest=fewest, show=show, goes_on=goes_on)


class _Slices:
    """The gradients of slices so far: their squared norms, their sum, and those of the means of batches."""

    def __init__(self, joint: JointError) -> None:
        self.joint, self.parts = joint, joint.parts
        self.squares: list[Floats] = []
        self.of_means: list[Floats] = []
        self.total: Gradient = [None] * len(joint.parameters)

    def noise(self, show: Progress, goes_on: Callable[[], bool]) -> Noise | None:
        """Return the noise; None where slices do not show it."""
        for draw in range(BATCHES):
            show(f"gradient noise, batch {draw + 1} of {BATCHES}", draw / BATCHES)
            if not self._add(draw):
                return None
            if draw and not goes_on():
                break
        count = self.joint.workload.accumulation
        noise = noise_of(self.parts, self.squares, self._of_total(), [], slices=SLICES, micro_batches=count)
        return noise if noise.own.is_known and self._batches_are_alike(noise.own) else None

    def _add(self, draw: int) -> bool:
        """Add the slices of a batch; return False if they are no help."""
        work, joint = self.joint.workload, self.joint
        batch = work.make_batch(draw=draw * work.accumulation)
        if batch_size(batch) != work.batch_size:
            return False
        mean: Gradient = [None] * len(self.total)
        for number, slice_ in enumerate(_slices(batch, work.batch_size)):
            gradient = joint.gradient([slice_], _OTHER_RANDOMNESS + SLICES * draw + number)
            self.squares.append(self.parts.squares(gradient))
            add_to(mean, gradient, 1 / SLICES)
            del gradient
        if draw == 0 and not self._is_mean(batch, mean):
            return False
        self.of_means.append(self.parts.squares(mean))
        add_to(self.total, mean, SLICES)
        return True

    def _is_mean(self, batch: Any, mean: Gradient) -> bool:
        """Return whether the gradient of a batch is the mean of those of its slices, but for dropout."""
        size = self.joint.workload.batch_size
        whole = select(batch, slice(0, size // SLICES * SLICES), size)
        gradient = self.joint.gradient([whole], 0)
        difference = self.parts.squares(mean, gradient)
        random = self.parts.squares(self.joint.gradient([whole], _OTHER_RANDOMNESS), gradient)
        own = noise_of(self.parts, self.squares, SLICES**2 * self.parts.squares(mean), [], slices=SLICES).own
        return own.ratio(difference) <= _NO_MEAN + _TWO_RANDOM * own.ratio(random)  # False for NaN

    def _of_total(self) -> Floats:
        return self.parts.squares(self.total)

    def _batches_are_alike(self, own: OwnNoise) -> bool:
        count = len(self.of_means)
        if count < BATCHES:
            return True
        squares = np.sum(self.of_means, axis=0) - self._of_total() / SLICES**2 / count
        found = np.maximum(0.0, squares) / (count - 1) * self.joint.workload.accumulation
        return own.ratio(found) <= _ALIKE


def _slices(batch: Any, size: int) -> Iterator[Any]:
    step = size // SLICES
    return (select(batch, slice(number * step, (number + 1) * step), size) for number in range(SLICES))
