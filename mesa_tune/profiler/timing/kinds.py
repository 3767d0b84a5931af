"""The kinds of converted steps that are timed in turn, and the policies under which they are taken."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum

from mesa_tune.policy import Policy
from mesa_tune.policy.settings import EXACT, LayerSettings
from mesa_tune.profiler.entries import REFERENCE_GROUP, comparable_group_size
from mesa_tune.profiler.profile import Profile

TIMES_COMPRESSED = 2
"""In how many of the `PACKED` steps each layer compresses."""


class Kind(Enum):
    """What is stored in a step, and how."""

    PLAIN = "the plain model's"
    EXACT = "everything exactly"
    ALL = "all layers compress"
    HALF = "a half of the layers compresses"
    OTHER_HALF = "the other half compresses"
    DERIVING = "all layers compress, and derive what they can"
    TILED = "everything exactly, and losses have slices"
    RERUN = "everything exactly, and all blocks run again"


PACKED = (Kind.ALL, Kind.HALF, Kind.OTHER_HALF)


def timed_settings(options: Sequence[LayerSettings]) -> LayerSettings | None:
    """Return the option under which steps are timed: the nearest to 4 bits in groups of 256.

    Return None if there is no option.
    """
    plain = [option for option in options if not option.omits and option.store == "quantize"]
    return min(plain or options, key=_distance, default=None)


def _distance(option: LayerSettings) -> tuple[float, int]:
    return abs(math.log2(comparable_group_size(option) / REFERENCE_GROUP)), abs(option.bits - 4)


def timed_policies(profile: Profile, settings: LayerSettings) -> dict[Kind, Policy]:
    """Return the policy of each kind of step that is timed besides plain ones.

    Layers compress in `settings`. Those that share tensors are in the same half. Those stored by hooks stay
    exact: hooks work between routed calls, so their time would count for other layers.
    """
    groups = profile.groups
    half = {name for group in random.Random(0).sample(groups, len(groups) // 2) for name in group}
    policies = {
        Kind.EXACT: Policy(()),
        Kind.ALL: _compressing(profile, settings, lambda _: True),
        Kind.HALF: _compressing(profile, settings, half.__contains__),
        Kind.OTHER_HALF: _compressing(profile, settings, lambda name: name not in half),
    }
    if profile.derivations:
        policies[Kind.DERIVING] = _compressing(profile, replace(settings, store="derive"), lambda _: True)
    if profile.tiled is not None:
        policies[Kind.TILED] = profile.tiled.policy(Policy(()))
    if profile.modules:
        inputs = {module.name: module.near(settings.bits).settings for module in profile.modules}
        policies[Kind.RERUN] = Policy(()).rerunning(inputs)
    return policies


def _compressing(profile: Profile, settings: LayerSettings, chosen: Callable[[str], bool]) -> Policy:
    """Return the policy that gives `settings` to the `chosen` layers but those stored by hooks."""
    hooked = profile.timeline.hooked
    return Policy.from_assignments(
        (
            layer.tag,
            layer.index,
            layer.name,
            settings if chosen(layer.name) and layer.name not in hooked else EXACT,
        )
        for layer in profile.layers
    )
