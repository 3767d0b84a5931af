"""What to do when memory runs out: which batch size would fit, by the profile's timeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mesa_tune.errors import RunError
from mesa_tune.units import format_bytes

if TYPE_CHECKING:
    from mesa_tune.profiler.profile import Profile
    from mesa_tune.profiler.timeline import Assignment


@contextmanager
def advising(
    profile: Profile, batch_size: int, assignment: Assignment, advice: Callable[[int], str]
) -> Iterator[None]:
    """Lack of memory in the body comes out as a RunError that says which batch size would fit.

    The body runs steps of `batch_size` under `assignment`; `advice` says what to type for the size that fits.
    """
    from mesa_tune.workload.user_code import is_out_of_memory

    try:
        yield
    except (RuntimeError, MemoryError, RunError) as error:
        if not is_out_of_memory(error):
            raise
        fits = fitting_batch(profile, batch_size, assignment)
        known = "not even one sample would fit"
        if fits:
            peak = format_bytes(profile.timeline.at(fits).peak_bytes(assignment))
            known = f"batch size {fits} would fit in {peak}: {advice(fits)}"
        raise RunError(
            f"out of memory on {profile.device} at batch size {batch_size}\n{known}\n"
            "or free some memory: other programs on this device may hold it"
        ) from error


def fitting_batch(profile: Profile, failed: int, assignment: Assignment) -> int:
    """The largest batch size below `failed` whose step should fit, by the timeline; 0 if there is none.

    What fits is known from the profile, whose plain step did. Where the step that failed needed no more than
    that, there is less memory now, and half of the batch is a guess.
    """
    limit = profile.peak_bytes
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
