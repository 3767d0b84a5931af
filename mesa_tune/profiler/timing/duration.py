"""How long a profile will take, when its steps have been traced.

What is hard: a profile has many parts, and the time of each depends on the model. But all of them run steps,
as many in every profile. Of fast steps the Python around them takes the time, as in the tracing; of slow
ones, the steps themselves do, and their tracing may have run none.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from mesa_tune.units import counted

_LEAST_S, _SHARE, _SHARE_PER_BATCH = 30.0, 2.2, 0.25
"""Seconds that any profile takes, and multiples of the tracing: for the first batch, and for each further.

Of `profile --fast` on one core of a busy machine, tracing and the rest of the digits ViT took 14 s and 58 s,
of a GPT-2 on text 151 s and 401 s. The last number is of profiles that traced half as many steps: a full
profile of the digits ViT took 13 s and 118 s.
"""
_STEPS, _STEPS_PER_BATCH = 110, 13
"""Steps in the time of a profile: for the first batch, and for each further. A Llama with LoRA whose step
takes 0.85 s took 137 s for four batches."""


def remaining_s(traced_s: float, step_ms: float, batches: int) -> float:
    """Return about how many seconds options on so many `batches` take, if the tracing took `traced_s`."""
    by_tracing = _LEAST_S + traced_s * (_SHARE + _SHARE_PER_BATCH * (batches - 1))
    return max(by_tracing, step_ms / 1e3 * (_STEPS + _STEPS_PER_BATCH * (batches - 1)))


def remaining_text(traced_s: float, step_ms: float, batches: int, options: int) -> str:
    """Return `remaining_s` in words, with what takes the time."""
    seconds = remaining_s(traced_s, step_ms, batches)
    minutes = round(seconds / 60)
    amount = f"{round(seconds, -1):.0f} s" if seconds < 100 else f"{minutes} min"
    on = counted(batches, "batch")
    return f"about {amount} to go, for {options} settings of each layer on {on}, noise and times"


def announcing(say: Callable[[str], None], batches: int, options: int) -> Callable[[float], None]:
    """Return what says how long the rest takes, to be called at the end of a tracing that begins now.

    Its argument: milliseconds of a step.
    """
    begin = time.monotonic()
    return lambda step_ms: say(remaining_text(time.monotonic() - begin, step_ms, batches, options))
