"""The error for limits that no plan meets: which limit is the reason, and what would be reachable."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from mesa_tune.errors import BudgetError, options
from mesa_tune.profiles.profile import Profile
from mesa_tune.search.batch_sizes import largest_batch
from mesa_tune.search.linear.highs import Deadline
from mesa_tune.search.problem import Limits
from mesa_tune.search.reach import without_temporaries
from mesa_tune.search.restrictions import Pins
from mesa_tune.search.steps import Step, lowest_peak
from mesa_tune.units import Budget, format_bytes


def unreachable(
    profile: Profile,
    possible: Sequence[Step],
    limits: Limits,
    pins: Pins,
    requested: Budget | None,
    deadline: Deadline,
) -> BudgetError:
    """Return the error for limits that no plan meets, with the smallest reachable peak and what would fit.

    `requested`: the budget as the user wrote it, for an answer in the same unit. Raise TimeUpError if the
    time is up before the smallest peak is known.
    """
    size = possible[0].program.space.batch_size
    if limits.saved is not None and (least := _smallest_saved(possible, deadline)) > limits.saved:
        return BudgetError(
            f"max-saved {format_bytes(limits.saved)}: unreachable at batch size {size}\n"
            f"the fewest saved bytes are {_exactly(least)}: {options(max_saved=least)}, or a smaller batch"
        )
    untimed = replace(limits, ms=None)
    lowest = lowest_peak(possible, untimed, deadline)
    if lowest is not None and limits.peak is not None and requested is not None and lowest > limits.peak:
        return BudgetError(_peak_text(profile, size, limits, pins, lowest, requested))
    return BudgetError(_time_text(profile, possible, untimed, deadline))


def _smallest_saved(possible: Sequence[Step], deadline: Deadline) -> int:
    return min(step.program.smallest_saved(deadline=deadline) for step in possible)


def _time_text(profile: Profile, possible: Sequence[Step], untimed: Limits, deadline: Deadline) -> str:
    """Return the text of the error for a limit on the step's time that is out of reach within the others."""
    plain = profile.plain_ms(possible[0].program.space.batch_size)
    solutions = [
        (step, step.program.solve(untimed, step.program.times, price=0.0, deadline=deadline))
        for step in possible
    ]
    times = [step.program.space.ms(solution.chosen) for step, solution in solutions if solution is not None]
    if not times:
        return "no policy meets all limits at once\nraise the budget or max-saved"
    slowdown = math.ceil(100 * min(times) / plain) / 100
    return (
        "max-slowdown: no policy within the other limits is that fast\n"
        f"the fastest takes {slowdown:g} times the plain step: {options(max_slowdown=slowdown)}"
    )


def _peak_text(
    profile: Profile,
    batch_size: int,
    limits: Limits,
    pins: Pins,
    lowest: int,
    requested: Budget,
) -> str:
    assert limits.peak is not None
    sized = profile.timeline.at(batch_size)
    return (
        f"budget {format_bytes(limits.peak)}: not reachable at batch size {batch_size}; "
        f"static bytes are {format_bytes(sized.static)}\n"
        f"the smallest reachable peak is {_exactly(lowest)}: "
        f"{options(budget=_as_requested(lowest, sized.peak_bytes({}), requested))}\n"
        f"{_batch_advice(profile, limits, pins, batch_size)}"
    )


def _as_requested(lowest: int, plain: int, requested: Budget) -> int | str:
    """Return the least reachable budget, as a percentage if the user wrote one."""
    if requested.fraction is None:
        return lowest
    tenths = math.ceil(1000 * lowest / plain)
    while int(tenths / 10 / 100 * plain) < lowest:
        tenths += 1
    return f"{tenths / 10:g}%"


def _batch_advice(profile: Profile, limits: Limits, pins: Pins, batch_size: int) -> str:
    fits = largest_batch(profile, limits, pins, batch_size - 1)
    if fits is None:
        return f"profile at a smaller batch size than {batch_size}"
    if fits == 0:
        return f"not even a batch of one fits: {_besides_activations(profile)}"
    # In bytes: a percentage would be of the smaller batch's peak.
    return f"batch size {fits} would fit: {options(budget=limits.peak, batch_size=fits)}"


def _besides_activations(profile: Profile) -> str:
    """Return what fills the step of a batch of one, and the remedy if there is one."""
    peak = without_temporaries(profile, 1)
    if peak is None:
        return "weights, gradients and optimizer state fill it"
    return f"with `fused=True` the optimizer has no temporaries, and one needs {format_bytes(peak)}"


def _exactly(count: int) -> str:
    """Return rounded bytes, and the exact number, which can be the next budget."""
    return f"{format_bytes(count)} ({count} bytes)"
