"""Does training with a policy end where plain training ends? The digits ViT, several seeds, paired.

    python benchmarks/accuracy.py [--seeds 5] [--budget 40%]

Each seed decides initialization and data order, for plain, uniform 4 bits and searched alike, so the
differences to plain are paired: their mean stands with its 95 % interval by Student's t.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common import append, mean_interval

import mesa_tune as mt

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "digits_vit.py"
Train = Callable[..., float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=5, help="trainings of each kind (at least 2)")
    parser.add_argument("--budget", default="40%", help="of the searched policy")
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
    """What profile and search make of the example at `budget`."""
    workload = mt.Workload.load(EXAMPLE, device="cpu")
    print("profiling and searching", flush=True)
    return mt.search_policy(mt.profile(workload), budget, workload=workload)


def load_example() -> Any:
    """The example's module."""
    spec = importlib.util.spec_from_file_location("digits_vit", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train_all(train: Train, policies: Mapping[str, Any], seeds: Sequence[int]) -> dict[str, list[float]]:
    """Accuracy by policy, a value a seed; the kinds in turn, so that nothing drifts between them."""
    found: dict[str, list[float]] = {name: [] for name in policies}
    for seed in seeds:
        for name, policy in policies.items():
            found[name].append(train(policy, seed=seed))
            print(f"seed {seed}: {name} {100 * found[name][-1]:.2f} %", flush=True)
    return found


def differences(accuracies: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float | bool]]:
    """Of each kind to plain, seed by seed: mean, 95 % interval, and whether it contains zero."""
    found: dict[str, dict[str, float | bool]] = {}
    for name, values in accuracies.items():
        if name != "plain":
            paired = [value - plain for value, plain in zip(values, accuracies["plain"], strict=True)]
            interval = mean_interval(paired)
            found[name] = {**interval._asdict(), "contains_zero": interval.low <= 0 <= interval.high}
    return found


def describe(result: Mapping[str, Any]) -> list[str]:
    """The result as lines for people: percentage points."""
    lines = []
    for name, values in result["accuracies"].items():
        line = f"{name:<16} {100 * sum(values) / len(values):6.2f} %"
        if name in result["differences"]:
            one = result["differences"][name]
            inside = "contains zero" if one["contains_zero"] else "does not contain zero"
            spread = f"{100 * one['low']:+.2f} to {100 * one['high']:+.2f}"
            line += f"   to plain {100 * one['mean']:+.2f} points, 95 % interval {spread}: {inside}"
        lines.append(line)
    return lines


if __name__ == "__main__":
    main()
