"""What does a training step of well-known models save, plain and under a policy, by two independent meters?

    python benchmarks/models.py [--models deit_s,gpt2] [--batch 8] [--bf16] [--derive] [--policy FILE]
    python benchmarks/models.py --docs          # writes docs/models.md from the latest results

First, with dropout on, outputs, loss, buffers and random state must be bitwise the plain model's, and a
reverted model must train bitwise as the plain one. Then saved bytes, the uncompressed tensors by layer, and
the gradient errors at 8, 4 and 2 bits are measured, each error on several rounding seeds. Weights and batches
are random. A result at the published size is appended to `results/models.jsonl`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import exactness
from common import append
from meters import in_own_process, resident_growth, storages_after_forward
from models_page import write
from policies import POLICIES
from uncompressed import left_uncompressed
from zoo import ZOO, workload

import mesa_tune as mt

LEVELS = (256, 16, 4)
SEEDS = 3
MAX_ROWS = 12
PRODUCER_LEVELS = {"layernorm": 32, "gelu": 64, "silu": 64}
"""Levels of the tags from whose copies other layers are derived, in a policy that was not searched."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--models", default=",".join(ZOO), help=f"of {', '.join(ZOO)}")
    parser.add_argument("--batch", type=int, default=8, help="batch size of the byte counts")
    parser.add_argument(
        "--error-batch", type=int, default=2, help="batch size of gradient errors and exactness"
    )
    parser.add_argument("--scale", choices=("published", "tiny"), default="published")
    parser.add_argument("--bf16", action="store_true", help="under autocast to bfloat16")
    parser.add_argument(
        "--derive", action="store_true", help="with `store: derive`: a searched policy if there is one"
    )
    parser.add_argument("--policy", help="a policy file instead of uniform 16")
    parser.add_argument("--bytes-only", action="store_true", help="skip errors and exactness")
    parser.add_argument("--docs", action="store_true", help="write docs/models.md from the latest results")
    parser.add_argument("--resident", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.docs:
        print(f"wrote {write()}")
    elif arguments.resident is not None:
        chosen = _workload(arguments.models, arguments.batch, arguments)
        print(json.dumps(resident_growth(chosen, arguments.resident)))
    else:
        for name in arguments.models.split(","):
            result = measure(name, arguments)
            print("\n".join(describe(result)), flush=True)
            if arguments.scale == "published":
                append("models", result)


def _workload(name: str, batch: int, arguments: argparse.Namespace, **options: Any) -> mt.Workload:
    autocast = "bfloat16" if arguments.bf16 else None
    return workload(name, batch, scale=arguments.scale, autocast=autocast, **options)


def policy_of(name: str, arguments: argparse.Namespace) -> tuple[str, mt.Policy]:
    """Return the name of the policy in the table, and the policy."""
    if arguments.policy:
        return Path(arguments.policy).stem, mt.Policy.load(arguments.policy)
    if arguments.derive:
        return "derive", deriving(name, arguments.scale)
    return "uniform 16", mt.Policy.uniform(level=16)


def deriving(name: str, scale: str) -> mt.Policy:
    """Return the searched policy of the published model (`policies.py`), or else one for all models.

    The latter is uniform 16 with `store: derive`, with more levels where other layers are derived.
    """
    path = POLICIES / f"{name}.txt"
    if scale == "published" and path.is_file():
        return mt.Policy.load(path)
    text = mt.Policy.uniform(level=16, store="derive").dumps()
    for tag, level in PRODUCER_LEVELS.items():
        section = text[text.index(f"on {tag}:") :].split("\non ")[0]
        text = text.replace(section, section.replace("level: 16", f"level: {level}"))
    return mt.Policy.parse(text)


def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return all figures of one model under the chosen policy."""
    start = time.perf_counter()
    label, policy = policy_of(name, arguments)
    result: dict[str, Any] = {
        "subject": name,
        "policy": label,
        "scale": arguments.scale,
        "autocast": "bfloat16" if arguments.bf16 else None,
        "batch_size": arguments.batch,
    }
    if not arguments.bytes_only:
        result |= _checked(name, arguments, label, policy)
    result |= saved(_workload(name, arguments.batch, arguments), policy, _command(name, arguments))
    return {**result, "seconds": time.perf_counter() - start}


def _checked(name: str, arguments: argparse.Namespace, label: str, policy: mt.Policy) -> dict[str, Any]:
    dropping = _workload(name, arguments.error_batch, arguments, dropout=0.1)
    policies = {"uniform 16": mt.Policy.uniform(level=16), label: policy}
    if label == "uniform 16":
        policies = {f"uniform {level}": mt.Policy.uniform(level=level) for level in LEVELS}
    return {
        "differs": exactness.differences(dropping, policy),
        "error_batch_size": arguments.error_batch,
        "errors": exactness.errors(_workload(name, arguments.error_batch, arguments), policies, SEEDS),
    }


def _command(name: str, arguments: argparse.Namespace) -> list[str]:
    command = [__file__, "--models", name, "--batch", str(arguments.batch), "--scale", arguments.scale]
    return [*command, *(["--bf16"] if arguments.bf16 else [])]


def saved(chosen: mt.Workload, policy: mt.Policy, command: Sequence[str]) -> dict[str, Any]:
    """Return the saved bytes by both meters, the share under a codec, and the uncompressed tensors."""
    plain, converted = storages_after_forward(chosen, None), storages_after_forward(chosen, policy)
    left = left_uncompressed(chosen, policy)
    # Autocast's copies of parameters are part of the growth, but are no activations.
    plain_resident = in_own_process(command, None)["saved"] - plain.weight_copies
    converted_resident = in_own_process(command, policy)["saved"] - converted.weight_copies
    return {
        "plain": {"storages": plain.bytes, "resident": plain_resident},
        "saved": {"storages": converted.bytes, "resident": converted_resident},
        "share": {"storages": converted.bytes / plain.bytes, "resident": converted_resident / plain_resident},
        "weight_copies": {"plain": plain.weight_copies, "saved": converted.weight_copies},
        "coded_bytes": left.coded_bytes,
        "uncompressed_bytes": left.bytes,
        "under_codec": 1 - left.bytes / plain.bytes,
        "unseen_bytes": converted.bytes - left.coded_bytes - left.bytes,
        "left": [vars(row) for row in left.rows],
        "derived": [vars(pair) for pair in left.derived],
    }


def describe(result: Mapping[str, Any]) -> list[str]:
    """Return the figures as lines of text."""
    total, share = result["plain"]["storages"], result["share"]
    precision = result["autocast"] or "fp32"
    lines = [
        f"\n{result['subject']} {precision}, {result['policy']}, batch {result['batch_size']}",
        f"  saved {share['storages']:.2%} of {total / 1e6:.1f} MB, resident {share['resident']:.2%}",
        f"  under a codec {result['under_codec']:.2%}; unseen {result['unseen_bytes'] / 1e6:.2f} MB; left:",
    ]
    for row in result["left"][:MAX_ROWS]:
        shape = "×".join(map(str, row["shape"]))
        lines.append(
            f"    {row['bytes'] / total:7.3%} {row['bytes'] / 1e6:8.2f} MB  {row['function']:<24} "
            f"{row['tensors']:>3} of {shape} {row['dtype']}  {row['layers']}"
        )
    if "errors" in result:
        errors = ", ".join(f"{name}: {error['mean']:.2e}" for name, error in result["errors"].items())
        lines.append(f"  gradient error {errors}; differs: {', '.join(result['differs']) or 'nothing'}")
    return lines


if __name__ == "__main__":
    main()
