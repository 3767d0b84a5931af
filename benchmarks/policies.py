"""Search policies layer by layer, for `models.py --derive`.

    python benchmarks/policies.py [--models deit_s,resnet_50] [--run DIR]

Each model is profiled at a small batch size. `mt.search_policy` then chooses bits, groups and `store: derive`
for the least gradient error at which a step at batch size 8 saves at most a given share of the plain bytes.
Writes `policies/<model>.txt`. Profiles are saved in DIR, where the same command resumes them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from zoo import workload

import mesa_tune as mt

POLICIES = Path(__file__).with_name("policies")
SHARES = {"deit_s": "8.7%", "resnet_50": "12.5%"}
PROFILED, PLANNED = 2, 8
OPTIONS = [mt.LayerSettings(level=level, group_size=size) for level in (8, 16, 64) for size in (256, 1024)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--models", default=",".join(SHARES), help=f"of {', '.join(SHARES)}")
    parser.add_argument("--run", type=Path, default=Path("mesa-run"), help="folder of the profiles")
    arguments = parser.parse_args()
    for name in arguments.models.split(","):
        plan = planned(name, arguments.run)
        POLICIES.mkdir(exist_ok=True)
        plan.policy.save(POLICIES / f"{name}.txt", force=True)
        share = plan.predicted.saved_bytes / plan.baseline.saved_bytes
        error = plan.predicted.gradient_error
        print(f"{name}: {share:.2%} of the plain saved bytes, gradient error {error:.2e} predicted")


def planned(name: str, run: Path) -> mt.Plan:
    """Return the plan for `name` at batch size `PLANNED`, within its share of the plain saved bytes."""
    run.mkdir(parents=True, exist_ok=True)
    chosen = workload(name, PROFILED)
    profile = mt.profile(chosen, options=OPTIONS, seeds=1, path=run / f"{name}.json", progress=True)
    return mt.search_policy(
        profile, "100%", max_saved=SHARES[name], batch_size=PLANNED, trials=0, objective="error"
    )


if __name__ == "__main__":
    main()
