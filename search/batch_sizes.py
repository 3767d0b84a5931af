"""The largest batch size whose step some policy fits into a budget."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from mesa_tune.errors import BudgetError, options
from mesa_tune.free_memory import is_cuda, needed_bytes, usable_bytes
from mesa_tune.profiles.profile import Profile
from mesa_tune.search.linear.highs import Deadline, TimeUpError
from mesa_tune.search.objectives import noise_limits
from mesa_tune.search.problem import Limits
from mesa_tune.search.restrictions import NO_RESTRICTIONS, Pins, Restrictions
from mesa_tune.search.steps import lowest_peak, steps
from mesa_tune.units import format_bytes

LimitsAt = Callable[[int], Limits]
_MOST_SAMPLES = 1 << 24
_LOOK_SECONDS = 5.0


def within_memory(profile: Profile, limits: Limits, batch_size: int) -> Limits:
    """Return `limits` with the peak that may be predicted for a step that is to train in so much memory."""
    if limits.peak is None:
        return limits
    static, libraries = profile.timeline.at(batch_size).static, profile.timeline.libraries
    peak = usable_bytes(limits.peak, static, libraries, cuda=is_cuda(profile.device))
    return replace(limits, peak=peak)


def most_samples(
    profile: Profile,
    limits_at: LimitsAt,
    objective: str,
    max_noise_ratio: float,
    pins: Pins,
    restrictions: Restrictions,
) -> int:
    """Return the largest batch size at which some policy meets `limits_at` of it; 0 if none does.

    The policy is within the noise ratio; under `auto`, without it only if no batch is. Where the time is up
    before a policy is found, it counts as none. Raise BudgetError if the profile has only one batch size.
    """
    low, high = profile.timeline.batch_sizes
    if low == high:
        raise BudgetError(
            f"max-batch: the profile has bytes at one batch size only, {low}\nprofile at a larger batch size"
        )
    ratios = {"auto": (max_noise_ratio, math.inf), "error": (math.inf,)}
    for ratio in ratios.get(objective, (max_noise_ratio,)):
        quiet = partial(_quiet, profile, limits_at, ratio)
        fits = partial(_fits, profile, quiet, pins, restrictions)
        most = profile.batch_size
        while most < _MOST_SAMPLES and fits(most):
            most *= 2
        if last := _last(fits, most):
            return last
    return 0


def largest_batch(profile: Profile, limits: Limits, pins: Pins, most: int) -> int | None:
    """Return the largest batch size up to `most` at which some policy meets the limits; 0 if none does.

    None: the profile has only one batch size. A limit in milliseconds is for the planned batch, so it is
    ignored.
    """
    low, high = profile.timeline.batch_sizes
    if low == high:
        return None
    untimed = replace(limits, ms=None)
    return _last(partial(_fits, profile, lambda _: untimed, pins, NO_RESTRICTIONS), most + 1)


def no_batch(profile: Profile, limits: Limits, is_memory: bool, restrictions: Restrictions) -> BudgetError:
    """Return the error for a budget in which not even one sample fits; `is_memory`: with a margin."""
    lowest = lowest_peak(steps(profile, 1, {}, restrictions), replace(limits, ms=None), Deadline())
    remedy = f"raise it or {options('max_saved')}"
    if lowest is not None:
        static, libraries = profile.timeline.at(1).static, profile.timeline.libraries
        needed = needed_bytes(lowest, static, libraries, cuda=is_cuda(profile.device))
        remedy = f"a batch of one needs {options(budget=needed if is_memory else lowest)}"
    return BudgetError(f"budget {format_bytes(limits.peak or 0)}: not even a batch of one fits\n{remedy}")


def _quiet(profile: Profile, limits_at: LimitsAt, ratio: float, batch_size: int) -> Limits:
    limits = limits_at(batch_size)
    quiet = noise_limits(profile, limits, ratio)
    return limits if isinstance(quiet, str) else quiet


def _last(fits: Callable[[int], bool], too_large: int) -> int:
    """Return the largest size below `too_large` that fits, by bisection: peaks grow with the size."""
    last = 0
    while too_large - last > 1:
        middle = (too_large + last) // 2
        last, too_large = (middle, too_large) if fits(middle) else (last, middle)
    return last


def _fits(
    profile: Profile,
    limits_at: LimitsAt,
    pins: Pins,
    restrictions: Restrictions,
    batch_size: int,
) -> bool:
    """Return whether a policy that meets the limits is found within `_LOOK_SECONDS` for each step."""
    limits = limits_at(batch_size)
    for step in steps(profile, batch_size, pins, restrictions):
        with suppress(TimeUpError):
            # Any solution will do.
            if step.program.solve(limits, price=0.0, deadline=Deadline(_LOOK_SECONDS)) is not None:
                return True
    return False
