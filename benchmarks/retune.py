"""Does `mt.Retune` hold the noise ratio while training moves?

    python benchmarks/retune.py [--tasks digits,text] [--budget 30%] [--every 60]

One training with the plan of its first step, and one with the same seed that measures and plans again every
`--every` steps, both for the same budget. At points of either training, the noise ratio of the policy then in
use is measured on batches that nothing was chosen on. Results are appended to `results/retune.jsonl`.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from common import append
from learning import noise_ratio
from learning_tasks import DIGITS, TASKS, Task

import mesa_tune as mt

POINTS = (0.04, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Shares of the training after which ratios are measured."""


def ratios(task: Task, budget: str, every: int) -> dict[int, float | None]:
    """Train under the policy of `mt.Retune`; return its noise ratio by step."""
    torch.manual_seed(0)
    workload = task.workload
    assert workload.loss is not None
    model = workload.model().train()
    optimizer = DIGITS.optimizer(list(model.parameters()))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, task.learning_rate, total_steps=task.steps, pct_start=DIGITS.WARMUP
    )
    tuner = mt.Retune(model, workload.loss, budget, every=every, optimizer=optimizer)
    points = {round(share * task.steps) for share in POINTS}
    found: dict[int, float | None] = {}
    for step in range(1, task.steps + 1):
        batch = workload.batch(workload.batch_size)
        tuner.step(batch)
        optimizer.zero_grad()
        workload.loss(model, batch).backward()
        optimizer.step()
        schedule.step()
        if step in points:
            assert tuner.policy is not None
            mt.revert(model)
            with torch.random.fork_rng():
                found[step] = noise_ratio(workload, model, tuner.policy)
            mt.convert(model, tuner.policy, seed=step)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tasks", default=",".join(TASKS), help=f"of {', '.join(TASKS)}")
    parser.add_argument("--budget", default="30%")
    parser.add_argument("--every", type=int, default=60)
    arguments = parser.parse_args()
    for name in arguments.tasks.split(","):
        task = TASKS[name]
        result: dict[str, Any] = {
            kind: ratios(task, arguments.budget, every)
            for kind, every in (("first plan", task.steps), ("planned again", arguments.every))
        }
        append("retune", {"task": name, "budget": arguments.budget, "every": arguments.every, **result})
        for kind, found in result.items():
            steps = ", ".join(f"{step}: {ratio:.2g}" for step, ratio in found.items())
            print(f"{name}, {kind}: noise ratio by step {steps}", flush=True)


if __name__ == "__main__":
    main()
