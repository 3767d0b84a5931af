"""Saved bytes, peak, gradient error and time of a step of DeiT-Ti: predicted, and measured independently.

    python benchmarks/memory.py [--batch-size 16] [--pairs 7]

After a full profile, the kinds are plain, uniform 4 bits (level 16) and a policy searched at 40 %. Saved and
peak bytes are predicted, counted by live storages, and measured as growth of resident memory in a separate
process. Gradient errors use three rounding seeds. Steps are timed in turn. First, the loss of every policy
must be bitwise the plain one.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import append, in_turn, ratios, spread
from meters import in_own_process, loss_under, model_under, resident_growth, storages_after_forward
from torch import Tensor, nn

import mesa_tune as mt

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "deit_tiny.py"
BUDGET = "40%"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--pairs", type=int, default=7, help="steps of each kind, in turn")
    parser.add_argument("--resident", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    workload = mt.Workload.load(EXAMPLE, batch_size=arguments.batch_size, device="cpu")
    if arguments.resident is not None:
        print(json.dumps(resident_growth(workload, arguments.resident)))
        return
    start = time.perf_counter()
    profile = mt.profile(workload)
    profile_s = time.perf_counter() - start
    print(f"full profile: {profile_s:.0f} s, {len(profile.layers)} layers", flush=True)
    searched = mt.search_policy(profile, BUDGET, trials=0, objective="error").policy
    policies = {
        "plain": mt.Policy.parse(""),
        "uniform 4 bits": mt.Policy.uniform(level=16),
        f"searched {BUDGET}": searched,
    }
    require_exact_forward(workload, policies)
    rows = {name: measure(workload, profile, policy) for name, policy in policies.items()}
    for row in rows.values():
        row["share_of_plain"] = row["saved_storages"] / rows["plain"]["saved_storages"]
        row["resident_share"] = row["resident_peak"] / rows["plain"]["resident_peak"]
    times = steps_in_turn(workload, policies, arguments.pairs)
    for name, row in rows.items():
        row["step_ratio"] = ratios(times["plain"], times[name])._asdict()
        row["step_ms"] = spread(times[name])._asdict()
        print(describe(name, row), flush=True)
    result = {"batch_size": arguments.batch_size, "profile_s": profile_s, "rows": rows}
    print(f"appended to {append('memory', {'subject': 'DeiT-Ti 224² fp32', **result})}")


def require_exact_forward(workload: mt.Workload, policies: dict[str, mt.Policy]) -> None:
    """Exit unless every policy's loss is bitwise the plain one."""
    batch = workload.make_batch()
    losses = [
        loss_under(workload, policy)(model_under(workload, policy), batch) for policy in policies.values()
    ]
    if len({loss.item() for loss in losses}) != 1:
        raise SystemExit(f"the forward is not exact: losses {losses}")


def measure(workload: mt.Workload, profile: mt.Profile, policy: mt.Policy) -> dict[str, Any]:
    """Return all figures of one policy except its time."""
    predicted = profile.predict(policy)
    check = mt.verify(workload, policy, steps=1, seeds=3)
    resident = in_own_process([__file__, "--batch-size", str(workload.batch_size)], policy)
    return {
        "saved_predicted": predicted.saved_bytes,
        "saved_measured": check.policy.saved_bytes,
        "saved_storages": storages_after_forward(workload, policy).bytes,
        "saved_resident": resident["saved"],
        "peak_predicted": predicted.peak_bytes,
        "peak_measured": check.policy.peak_bytes,
        "resident_peak": resident["peak"],
        "error_predicted": predicted.gradient_error,
        "error_measured": check.gradient_error,
    }


def steps_in_turn(
    workload: mt.Workload, policies: dict[str, mt.Policy], pairs: int
) -> dict[str, list[float]]:
    """Return the milliseconds of training steps, A B C A B C …, after a warm-up of each."""
    batch = workload.make_batch()
    runs: dict[str, Callable[[], None]] = {}
    for name, policy in policies.items():
        model = model_under(workload, policy)
        runs[name] = stepper(model, workload.make_optimizer(model), loss_under(workload, policy), batch)
    return in_turn(runs, pairs)


def stepper(
    model: nn.Module, optimizer: Any, loss: Callable[[nn.Module, Any], Tensor], batch: Any
) -> Callable[[], None]:
    def run() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss(model, batch).backward()
        optimizer.step()

    return run


def describe(name: str, row: dict[str, Any]) -> str:
    """Return a policy's figures as text."""
    mb = {
        key: f"{value / 1e6:.1f}"
        for key, value in row.items()
        if key.startswith(("saved", "peak", "resident_p"))
    }
    return (
        f"\n{name}\n"
        f"  saved MB: predicted {mb['saved_predicted']}, measured {mb['saved_measured']}, storages "
        f"{mb['saved_storages']} ({row['share_of_plain']:.1%} of plain), resident {mb['saved_resident']}\n"
        f"  peak MB: predicted {mb['peak_predicted']}, measured {mb['peak_measured']}; resident growth "
        f"{mb['resident_peak']} ({row['resident_share']:.1%} of plain)\n"
        f"  gradient error: predicted {row['error_predicted']:.2e}, measured {row['error_measured']:.2e}\n"
        f"  step: {row['step_ms']['median']:.0f} ms, {row['step_ratio']['median']:.3f} times plain "
        f"[{row['step_ratio']['low']:.3f}, {row['step_ratio']['high']:.3f}]"
    )


if __name__ == "__main__":
    main()
