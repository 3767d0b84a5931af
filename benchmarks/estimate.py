"""How far are `peak_bytes` of `mt.estimate` from resident memory?

    python benchmarks/estimate.py [--models gpt2,resnet_50] [--batch 4] [--bf16]

Each model takes two training steps in a process of its own, whose allocator returns freed blocks at once. The
peak of its resident memory, less what PyTorch had before, stands beside the estimate of the same machine.
Weights and batches are random. Results are appended to `results/estimate.jsonl`.
"""

from __future__ import annotations

import argparse
import json

from common import append
from meters import in_own_process, peak_growth, train
from zoo import ZOO, workload

import mesa_tune as mt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--models", default=",".join(ZOO), help=f"of {', '.join(ZOO)}")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--bf16", action="store_true", help="under autocast to bfloat16")
    parser.add_argument("--resident", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    autocast = "bfloat16" if arguments.bf16 else None
    if arguments.resident is not None:
        policy = None if arguments.resident == "plain" else mt.Policy.load(arguments.resident)
        chosen = workload(arguments.models, arguments.batch, autocast=autocast)
        print(json.dumps({"peak": resident_peak(chosen, policy)}))
        return
    for name in arguments.models.split(","):
        chosen = workload(name, arguments.batch, autocast=autocast)
        for policy_name, policy in (("plain", None), ("uniform 16", mt.Policy.uniform(level=16))):
            command = [__file__, "--models", name, "--batch", str(arguments.batch)]
            measured = in_own_process([*command, *(["--bf16"] if arguments.bf16 else [])], policy)["peak"]
            estimated = mt.estimate(chosen, policy).peak_bytes
            row = {"model": name, "policy": policy_name, "batch": arguments.batch, "autocast": autocast}
            append("estimate", {**row, "reserved": estimated, "resident": measured})
            sizes = f"estimated {estimated / 1e6:.1f} MB, resident {measured / 1e6:.1f} MB"
            print(f"{name} {policy_name}: {sizes}, {measured / estimated - 1:+.1%}", flush=True)


def resident_peak(chosen: mt.Workload, policy: mt.Policy | None) -> int:
    """Return the growth of resident memory over two steps, the model included, after a step to warm up."""
    train(chosen, policy, 1)  # libraries allocate once
    return peak_growth(lambda: train(chosen, policy, 2))


if __name__ == "__main__":
    main()
