"""Is the batch that is promised the largest that trains under a real limit?

    python benchmarks/largest_batch.py [--models deit_s,resnet_50,gpt2] [--limit 1GB]
    python benchmarks/largest_batch.py --models examples/deit_tiny.py --policies searched --limit 4GB
        --within 0.04

`mt.estimate` promises it for plain steps and uniform 16; `search_policy(…, max_batch=True)` for its plan.
The kernel sets the limit (`RLIMIT_DATA`): a process of its own takes one step with one sample, in which
libraries allocate what they allocate once; from then on its memory may grow by the limit, and it takes three
training steps. The truth is the largest batch size that ends without an error, found by bisection;
`--within` tries only the promised one and one that is larger by this share. Results are appended to
`results/largest_batch.jsonl`.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import resource

import zoo
from common import append
from meters import in_own_process, resident, train, trim

import mesa_tune as mt
from mesa_tune.profiles.entries import fast_grid
from mesa_tune.units import parse_bytes
from mesa_tune.workload.user_code import is_out_of_memory

STEPS = 3
PROFILED = 8
POLICIES = {"plain": None, "uniform 16": mt.Policy.uniform(level=16)}
SEARCHED = "searched"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "--models", default="deit_s,resnet_50,gpt2", help=f"of {', '.join(zoo.ZOO)}, or model files"
    )
    parser.add_argument(
        "--policies", default=",".join(POLICIES), help=f"of {', '.join(POLICIES)}, {SEARCHED}"
    )
    parser.add_argument("--limit", default="1GB")
    parser.add_argument("--within", type=float, help="try only the promised batch and one so much larger")
    parser.add_argument("--batch", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--resident", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    limit = parse_bytes(arguments.limit, "--limit").bytes
    assert limit is not None
    if arguments.resident is not None:
        policy = None if arguments.resident == "plain" else mt.Policy.load(arguments.resident)
        print(json.dumps({"trains": trains(arguments.models, arguments.batch, policy, limit)}))
        return
    for name in arguments.models.split(","):
        for title in arguments.policies.split(","):
            promised, policy = promise(name, title, limit)
            if arguments.within is not None:
                larger = math.ceil((1 + arguments.within) * promised)
                sizes = {
                    size: trains_alone(name, policy, arguments.limit, size) for size in (promised, larger)
                }
                append("largest_batch", {"model": name, "policy": title, "limit": limit, "trains": sizes})
                print(f"{name} {title}: {sizes}", flush=True)
                continue
            true = largest(name, policy, arguments.limit, promised)
            row = {"model": name, "policy": title, "limit": limit, "promised": promised, "true": true}
            append("largest_batch", row)
            verdict = "trains" if true >= promised else "DOES NOT TRAIN"
            deviation = promised / max(true, 1) - 1
            print(
                f"{name} {title}: promised {promised} ({verdict}), true {true}: {deviation:+.1%}",
                flush=True,
            )


def workload(name: str, batch_size: int) -> mt.Workload:
    """Return the model of that name or in that file."""
    if name.endswith(".py"):
        return mt.Workload.load(name, batch_size=batch_size, device="cpu")
    return zoo.workload(name, batch_size)


def promise(name: str, title: str, limit: int) -> tuple[int, mt.Policy | None]:
    """Return the largest batch size that is promised under `limit`, and the policy."""
    work = workload(name, PROFILED)
    if title == SEARCHED:
        plan = mt.search_policy(mt.profile(work, options=fast_grid()), limit, max_batch=True, trials=0)
        return plan.batch_size, plan.policy
    policy = POLICIES[title]
    return mt.estimate(work, policy).largest_batch(limit), policy


def largest(name: str, policy: mt.Policy | None, limit: str, promised: int) -> int:
    """Return the largest batch size that trains, less than a quarter above the promised one."""

    def fits(batch: int) -> bool:
        return trains_alone(name, policy, limit, batch)

    low, high = (promised, promised * 5 // 4 + 2) if not promised or fits(promised) else (0, promised)
    while high - low > 1:
        batch = (low + high) // 2
        low, high = (batch, high) if fits(batch) else (low, batch)
    return low


def trains_alone(name: str, policy: mt.Policy | None, limit: str, batch: int) -> bool:
    """Return what `trains` does, in a process of its own."""
    command = [__file__, "--models", name, "--limit", limit, "--batch", str(batch)]
    return bool(in_own_process(command, policy)["trains"])


def trains(name: str, batch: int, policy: mt.Policy | None, limit: int) -> bool:
    """Return whether three steps of `batch` samples fit into `limit` bytes more than the process has."""
    train(workload(name, 1), policy, 1)
    gc.collect()
    trim()
    allowed = resident("VmData") + limit
    resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))
    try:
        train(workload(name, batch), policy, STEPS)
    except (RuntimeError, MemoryError) as error:
        # oneDNN says that it could not create a primitive.
        if not is_out_of_memory(error) and "primitive" not in str(error):
            raise
        return False
    return True


if __name__ == "__main__":
    main()
