"""Does the study find what wrong prices hide? A stand-in meter has the right ones, so nothing is timed.

    python benchmarks/studies.py [--models digits_vit,gpt2] [--seeds 5] [--trials 30]

Of a profile, the time prices of one kind of layer are halved, kind after kind, and a plan is solved for the
peak of checkpointing. Where that plan takes over 3 % more time to the same result than the plan of the right
prices, studies of the wrong profile begin there, one per seed; their meter predicts times and errors by the
right profile, with 2 % noise. Results are lines of `results/studies.jsonl`.
"""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from common import append
from search_models import Model, limits

import mesa_tune as mt
from mesa_tune.profiles.entries import Option
from mesa_tune.profiles.own_noise import GradientError, Pair
from mesa_tune.profiles.profile import Profile
from mesa_tune.search.objectives import to_same_result

OFF, NOISE, HALF = 1.03, 0.02, 0.5


@dataclass(frozen=True)
class Right:
    """Measures as a profile predicts, with chance."""

    profile: Profile

    def errors(self, policy: mt.Policy, pairs: Sequence[Pair]) -> list[GradientError]:
        predicted = self.profile.predict(policy)
        pair = predicted.gradient_error or 0.0, predicted.gradient_noise_ratio or 0.0
        varied = (1 + NOISE * self._chance(policy, draw) for draw, _ in pairs)
        return [GradientError(factor * pair[0], factor * pair[1]) for factor in varied]

    def step_times(self, policies: Sequence[mt.Policy], rounds: int) -> list[list[float]]:
        times = [self.profile.predict(policy).step_ms or 0.0 for policy in policies]
        return [
            [
                ms * (1 + NOISE * self._chance(policy, -turn))
                for ms, policy in zip(times, policies, strict=True)
            ]
            for turn in range(1, rounds + 1)
        ]

    def peak(self, policy: mt.Policy) -> int | None:
        return None

    def cost(self, policy: mt.Policy) -> float:
        """Return the time to the same result."""
        predicted = self.profile.predict(policy)
        return to_same_result(predicted.step_ms or 0.0, predicted.gradient_noise_ratio or 0.0)

    @staticmethod
    def _chance(policy: mt.Policy, number: int) -> float:
        seed = [zlib.crc32(policy.dumps().encode()), number % (1 << 32)]
        return float(np.random.default_rng(seed).standard_normal())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--models", default="digits_vit,gpt2")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--trials", type=int, default=30)
    arguments = parser.parse_args()
    for name in arguments.models.split(","):
        model = Model(name)
        right, budget = Right(model.profile), limits(model)["checkpointing"]
        best = right.cost(mt.search_policy(model.profile, budget, trials=0).policy)
        for kind in sorted({layer.tag for layer in model.profile.layers}):
            wrong = halved(model.profile, kind)
            solved = right.cost(mt.search_policy(wrong, budget, trials=0).policy) / best
            found = []
            for seed in range(arguments.seeds if solved > OFF else 0):
                plan = mt.search_policy(wrong, budget, measure=right, trials=arguments.trials, seed=seed)
                found.append(right.cost(plan.policy) / best)
            append("studies", {"model": name, "kind": kind, "solved": solved, "studies": found})
            print(f"{name}, {kind} at half: solved {solved:.3f}, studies {listed(found)}", flush=True)


def listed(values: Iterable[float]) -> str:
    return " ".join(f"{value:.3f}" for value in values) or "none needed"


def halved(profile: Profile, kind: str) -> Profile:
    """Return the profile with half the time in every option of a kind of layer."""
    layers = tuple(
        replace(layer, options=tuple(map(_faster, layer.options))) if layer.tag == kind else layer
        for layer in profile.layers
    )
    return replace(profile, layers=layers)


def _faster(option: Option) -> Option:
    return replace(option, encode_ms=HALF * option.encode_ms, decode_ms=HALF * option.decode_ms)


if __name__ == "__main__":
    main()
