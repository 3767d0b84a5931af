"""Which peaks policies can reach, and whether activations are what fills the step at all.

The hard part: the peak can be where no activation lives, most often in the optimizer's step. Then no budget
below it can be met, whatever is compressed, and the user needs to know why, and what helps instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mesa_tune.policy import Policy
from mesa_tune.profiles.profile import Profile
from mesa_tune.search.linear.highs import Deadline, TimeUpError
from mesa_tune.search.objectives import MAX_NOISE_RATIO, noise_limits
from mesa_tune.search.problem import Limits
from mesa_tune.search.restrictions import NO_RESTRICTIONS
from mesa_tune.search.steps import Step, steps

WORTH = 0.05
"""Share of the plain peak that policies must save for activations to be worth compressing."""
LARGE_SHARE = 0.9
"""Share of the plain peak that 4 bits everywhere need at the batch size of `batch_size_of_activations`."""
_TEMPORARIES = 0.05
_MOST_SAMPLES = 1 << 24
# Advice needs no tight proof.
_GAP, _SECONDS = 1e-2, 2.0


@dataclass(frozen=True)
class Reach:
    """Peaks in bytes, workspaces included, at the profiled batch size.

    `plain`: of the plain step. `lowest`: the lowest that a policy reaches, to 1 %. `quiet`: the lowest within
    the noise ratio `MAX_NOISE_RATIO`; None where the ratio is unknown or no policy is within it.
    `without_temporaries`, `batch_size`: see the functions that find them.
    """

    plain: int
    lowest: int
    quiet: int | None
    without_temporaries: int | None
    batch_size: int | None

    @property
    def is_worth_it(self) -> bool:
        """Whether some policy lowers the peak by at least `WORTH` of it."""
        return self.lowest <= (1 - WORTH) * self.plain

    @property
    def budget(self) -> str:
        """A budget with room for choices: 40%, or a quarter of the way from the lowest peak to the plain one.

        It is a percentage that some policy meets, within the noise ratio if `quiet` is known.
        """
        lowest = self.lowest if self.quiet is None else self.quiet
        share = max(40.0, 100 * (lowest + 0.25 * (self.plain - lowest)) / self.plain)
        rounded = 5 * math.ceil(share / 5)
        return f"{rounded if rounded < 100 else min(99, math.ceil(share))}%"


def reach(profile: Profile) -> Reach:
    """Return the peaks that policies reach, within seconds. The profile must have prices."""
    size = profile.batch_size
    plain = profile.timeline.at().peak_bytes({})
    possible = steps(profile, size, {}, NO_RESTRICTIONS)
    # Where the time is up, a policy that needs no search.
    four_bits = profile.assignment(Policy.uniform(level=16))
    lowest = _lowest(possible, Limits()) or profile.timeline.at().peak_bytes(four_bits)
    limits = noise_limits(profile, Limits(), MAX_NOISE_RATIO)
    quiet = None if isinstance(limits, str) else _lowest(possible, limits)
    return Reach(
        plain, min(lowest, plain), quiet, without_temporaries(profile), batch_size_of_activations(profile)
    )


def _lowest(possible: Sequence[Step], limits: Limits) -> int | None:
    """Return the lowest peak of all steps within the other limits; None if there is none or time is up."""
    peaks = [_lowest_of(step, limits) for step in possible]
    return min((peak for peak in peaks if peak is not None), default=None)


def _lowest_of(step: Step, limits: Limits) -> int | None:
    try:
        solution = step.program.smallest_peak(limits, gap=_GAP, deadline=Deadline(_SECONDS))
    except TimeUpError:
        return None
    return None if solution is None else int(solution.cost)


def without_temporaries(profile: Profile, batch_size: int | None = None) -> int | None:
    """Return the plain peak if the optimizer's step had no working memory, as `fused=True` makes it.

    None where that would lower the peak by less than 5 %.
    """
    sized = profile.timeline.at(batch_size)
    step = sized.under({})
    in_step = np.array([slot.phase == "step" for slot in sized.slots], dtype=np.bool_)
    working = np.where(in_step, step.work - np.minimum(sized.once.gradients, step.work), 0)
    peak = int((step.live - working).max(initial=sized.static))
    return peak if peak <= (1 - _TEMPORARIES) * step.peak_bytes else None


def batch_size_of_activations(profile: Profile) -> int | None:
    """Return the smallest batch size at which 4 bits everywhere lower the peak to `LARGE_SHARE` of it.

    None where there is none, or where the profile has only one batch size.
    """
    low, high = profile.timeline.batch_sizes
    if low == high:
        return None
    assignment = profile.assignment(Policy.uniform(level=16))

    def large(size: int) -> bool:
        sized = profile.timeline.at(size)
        return sized.peak_bytes(assignment) <= int(LARGE_SHARE * sized.peak_bytes({}))

    too_small, enough = 0, 1
    while not large(enough):
        too_small, enough = enough, 2 * enough
        if enough > _MOST_SAMPLES:
            return None
    while enough - too_small > 1:
        middle = (too_small + enough) // 2
        too_small, enough = (too_small, middle) if large(middle) else (middle, enough)
    return enough
