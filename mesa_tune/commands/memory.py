"""Advice when memory runs out: the batch size that would fit, from the timeline of the profile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mesa_tune.errors import RunError
from mesa_tune.units import format_bytes

if TYPE_CHECKING:
    from mesa_tune.profiles.profile import Profile
    from mesa_tune.profiles.timeline.distinct import Assignment


@contextmanager
def advising(
    profile: Profile, batch_size: int, assignment: Assignment, advice: Callable[[int], str]
) -> Iterator[None]:
    """Turn an out-of-memory error in the body into a RunError that names the batch size that would fit.

    The body runs steps of `batch_size` under `assignment`; `advice` returns the command for the size that
    fits.
    """
    from mesa_tune.workload.user_code import is_out_of_memory

    try:
        yield
    except (RuntimeError, MemoryError, RunError) as error:
        if not is_out_of_memory(error):
            raise
        fits = fitting_batch(profile, batch_size, assignment)
        remedy = "not even one sample would fit"
        if fits:
            peak = format_bytes(profile.timeline.at(fits).peak_bytes(assignment))
            remedy = f"batch size {fits} would fit in {peak}: {advice(fits)}"
        raise RunError(
            f"out of memory on {profile.device} at batch size {batch_size}\n{remedy}\n"
            "or free some memory: other programs on this device may use it"
        ) from error


def fitting_batch(profile: Profile, failed: int, assignment: Assignment) -> int:
    """Return the largest batch size below `failed` whose step should fit, by the timeline; 0 if none does.

    The peak of the profiled step is taken for the memory limit. If the failed step needed no more than that,
    there is less memory now, and half the batch is a guess.
    """
    limit = profile.timeline.at().peak_bytes({})
    low, high = profile.timeline.batch_sizes
    if low == high:
        return 0
    if profile.timeline.at(failed).peak_bytes(assignment) <= limit:
        return failed // 2
    fits, too_large = 0, failed
    while too_large - fits > 1:
        middle = (fits + too_large) // 2
        if profile.timeline.at(middle).peak_bytes(assignment) <= limit:
            fits = middle
        else:
            too_large = middle
    return fits
