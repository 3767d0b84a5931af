"""Long studies: resident memory and time per trial, with an objective that costs nothing.

`python benchmarks/fleet.py [--trials 10000] [--storage sqlite|journal|memory]`. Before it measures, it checks
that a study that is continued has the policy of one that was not interrupted.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
from common import append

from mesa_tune.policy import Policy
from mesa_tune.profiler.errors.joint_error import Pair
from mesa_tune.profiler.profile import Profile
from mesa_tune.search import search_policy


class Summed:
    """The sum of the layers' errors, of which those of norms count 20 times."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile

    def errors(self, policy: Policy, pairs: Sequence[Pair]) -> list[float]:
        assignment = self.profile.assignment(policy)
        error = sum(
            (self.profile.layer_error(layer, assignment[layer.name]) or 0.0)
            * (20 if layer.tag == "layernorm" else 1)
            for layer in self.profile.layers
        )
        return [error * (1 + 1e-3 * ((draw + seed) % 7)) for draw, seed in pairs]


def resident() -> float:
    """Return the resident memory of this process in MB."""
    return float(psutil.Process().memory_info().rss) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--storage", choices=("sqlite", "journal", "memory"), default="sqlite")
    options = parser.parse_args()
    profile = _profile()
    with tempfile.TemporaryDirectory() as folder:
        _check(profile, Path(folder))
        path = Path(folder) / "study"
        storage = {"sqlite": str(path), "journal": f"journal:{path}", "memory": None}[options.storage]
        ends = [time.perf_counter()]
        before = resident()
        _plan(profile, options.trials, storage, progress=lambda _: ends.append(time.perf_counter()))
        grown = resident() - before
    seconds = [after - earlier for earlier, after in pairwise(ends)]
    hundredth, last = (statistics.median(seconds[end - 50 : end]) for end in (100, len(seconds)))
    figures = {
        "storage": options.storage,
        "trials": options.trials,
        "grown_mb": round(grown, 1),
        "hundredth_ms": round(1e3 * hundredth, 2),
        "last_ms": round(1e3 * last, 2),
        "ratio": round(last / hundredth, 2),
    }
    print(figures)
    print(append("fleet", figures))


def _profile() -> Profile:
    sys.path.append(str(Path(__file__).parents[1]))
    from tests.synthetic import COARSE, synthetic_profile

    return synthetic_profile(1, grid=COARSE, seed=1)


def _check(profile: Profile, folder: Path) -> None:
    whole = _plan(profile, 30, None)
    for trials in (7, 30):
        split = _plan(profile, trials, f"journal:{folder / 'check'}")
    assert split.to_dict() == whole.to_dict()


def _plan(profile: Profile, trials: int, storage: str | None, **more: Any) -> Any:
    return search_policy(profile, "60%", measure=Summed(profile), trials=trials, storage=storage, **more)


if __name__ == "__main__":
    main()
