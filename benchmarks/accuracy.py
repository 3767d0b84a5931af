"""Does training with a policy reach the accuracy of plain training? The digits ViT, several seeds, paired.

    python benchmarks/accuracy.py [--seeds 5] [--budget 40%]

A seed determines initialization and data order, equally for plain, uniform 4 bits and searched, so the
differences to plain are paired. The result is their mean with its 95 % interval by Student's t.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common import append, mean_interval

import mesa_tune as mt

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
Train = Callable[..., float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=5, help="trainings of each kind (at least 2)")
    parser.add_argument("--budget", default="40%", help="budget of the searched policy")
    arguments = parser.parse_args()
    if arguments.seeds < 2:
        parser.error("--seeds must be at least 2: one training has no spread")
    plan = searched_plan(arguments.budget)
    policies = {
        "plain": None,
        "uniform 4 bits": mt.Policy.uniform(level=16),
        "searched": plan.policy,
    }
    accuracies = train_all(load_example().train, policies, range(arguments.seeds))
    result = {
        "subject": "test accuracy of the digits ViT",
        "budget": arguments.budget,
        "peak_bytes": {"plain": plan.baseline.peak_bytes, "searched": plan.predicted.peak_bytes},
        "accuracies": accuracies,
        "differences": differences(accuracies),
    }
    for line in describe(result):
        print(line)
    print(f"appended to {append('accuracy', result)}")


def searched_plan(budget: str) -> Any:
    """Profile the example, and search its policy at `budget`."""
    workload = mt.Workload.load(EXAMPLES / "digits_vit.py", device="cpu")
    print("profiling and searching", flush=True)
    return mt.search_policy(mt.profile(workload), budget, workload=workload, objective="error")


def load_example(name: str = "digits_vit") -> Any:
    """Import the example as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train_all(train: Train, policies: Mapping[str, Any], seeds: Sequence[int]) -> dict[str, list[float]]:
    """Return one accuracy per seed for each policy. Policies are trained in turn, against slow drifts."""
    accuracies: dict[str, list[float]] = {name: [] for name in policies}
    for seed in seeds:
        for name, policy in policies.items():
            accuracies[name].append(train(policy, seed=seed))
            print(f"seed {seed}: {name} {100 * accuracies[name][-1]:.2f} %", flush=True)
    return accuracies


def differences(accuracies: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float | bool]]:
    """Return mean and 95 % interval of the paired differences to plain, and whether it contains zero."""
    results: dict[str, dict[str, float | bool]] = {}
    for name, values in accuracies.items():
        if name != "plain":
            paired = [value - plain for value, plain in zip(values, accuracies["plain"], strict=True)]
            interval = mean_interval(paired)
            results[name] = {**interval._asdict(), "contains_zero": interval.low <= 0 <= interval.high}
    return results


def describe(result: Mapping[str, Any]) -> list[str]:
    """Return the result as lines of text, in percentage points."""
    lines = []
    for name, values in result["accuracies"].items():
        line = f"{name:<16} {100 * sum(values) / len(values):6.2f} %"
        if name in result["differences"]:
            difference = result["differences"][name]
            inside = "contains zero" if difference["contains_zero"] else "does not contain zero"
            spread = f"{100 * difference['low']:+.2f} to {100 * difference['high']:+.2f}"
            line += f"   to plain {100 * difference['mean']:+.2f} points, 95 % interval {spread}: {inside}"
        lines.append(line)
    return lines


if __name__ == "__main__":
    main()
