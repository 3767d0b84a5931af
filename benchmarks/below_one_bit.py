"""What does it cost to store a part of the rows, beside fewer bits and dropped elements, at equal bytes?

    python benchmarks/below_one_bit.py [--steps 600] [--batches 8] [--seeds 4]

The model is the digits ViT, trained for `--steps` steps. First all its linear layers have one of the
settings, and all other layers are exact: bits per element that these layers store (measured), gradient
error and noise ratio on batches that the profile has not seen. Then the predicted noise ratio of the policy
with the least error at a few shares of the plain step's saved bytes: without `rows` and fixed levels, with
`rows`, and with both.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from common import append
from search_vs_uniform import GradientError, measured_bytes, trained_workload, unseen_batches

import mesa_tune as mt
from mesa_tune.policy.settings import LayerSettings
from mesa_tune.profiles.entries import SAMPLED
from mesa_tune.profiles.profile import Profile

TAGS = ("fc", "conv")
SETTINGS = (
    *(LayerSettings(level=2**bits) for bits in (4, 2, 1)),
    *(LayerSettings(level=16, rows=share) for share in (0.5, 0.25, 0.1, 0.05)),
    *(LayerSettings(level=2**bits, rows=share) for bits, share in SAMPLED),
    *(LayerSettings(level=4, drop=share) for share in (0.75, 0.9, 0.97)),
)
SHARES = (0.08, 0.05, 0.04, 0.035, 0.03, 0.025)


def parsed(doc: str | None) -> argparse.Namespace:
    """Return the arguments of a benchmark with this docstring."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0] if doc else "")
    parser.add_argument("--steps", type=int, default=600, help="training steps before anything is measured")
    parser.add_argument("--batches", type=int, default=8, help="unseen batches for the gradient errors")
    parser.add_argument("--seeds", type=int, default=4, help="rounding seeds per batch")
    return parser.parse_args()


def policy_of(profile: Profile, settings: LayerSettings, tags: Sequence[str] = TAGS) -> mt.Policy:
    """Return the policy that gives all layers of these tags the same settings; all others are exact."""
    return mt.Policy.from_assignments(
        (layer.tag, layer.index, layer.name, settings) for layer in profile.layers if layer.tag in tags
    )


def main() -> None:
    arguments = parsed(__doc__)
    workload = trained_workload("digits", arguments.steps)
    profile = mt.profile(workload, seeds=arguments.seeds)
    unseen = GradientError(workload, unseen_batches(workload, arguments.batches))
    subject = {"subject": "digits ViT", "steps": arguments.steps}
    for settings in SETTINGS:
        result = uniform(workload, profile, unseen, settings, arguments.seeds)
        print(
            f"{settings.label:24s} {result['bits']:5.2f} bits  error {result['error']:.1e}  "
            f"noise ratio {result['noise_ratio']:.1e}",
            flush=True,
        )
        append("below_one_bit", {**subject, **result})
    for share in SHARES:
        for forbid in (["recompute", "rows", "levels"], ["recompute", "levels"], ["recompute"]):
            result = searched(profile, share, forbid)
            print(
                f"{share:.1%} of the plain saved bytes without {forbid}: {result['noise_ratio']}", flush=True
            )
            append("below_one_bit", {**subject, **result})


def uniform(
    workload: mt.Workload, profile: Profile, unseen: GradientError, settings: LayerSettings, seeds: int
) -> dict[str, Any]:
    """Measure one setting of all linear layers and convolutions, with all other layers exact."""
    policy = policy_of(profile, settings)
    predicted, (saved, _) = profile.predict(policy).saved_bytes, measured_bytes(workload, policy)
    if predicted != saved:
        raise SystemExit(f"{settings.label}: {predicted} bytes predicted, but {saved} measured")
    error = unseen.error(policy, seeds)
    return {
        "settings": asdict(settings),
        "bits": packed_bits(profile, settings),
        "saved_bytes": saved,
        "error": error,
        "noise_ratio": profile.predict(policy).gradient_noise_ratio,
    }


def packed_bits(profile: Profile, settings: LayerSettings) -> float:
    """Return the bits per element of what the large layers of `TAGS` store."""
    names = [layer.name for layer in profile.layers if layer.tag in TAGS and len(layer.options) > 1]
    sized = profile.timeline.at().without_reruns
    stored = sized.under(dict.fromkeys(names, settings)).spans
    coded = [
        number
        for number, span in enumerate(sized.spans)
        if span.kind == "coded" and {*names} & {*span.layers}
    ]
    return 8 * int(stored[coded].sum()) / sum(sized.spans[number].size for number in coded)


def searched(profile: Profile, share: float, forbid: Sequence[str]) -> dict[str, Any]:
    """Return the predicted noise ratio of the solved policy at a share of the plain saved bytes."""
    limit = int(share * profile.saved_bytes)
    result: dict[str, Any] = {"share": share, "forbid": list(forbid), "noise_ratio": None}
    try:
        plan = mt.search_policy(profile, "100%", max_saved=limit, objective="error", forbid=forbid, trials=0)
    except mt.BudgetError:
        return result
    return result | {"noise_ratio": plan.predicted.gradient_noise_ratio}


if __name__ == "__main__":
    main()
