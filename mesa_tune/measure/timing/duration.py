"""How long a profile will take, when its steps have been traced.

What is hard: a profile has many parts, and the time of each depends on the model. But all of them run steps,
as many in every profile. Of fast steps the Python around them takes the time, as in the tracing; of slow
ones, the steps themselves do, and their tracing may have run none.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from mesa_tune.units import counted

_LEAST_S, _SHARE, _SHARE_PER_BATCH = 3.0, 1.2, 0.15
"""Seconds that any profile takes, and multiples of the tracing: for the first batch, and for each further.

A digits ViT, whose step takes 0.06 s, took 6 s and then 14 s for seven batches.
"""
_STEPS, _STEPS_PER_BATCH = 110, 10
"""Steps in the time of a profile: for the first batch, and for each further. A GPT-2 of four layers took as
long as 169 steps for seven batches."""


def remaining_s(traced_s: float, step_ms: float, batches: int) -> float:
    """Return about how many seconds options on so many `batches` take, if the tracing took `traced_s`."""
    by_tracing = _LEAST_S + traced_s * (_SHARE + _SHARE_PER_BATCH * (batches - 1))
    return max(by_tracing, step_ms / 1e3 * (_STEPS + _STEPS_PER_BATCH * (batches - 1)))


def remaining_text(traced_s: float, step_ms: float, batches: int, options: int) -> str:
    """Return `remaining_s` in words, with what takes the time."""
    seconds = remaining_s(traced_s, step_ms, batches)
    minutes = round(seconds / 60)
    amount = f"{max(10, round(seconds, -1)):.0f} s" if seconds < 100 else f"{minutes} min"
    steps = f", or {float(f'{1e3 * seconds / step_ms:.2g}'):.0f} training steps" if step_ms else ""
    return f"about {amount} to go{steps}: {options} settings on {counted(batches, 'batch')}"


def announcing(say: Callable[[str], None], batches: int, options: int) -> Callable[[float], None]:
    """Return what says how long the rest takes, to be called at the end of a tracing that begins now.

    Its argument: milliseconds of a step.
    """
    begin = time.monotonic()
    return lambda step_ms: say(remaining_text(time.monotonic() - begin, step_ms, batches, options))
