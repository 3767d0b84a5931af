"""A sweep of four cases that end in every way there is; what the runner's tests run."""

from __future__ import annotations

import os
import time

from benchmarks.sweeps.runner import BROKEN, RIGHT, Case, Outcome, Sweep


def _run(case: Case) -> Outcome:
    if case.name == "exits":
        os._exit(3)
    if case.name == "hangs":
        time.sleep(60)
    return Outcome(BROKEN, "on purpose") if case.name == "breaks" else Outcome(RIGHT, figures={"error": 0.5})


SWEEP = Sweep(
    "samples", lambda: [Case(name, "once") for name in ("right", "exits", "hangs", "breaks")], _run, 1.0
)
