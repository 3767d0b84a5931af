"""Long studies: resident memory and time per trial, with an objective that costs nothing.

`python benchmarks/fleet.py [--trials 10000]`. A study of 100 trials in SQLite is measured at its end, copied
until it has so many trials, and measured again where it goes on, in a process of its own. Before that, it is
checked that a study that is continued has the policy of one that was not interrupted.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
from common import append

from mesa_tune.policy import Policy
from mesa_tune.profiler.errors.joint_error import GradientError, Pair
from mesa_tune.profiler.profile import Profile
from mesa_tune.search import search_policy

LAST = 20
"""Trials whose median time is taken."""
_PARTS = ("trial_params", "trial_values", "trial_user_attributes", "trial_system_attributes")


class Summed:
    """The sum of the layers' errors, of which those of norms count 20 times."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile

    def errors(self, policy: Policy, pairs: Sequence[Pair]) -> list[GradientError]:
        assignment = self.profile.assignment(policy)
        error = sum(
            (self.profile.layer_error(layer, assignment[layer.name]) or 0.0)
            * (20 if layer.tag == "layernorm" else 1)
            for layer in self.profile.layers
        )
        return [GradientError(*[error * (1 + 1e-3 * ((draw + seed) % 7))] * 2) for draw, seed in pairs]

    def step_times(self, policies: Sequence[Policy], rounds: int) -> list[list[float]]:
        raise AssertionError("the profile has no noise, so the objective is the error")


def resident() -> float:
    """Return the resident memory of this process in MB."""
    return float(psutil.Process().memory_info().rss) / 1e6


def main() -> None:
    """Check, measure, print and append to the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--measure", nargs=2, metavar=("PATH", "TRIALS"))
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure[0], int(options.measure[1]))))
        return
    check()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "study.db"
        _plan(_profile(), 100 - LAST, str(path))
        hundredth = _in_a_process(path, 100)
        multiply(path, options.trials - LAST)
        last = _in_a_process(path, options.trials)
    figures = {
        "trials": options.trials,
        "grown_mb": round(last["grown_mb"] - hundredth["grown_mb"], 1),
        "hundredth_ms": hundredth["ms"],
        "last_ms": last["ms"],
        "ratio": round(last["ms"] / hundredth["ms"], 2),
    }
    print(figures)
    print(append("fleet", figures))


def measure(path: str, trials: int) -> dict[str, float]:
    """Continue a study up to `trials`; return the memory that it took, and the time of its last trials."""
    profile = _profile()
    _plan(profile, 12, None)  # loads what any study needs
    before, ends = resident(), list[float]()
    _plan(profile, trials, path, progress=lambda _: ends.append(time.perf_counter()))
    seconds = [after - earlier for earlier, after in pairwise(ends)]
    return {"grown_mb": resident() - before, "ms": round(1e3 * statistics.median(seconds[-LAST:]), 1)}


def multiply(path: Path, trials: int) -> None:
    """Copy the trials of the study at `path` until there are so many, each with a slot of its own."""
    with closing(sqlite3.connect(path)) as database:
        count = database.execute("SELECT count(*) FROM trials").fetchone()[0]
        for first in range(count, trials, count):
            many = min(count, trials - first)
            for table in ("trials", *_PARTS):
                columns = [row[1] for row in database.execute(f"PRAGMA table_info({table})")][1:]
                key = "trial_id"
                values = ", ".join(
                    {"trial_id": f"trial_id + {first}", "number": f"number + {first}"}.get(name, f'"{name}"')
                    for name in columns
                )
                names = ", ".join(f'"{name}"' for name in columns)
                database.execute(
                    f"INSERT INTO {table} ({names}) SELECT {values} FROM {table} WHERE {key} <= {many}"
                )
        database.execute("UPDATE trial_user_attributes SET value_json = trial_id - 1 WHERE \"key\" = 'slot'")
        database.commit()


def _in_a_process(path: Path, trials: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--measure", str(path), str(trials)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def _profile() -> Profile:
    sys.path.append(str(Path(__file__).parents[1]))
    from tests.synthetic import COARSE, synthetic_profile

    return synthetic_profile(1, grid=COARSE, seed=1)


def check() -> None:
    """Compare the plan of a study that was continued with that of one that was not."""
    profile = _profile()
    with tempfile.TemporaryDirectory() as folder:
        for trials in (7, 30):
            split = _plan(profile, trials, f"journal:{folder}/check")
    assert split.to_dict() == _plan(profile, 30, None).to_dict()


def _plan(profile: Profile, trials: int, storage: str | None, **more: Any) -> Any:
    return search_policy(profile, "60%", measure=Summed(profile), trials=trials, storage=storage, **more)


if __name__ == "__main__":
    main()
