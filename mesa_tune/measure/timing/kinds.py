"""The kinds of converted steps that are timed in turn, and the policies under which they are taken."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum
from functools import partial

from mesa_tune.policy import Policy
from mesa_tune.policy.settings import EXACT, LayerSettings
from mesa_tune.profiles.entries import REFERENCE_GROUP, LayerEntry, comparable_group_size
from mesa_tune.profiles.profile import Profile

TIMES_COMPRESSED = 2
"""In how many of the `PACKED` steps each layer compresses."""


class Kind(Enum):
    """What is stored in a step, and how."""

    PLAIN = "the plain model's"
    EXACT = "everything exactly"
    CUT = "everything exactly, cut into spans as the steps that compress"
    ALL = "all layers compress"
    HALF = "a half of the layers compresses"
    OTHER_HALF = "the other half compresses"
    DERIVING = "all layers compress, and derive what they can"
    MOST_ROWS = "all layers compress, and leave out the fewest rows of any option, where they can"
    FEWEST_ROWS = "all layers compress, and leave out the most rows of any option, where they can"
    TILED = "everything exactly, and losses have slices"
    RERUN = "everything exactly, and all blocks run again"
    SLICED = "everything exactly, and all parts of blocks run again in slices"


PACKED = (Kind.ALL, Kind.HALF, Kind.OTHER_HALF)


def timed_settings(options: Sequence[LayerSettings]) -> LayerSettings | None:
    """Return the option under which steps are timed: the nearest to 4 bits in groups of 256.

    Return None if there is no option.
    """
    plain = [option for option in options if not option.omits and option.store == "quantize"]
    return min(plain or options, key=_distance, default=None)


def _distance(option: LayerSettings) -> tuple[float, int]:
    return abs(math.log2(comparable_group_size(option) / REFERENCE_GROUP)), abs(option.bits - 4)


def sampled_settings(profile: Profile) -> dict[Kind, LayerSettings]:
    """Return the options of the largest and of the smallest share of rows, each under its kind of step."""
    options = dict.fromkeys(option.settings for layer in profile.layers for option in layer.options)
    shares = {settings.rows: settings for settings in reversed(options) if settings.rows < 1}
    if not shares:
        return {}
    most, fewest = max(shares), min(shares)
    kinds = {Kind.MOST_ROWS: shares[most]}
    return kinds if most == fewest else {**kinds, Kind.FEWEST_ROWS: shares[fewest]}


def timed_policies(profile: Profile, settings: LayerSettings) -> dict[Kind, Policy]:
    """Return the policy of each kind of step that is timed besides plain ones.

    Layers compress in `settings`. Those that share tensors are in the same half. Those stored by hooks stay
    exact: hooks work between routed calls, so their time would count for other layers.
    """
    groups = profile.groups
    half = {name for group in random.Random(0).sample(groups, len(groups) // 2) for name in group}
    policies = {
        Kind.EXACT: Policy(()),
        Kind.ALL: _compressing(profile, lambda _: settings),
        Kind.HALF: _compressing(profile, lambda layer: settings if layer.name in half else EXACT),
        Kind.OTHER_HALF: _compressing(profile, lambda layer: EXACT if layer.name in half else settings),
    }
    if profile.derivations:
        deriving = replace(settings, store="derive")
        policies[Kind.DERIVING] = _compressing(profile, lambda _: deriving)
    for kind, sampled in sampled_settings(profile).items():
        policies[kind] = _compressing(profile, partial(_nearest, (sampled, settings)))
    if profile.tiled is not None and profile.tiled.losses:
        policies[Kind.TILED] = profile.tiled.policy(Policy(()))
    parts = profile.tiled.modules if profile.tiled is not None else ()
    for kind, modules in ((Kind.RERUN, profile.modules), (Kind.SLICED, parts)):
        if modules:
            inputs = {module.name: module.near(settings.bits).settings for module in modules}
            policies[kind] = Policy(()).rerunning(inputs)
    return policies


def _nearest(wanted: Sequence[LayerSettings], layer: LayerEntry) -> LayerSettings:
    """Return the first of these settings that `layer` has as an option; else the last."""
    return next((settings for settings in wanted if settings in layer.positions), wanted[-1])


def _compressing(profile: Profile, settings: Callable[[LayerEntry], LayerSettings]) -> Policy:
    """Return the policy that gives layers these `settings`, but stores exactly what hooks store."""
    hooked = profile.timeline.hooked
    return Policy.from_assignments(
        (layer.tag, layer.index, layer.name, EXACT if layer.name in hooked else settings(layer))
        for layer in profile.layers
    )
