"""`Noise`: the minibatch's own noise, beside which errors of gradients are invisible or not."""

from __future__ import annotations

import operator
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat

NO_NOISE = 1e-6
"""Batches whose gradients vary less than this are all the same: it is what float32 rounds away."""


@dataclass(frozen=True)
class Noise:
    """The minibatch's own noise: how much the gradients of whole steps vary from batch to batch.

    `relative`: Σ‖g_b − ḡ‖² / (n − 1) over mean ‖g_b‖². `norms`: ‖g_b‖² of each batch, or of those that
    errors were measured on, over the mean of all n; in a profile times a factor with which the prices predict
    for a whole policy the mean ‖ĝ − g‖² that was measured. `scale`: the mean of `norms`. `measured`: that
    mean over the mean ‖g_b‖²; None if no policy was measured.
    """

    relative: float
    scale: float
    norms: tuple[float, ...] = ()
    measured: float | None = None

    @property
    def measured_ratio(self) -> float | None:
        """The noise ratio of the policy that was measured; None as in `ratio`."""
        return None if self.measured is None or self.relative < NO_NOISE else self.measured / self.relative

    def ratio(self, errors: Sequence[float] | None) -> float | None:
        """Return mean ‖ĝ − g‖² over the noise; None if unknown, or if all batches are the same.

        `errors`: relative ones, of the first batches in the order of `norms`. Without norms (older
        profiles), `scale` stands for each of them.
        """
        if errors is None or self.relative < NO_NOISE:
            return None
        norms = self.norms or repeat(self.scale)
        return statistics.fmean(map(operator.mul, errors, norms)) / self.relative
