"""What does a compiled step take: plain, converted, and under `torch.compile`'s memory budget?

    python benchmarks/compiled.py [--model deit_s] [--batch 8] [--rounds 9] [--searched]

The whole model is compiled in each way, and whole steps are timed in turn, in one process. Peaks are growths
of resident memory in a step, each in a process of its own after two others. Kernels are calls in the code
that the compiler generates for the forward and the backward: of its own loops, and of operators.

`--searched`: also the fastest policy of the search at the predicted peak of uniform 4 bits, and the smallest,
without modules that run again and without slices, which a compiled step does not have. Results are appended
to `results/compiled.jsonl`.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import ROOT, append, in_turn, ratios
from meters import model_under, peak_growth, within_memory_budget
from torch._inductor import config
from torch._inductor.utils import run_and_get_code
from zoo import workload

import mesa_tune as mt

FOUR_BITS = mt.Policy.uniform(level=16)
WAYS: dict[str, tuple[mt.Policy | None, float | None]] = {
    "plain": (None, None),
    "4 bits": (FOUR_BITS, None),
    "activation_memory_budget 0.5": (None, 0.5),
    "activation_memory_budget 0.2": (None, 0.2),
}
"""Policy, and memory budget of the compiler; None: neither."""

BUILD = ROOT / "build" / "compiled"
CALL = re.compile(r"^        (?:\w+ = )?(cpp_fused|extern_kernels\.|torch\.ops\.)", re.MULTILINE)
"""A call in generated code: of a loop of its own, or of an operator."""


class Training:
    """A compiled model in training."""

    def __init__(self, name: str, batch: int, way: str) -> None:
        policy, self.budget = WAYS[way] if way in WAYS else (mt.Policy.load(way), None)
        torch.manual_seed(0)
        self.work = workload(name, batch)
        self.model = model_under(self.work, policy)
        self.optimizer, self.batch = self.work.make_optimizer(self.model), self.work.make_batch()
        self.compiled: Any = torch.compile(self.model)

    def step(self) -> None:
        """Take a whole step; the first one compiles."""
        with within_memory_budget(self.budget):
            self.optimizer.zero_grad()
            assert self.work.loss is not None
            self.work.loss(self.compiled, self.batch).backward()
            self.optimizer.step()


def kernels(training: Training) -> dict[str, int]:
    """Take the first step; return how many calls of each kind the generated code has."""
    with config.patch(force_disable_caches=True):
        _, codes = run_and_get_code(training.step)
    return dict(Counter(call.rstrip(".") for code in codes for call in CALL.findall(code)))


def peak(training: Training) -> int:
    """Return by how much resident memory grows in a step, over what is resident between steps."""
    for _ in range(2):
        training.step()
    return peak_growth(training.step)


def searched(name: str, batch: int) -> list[str]:
    """Return the paths of the policies of the search: the fastest at the peak of 4 bits, and the smallest."""
    profile = mt.profile(workload(name, batch))
    find = partial(mt.search_policy, profile, trials=0, forbid=("recompute", "tile", "offload"))
    plans = {
        "fastest": find(profile.predict(FOUR_BITS).peak_bytes, objective="time"),
        "smallest": find(objective="memory"),
    }
    BUILD.mkdir(parents=True, exist_ok=True)
    for title, plan in plans.items():
        plan.policy.save(BUILD / f"{title}.txt")
    return [str(BUILD / f"{title}.txt") for title in plans]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="deit_s")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--searched", action="store_true", help="also policies of the search")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    asked = arguments.model, arguments.batch
    if arguments.peak is not None:
        print(json.dumps(peak(Training(*asked, arguments.peak))))
        return
    command = [sys.executable, __file__, "--model", arguments.model, "--batch", str(arguments.batch)]
    ways = [*WAYS, *(searched(*asked) if arguments.searched else ())]
    peaks = {
        way: json.loads(subprocess.run([*command, "--peak", way], check=True, stdout=subprocess.PIPE).stdout)
        for way in ways
    }
    steps, counts = {}, {}
    for way in ways:
        training = Training(*asked, way)
        counts[way] = kernels(training)
        steps[way] = training.step
    times = in_turn(steps, arguments.rounds)
    rows = {
        (way if way in WAYS else Path(way).stem): {
            "peak": peaks[way],
            "step": ratios(times["plain"], times[way])._asdict(),
            "kernels": counts[way],
        }
        for way in ways
    }
    append("compiled", {"model": arguments.model, "batch": arguments.batch, "rows": rows})
    for way, row in rows.items():
        step = row["step"]
        print(
            f"{way:30} {row['peak'] / 1e6:7.1f} MB, step {step['median']:.3f} times plain compiled "
            f"({step['low']:.3f} to {step['high']:.3f}); kernels: {row['kernels']}"
        )


if __name__ == "__main__":
    main()
