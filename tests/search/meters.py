"""Stand-ins for what a study measures: errors and times by prices of one's own, which cost nothing."""

from __future__ import annotations

import os
import signal
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from mesa_tune.policy import Policy
from mesa_tune.profiles.own_noise import GradientError, Pair
from mesa_tune.profiles.profile import Profile

NOISE = 0.5
"""Of the batches, over their squared gradient: that of `noisy`."""
COST = 20.0
"""Compressing takes this many times what the synthetic profile predicts: a share of the step as really."""


@dataclass
class Weighted:
    """A joint error in which some tags count otherwise than alone, and steps in which some take longer.

    `joint`: the joint error over the sum of single ones; `noise`, `chance`: how much an error and a time
    vary, which pair and plan decide; `seconds`: what the errors at four pairs take.
    """

    profile: Profile
    weights: Mapping[str, float] = field(default_factory=dict)
    slower: Mapping[str, float] = field(default_factory=dict)
    joint: float = 1.0
    noise: float = 0.02
    chance: float = 0.02
    seconds: float = 0.0
    asked: list[Pair] = field(default_factory=list)
    calls: int = 0

    def errors(self, policy: Policy, pairs: Sequence[Pair]) -> list[GradientError]:
        time.sleep(self.seconds * len(pairs) / 4)
        self.asked += pairs
        error = self.joint * self.error(policy)
        varied = [error * (1 + self.noise * _chance(policy, *pair)) for pair in pairs]
        return [GradientError(each, each / NOISE) for each in varied]

    def step_times(self, policies: Sequence[Policy], rounds: int) -> list[list[float]]:
        self.calls += 1
        chance = np.random.default_rng([rounds, *policies[-1].dumps().encode()])
        times = np.array([self.ms(policy) for policy in policies])
        drift = 1 + 0.3 * chance.random((rounds, 1))
        varied = times * drift * (1 + self.chance * chance.standard_normal((rounds, len(policies))))
        return varied.tolist()  # type: ignore[no-any-return]

    def peak(self, policy: Policy) -> int | None:
        return None

    def error(self, policy: Policy) -> float:
        """Return the sum of the layers' errors, each times its tag's weight."""
        assignment = self.profile.assignment(policy)
        return sum(
            (self.profile.layer_error(layer, assignment[layer.name]) or 0.0)
            * self.weights.get(layer.tag, 1.0)
            for layer in self.profile.layers
        )

    def ms(self, policy: Policy) -> float:
        """Return the true time of a step."""
        assignment = self.profile.assignment(policy)
        alone = self.profile.predict(Policy(())).step_ms or 0.0
        singly = [
            (self.slower.get(layer.tag, 1.0), {layer.name: assignment[layer.name]})
            for layer in self.profile.layers
        ]
        added = [
            factor * ((self.profile.predict_assignment(one).step_ms or 0.0) - alone) for factor, one in singly
        ]
        return alone + COST * sum(added)


@dataclass
class Stopped(Weighted):
    """Raises KeyboardInterrupt at its error number `pair`, or kills its own process as `kill -9` does."""

    pair: int = 1
    kills: bool = False

    def errors(self, policy: Policy, pairs: Sequence[Pair]) -> list[GradientError]:
        for _ in pairs:
            self.pair -= 1
            if not self.pair and self.kills:
                os.kill(os.getpid(), signal.SIGKILL)
            if not self.pair:
                raise KeyboardInterrupt
        return super().errors(policy, pairs)


def _chance(policy: Policy, *pair: int) -> float:
    return float(np.random.default_rng([zlib.crc32(policy.dumps().encode()), *pair]).standard_normal())
