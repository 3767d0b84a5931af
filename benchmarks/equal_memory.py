"""What does the memory buy? Training for the same time within the same peak, at the batch that fits.

    python benchmarks/equal_memory.py [--tasks resnet,text] [--batch 4] [--seconds 10] [--seeds 5]

The limit is the predicted peak of the plain step at a small batch, as of a model that hardly fits. Three ways
to train within it: plain at that batch; every block checkpointed, at the largest batch whose estimated peak
fits; and with the fastest policy of the largest batch for which there is one. Tasks and scores are those of
`learning.py`. Each training takes the same processor time of one thread, measuring and searching apart, under
a schedule by time. Peak learning rates are chosen for each way from RATES by trainings with other seeds.
Results are lines of `results/equal_memory.jsonl`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
from common import append, mean_interval
from learning import ALL, profile_of
from learning_tasks import DIGITS
from step import checkpoint_blocks
from torch import nn

import mesa_tune as mt

RATES = (1e-3, 3e-3, 1e-2)
RATE_SEEDS = range(9000, 9002)
WARMUP = 0.1
BLOCKS = {"digits": "Block", "text": "GPT2Block", "lora": "GPT2Block", "resnet": "ResNetBasicLayer"}


class Way(NamedTuple):
    """How to train within the limit: the batch size, a policy, and whether blocks are checkpointed."""

    batch_size: int
    policy: mt.Policy | None = None
    checkpointed: bool = False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tasks", default="resnet,text", help=f"of {', '.join(BLOCKS)}")
    parser.add_argument("--batch", type=int, default=4, help="the largest plain batch that fits")
    parser.add_argument("--seconds", type=float, default=10, help="processor time of each training")
    parser.add_argument("--seeds", type=int, default=5, help="trainings of each way (at least 2)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.tasks.split(","):
        measure(name, arguments)


def measure(name: str, arguments: argparse.Namespace) -> None:
    """Train task `name` in each way, print the scores, and append them to the results."""
    profile = profile_of(name, trained=True)
    limit = profile.predict(mt.Policy.parse(""), batch_size=arguments.batch).peak_bytes
    rows: dict[str, Any] = {}
    for label, way in ways(name, profile, limit, arguments.batch).items():
        rate = best_rate(name, way, arguments.seconds)
        runs = [train(name, way, rate, seed, arguments.seconds) for seed in range(arguments.seeds)]
        scores, samples = zip(*runs, strict=True)
        rows[label] = {"batch": way.batch_size, "rate": rate, "scores": scores, "samples": samples}
        mean, per_second = statistics.fmean(scores), statistics.fmean(samples) / arguments.seconds
        print(
            f"{name}, {label}, batch {way.batch_size}, rate {rate}: {ALL[name].metric} {mean:.4f}, "
            f"{per_second:.0f} samples/s",
            flush=True,
        )
    plain = rows["plain"]["scores"]
    for label, row in rows.items():
        row["difference"] = mean_interval([a - b for a, b in zip(row["scores"], plain, strict=True)])
        print(f"{name}, {label}: difference to plain {row['difference']}")
    append("equal_memory", {"task": name, "limit": limit, "seconds": arguments.seconds, "ways": rows})


def ways(name: str, profile: mt.Profile, limit: int, batch_size: int) -> dict[str, Way]:
    """Return the ways to train within the limit, by name."""
    fitting = largest(lambda n: planned(profile, limit, n) is not None, batch_size)
    checkpointed = largest(lambda n: checkpointed_peak(name, n) <= limit, batch_size)
    return {
        "plain": Way(batch_size),
        "checkpointing": Way(checkpointed, checkpointed=True),
        "searched": Way(fitting, planned(profile, limit, fitting)),
    }


def planned(profile: mt.Profile, limit: int, batch_size: int) -> mt.Policy | None:
    """Return the fastest policy of a batch size within the limit and the noise ratio; None: there is none."""
    try:
        return mt.search_policy(profile, limit, trials=0, objective="time", batch_size=batch_size).policy
    except mt.BudgetError:
        return None


def largest(fits: Callable[[int], bool], least: int) -> int:
    """Return the largest batch size that fits, by bisection; `least` where none larger does."""
    high = least + 1
    while fits(high):
        least, high = high, 2 * high
    while high - least > 1:
        middle = (least + high) // 2
        least, high = (middle, high) if fits(middle) else (least, middle)
    return least


def checkpointed_peak(name: str, batch_size: int) -> int:
    """Return the estimated peak of a step whose blocks are checkpointed."""
    work = ALL[name].workload

    def model() -> nn.Module:
        built = work.model()
        checkpoint_blocks(built, BLOCKS[name])
        return built

    return mt.estimate(replace(work, model=model, batch_size=batch_size)).peak_bytes


@cache
def best_rate(name: str, way: Way, seconds: float) -> float:
    """Return the rate of RATES with the best mean score."""
    sign = -1 if ALL[name].relative else 1  # a loss is better if it is lower

    def score(rate: float) -> float:
        return sign * statistics.fmean(train(name, way, rate, seed, seconds)[0] for seed in RATE_SEEDS)

    return max(RATES, key=score)


def train(name: str, way: Way, rate: float, seed: int, seconds: float) -> tuple[float, int]:
    """Train for so many seconds of processor time; return the score, and the samples that were seen."""
    task = ALL[name]
    torch.manual_seed(seed)
    model = task.workload.model().train()
    if way.checkpointed:
        checkpoint_blocks(model, BLOCKS[name])
    compressed = DIGITS.compression(model, way.policy, seed)
    optimizer = DIGITS.optimizer(list(model.parameters()))
    samples, begin = 0, time.process_time()
    assert task.workload.loss is not None
    while (done := (time.process_time() - begin) / seconds) < 1:
        for group in optimizer.param_groups:
            group["lr"] = rate * min(done / WARMUP, (1 - done) / (1 - WARMUP)) + 1e-6
        batch = task.workload.batch(way.batch_size)
        with compressed():
            value = task.workload.loss(model, batch)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        samples += way.batch_size
    if way.policy is not None:
        mt.revert(model)
    return task.score(model), samples


if __name__ == "__main__":
    main()
