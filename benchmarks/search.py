"""Is any way that users have faster than a searched plan of the same peak?

    python benchmarks/search.py [--models digits_vit,gpt2] [--rounds 9] [--batches 16] [--timeout 120]
    python benchmarks/search.py --docs    # writes docs/rivals.md from the results

Each model is trained for some steps on real data and profiled once. Then there are three limits on the peak:
midway between that of plain and of checkpointing every block; that of checkpointing; the least that any rival
within the noise ratio reaches. At each, the rivals that fit run beside the plan of the exact solver and that
of a study: `torch.utils.checkpoint` around every block, around as few blocks as fit, and keeping matrix
products (selective); uniform bits; bits chosen greedily by measured errors (as GACT does) or by the law of
quantization noise (as ActNN does); checkpointed blocks with uniform 4 bits. Last, the smallest plan.
Measured: live bytes at the peak and noise ratio, by separate code and on unseen batches, and steps, in turn,
of three models each.
Results are lines of `results/search.jsonl`, one for each limit.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from common import append, ratios
from search_models import (
    MAX_NOISE_RATIO,
    Method,
    Model,
    Running,
    code,
    forward_bytes,
    limits,
    noise_ratios,
    rivals,
    times_in_turn,
)
from search_page import write
from search_subjects import SUBJECTS

import mesa_tune as mt

CELLS = ("midway", "checkpointing", "least", "smallest")
PLACES = 3
"""Models of each method that are timed: the same step takes up to 0.06 more or less elsewhere in memory."""


def search(model: Model, limit: int | None, arguments: argparse.Namespace) -> dict[str, mt.Plan]:
    """Return the solved plan and that of a study; without a limit, the smallest."""
    find = partial(
        mt.search_policy,
        model.profile,
        limit,
        objective="memory" if limit is None else "time",
        max_noise_ratio=MAX_NOISE_RATIO,
        seed=arguments.seed,
    )
    return {
        "solved": find(trials=0),
        "searched": find(workload=model.workload, trials=100, timeout=arguments.timeout),
    }


def measured(model: Model, methods: Mapping[str, Method], arguments: argparse.Namespace) -> dict[str, Any]:
    """Return for each method its peak, its noise ratio, and steps over plain and over searched ones."""
    methods = {"plain": Method(), **methods}
    peaks = {name: Running(model, method).peak() for name, method in methods.items()}
    runs = {name: Running(model, method) for name, method in methods.items()}
    noise = noise_ratios(model, runs, arguments.batches)  # of the trained weights: no step was taken
    times: dict[str, list[float]] = {name: [] for name in methods}
    for place in range(PLACES):
        if place:
            runs = {name: Running(model, method) for name, method in methods.items()}
        found = times_in_turn(runs, -(-arguments.rounds // PLACES))
        for name, ms in found.items():
            times[name] += ms
    return {
        name: {
            "peak": peaks[name],
            "with workspaces": model.predicted_bytes(methods[name]),
            "noise ratio": noise.get(name, 0.0),
            "step": ratios(times["plain"], times[name]),
            "of searched": ratios(times["searched"], times[name]),
        }
        for name in methods
    }


def floor(model: Model) -> float:
    """Return the least peak of any policy, however noisy and slow, as the solver has proven it."""
    return mt.search_policy(
        model.profile, objective="memory", max_noise_ratio=math.inf, max_slowdown=1e6, trials=0
    ).bound


def static_bytes(model: Model) -> int:
    """Return the bytes of weights, their gradients, optimizer state and batch."""
    gradients = sum(weight.nbytes for weight in model.build().parameters() if weight.requires_grad)
    return int(model.profile.timeline.at(model.subject.batch_size).static) + gradients


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--models", default=",".join(SUBJECTS), help=f"of {', '.join(SUBJECTS)}")
    parser.add_argument("--cells", default=",".join(CELLS), help=f"of {', '.join(CELLS)}")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batches", type=int, default=16, help="unseen batches for noise ratios")
    parser.add_argument("--timeout", type=float, default=120, help="seconds per study")
    parser.add_argument("--seed", type=int, default=0, help="of the studies")
    parser.add_argument("--forward", action="store_true", help="only peaks of forwards without gradients")
    parser.add_argument("--docs", action="store_true", help="write docs/rivals.md")
    arguments = parser.parse_args()
    if arguments.docs:
        print(f"wrote {write()}")
        return
    for name in arguments.models.split(","):
        if arguments.forward:
            subject = SUBJECTS[name]
            line = {"model": name, "title": subject.title, "bytes": forward_bytes(subject), "code": code()}
            append("search", {"cell": "forward", **line})
            continue
        model = Model(name)
        found = {**limits(model), "smallest": None}
        for cell in arguments.cells.split(","):
            report(model, cell, found[cell], arguments)


def report(model: Model, cell: str, limit: int | None, arguments: argparse.Namespace) -> None:
    """Measure one limit, print it, and append it to the results."""
    plans = search(model, limit, arguments)
    others = rivals(model, limit if limit is not None else min(limits(model).values()))
    rows = measured(
        model, {**others, **{name: Method(plan.policy) for name, plan in plans.items()}}, arguments
    )
    searched = plans["searched"]
    append(
        "search",
        {
            "model": model.name,
            "title": model.subject.title,
            "batch size": model.subject.batch_size,
            "cell": cell,
            "limit": limit,
            "max noise ratio": MAX_NOISE_RATIO,
            "static with gradients": static_bytes(model),
            "rows": rows,
            "won": searched.won,
            "bound": searched.bound,
            "gap": searched.gap,
            "floor": None if limit is not None else floor(model),
            "predicted ms": [plan.predicted.step_ms for plan in plans.values()],
            "plain ms": model.profile.plain_ms(model.subject.batch_size),
            "code": code(),
        },
    )
    shown = "-" if limit is None else f"{limit / 1e6:.1f} MB"
    print(f"\n{model.subject.title}, {cell}: {shown}; {searched.won}")
    for name, row in rows.items():
        step, beside = row["step"], row["of searched"]
        print(
            f"  {name:32s} peak {row['peak'] / 1e6:7.1f} MB  noise {row['noise ratio']:.1e}  step"
            f" {step.median:.3f} [{step.low:.3f}, {step.high:.3f}]  of searched {beside.median:.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
