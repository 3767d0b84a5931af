"""What does `mt.Monitor` cost, and are its readings right?

    python benchmarks/monitor.py [--readings 20] [--levels 16,4]

The model is that of examples/digits_vit.py, untrained and after 50 steps. First, a training with a monitor
must have the losses of one without, bit for bit. Then a training step under the policy and a reading are
timed in turn (processor time of this thread); the cost of `every=100` is the ratio of their medians over 100.
And of the readings on different batches with the same weights it counts those whose intervals contain what
`mt.verify` measures. Results are appended to `results/monitor.jsonl`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from accuracy import load_example
from common import append, spread
from torch import nn

import mesa_tune as mt

digits_vit = load_example()

EVERY = 100
NO_LIMIT = 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--readings", type=int, default=20)
    parser.add_argument("--levels", default="16,4")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for level in map(int, arguments.levels.split(",")):
        require_the_same_training(level)
        for steps in (0, 50):
            report(level, steps, arguments.readings)


def require_the_same_training(level: int) -> None:
    """Raise AssertionError unless a monitor leaves the losses of a training as they are."""
    losses = [trained(level, 12, every)[1] for every in (None, 4)]
    assert losses[0] == losses[1], losses


def trained(level: int, steps: int, every: int | None = None) -> tuple[nn.Module, list[float]]:
    """Return a model after some steps under uniform `level`, and the losses."""
    torch.manual_seed(0)
    model = mt.convert(digits_vit.model(), mt.Policy.uniform(level=level), seed=0)
    optimizer = digits_vit.optimizer(list(model.parameters()))
    monitor = mt.Monitor(model, digits_vit.loss, every=every or EVERY, limit=NO_LIMIT)
    losses = []
    for _ in range(steps):
        batch = digits_vit.batch(digits_vit.BATCH_SIZE)
        losses.append(step(model, optimizer, batch))
        if every:
            monitor.step(batch)
    return model, losses


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> float:
    optimizer.zero_grad()
    loss = digits_vit.loss(model, batch)
    loss.backward()
    optimizer.step()
    return loss.item()


def report(level: int, steps: int, count: int) -> None:
    """Measure, print and append one row."""
    model, _ = trained(level, steps)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    monitor = mt.Monitor(model, digits_vit.loss, every=1, limit=NO_LIMIT)
    frozen = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    step_ms, reading_ms, readings = [], [], []
    for _ in range(count):
        batch = digits_vit.batch(digits_vit.BATCH_SIZE)
        step_ms.append(timed(lambda batch=batch: step(model, frozen, batch))[0])
        milliseconds, reading = timed(lambda batch=batch: monitor.step(batch))
        reading_ms.append(milliseconds)
        readings.append(reading)
    true = verified(state, level)
    errors = sum(inside(true.gradient_error, reading.gradient_error_interval) for reading in readings)
    ratios = sum(inside(true.gradient_noise_ratio, reading.noise_ratio_interval) for reading in readings)
    cost = spread(reading_ms).median / spread(step_ms).median / EVERY
    row = {
        "level": level,
        "steps": steps,
        "step_ms": spread(step_ms),
        "reading_ms": spread(reading_ms),
        "cost": cost,
        "verified": [true.gradient_error, true.gradient_noise_ratio],
        "readings": [[reading.gradient_error, reading.noise_ratio] for reading in readings],
        "inside": [errors, ratios],
    }
    append("monitor", row)
    print(
        f"{level} levels, {steps} steps: step {spread(step_ms).median:.1f} ms, reading "
        f"{spread(reading_ms).median:.1f} ms: {100 * cost:.2f} % of the steps at every={EVERY}; "
        f"within the intervals: error {errors}, noise ratio {ratios} of {count}",
        flush=True,
    )


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    """Return the milliseconds of processor time that `run` takes, and what it returns."""
    begin = time.thread_time()
    result = run()
    return 1e3 * (time.thread_time() - begin), result


def verified(state: dict[str, torch.Tensor], level: int) -> mt.Verification:
    """Return what `mt.verify` measures with these weights."""

    def model() -> nn.Module:
        fresh = digits_vit.model()
        fresh.load_state_dict(state)
        return fresh

    workload = mt.Workload(model, digits_vit.batch, digits_vit.loss, batch_size=digits_vit.BATCH_SIZE)
    return mt.verify(workload, mt.Policy.uniform(level=level), steps=1)


def inside(value: float | None, ends: tuple[float, float] | None) -> bool:
    return value is not None and ends is not None and ends[0] <= value <= ends[1]


if __name__ == "__main__":
    main()
