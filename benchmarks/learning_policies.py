"""The policies of `learning.py`: of the search, and of other systems, as published or at equal bytes."""

from __future__ import annotations

from functools import partial
from typing import Any

from greedy import greedy

import mesa_tune as mt
from mesa_tune.profiles.prediction import Prediction
from mesa_tune.search.objectives import MAX_NOISE_RATIO

PLAIN, FASTEST, SMALLEST = "plain", "fastest", "smallest"
UNTRAINED, RATIO = ", untrained", ", ratio "
SHARES = range(40, 100, 5)
GREEDY = "greedy at the bytes of smallest"
TWO_BITS = "uniform 2 bits"
SEARCHED_AT, GREEDY_AT = f"least error at the bytes of {TWO_BITS}", f"greedy at the bytes of {TWO_BITS}"
AS_FAST = f"least error at the bytes and the step time of {TWO_BITS}"
MATMULS = "# mesa-tune policy 1\non fc conv:\n    by_index: all\n"
MESA = "on fc conv gelu bn relu softmax matmul attention layernorm:\n    by_index: all\n"
UNIFORM = mt.Policy.uniform(level=4)
RIVALS = {
    "uniform 4 bits": mt.Policy.uniform(level=16),
    TWO_BITS: UNIFORM,
    "Mesa 8 bits": mt.Policy.parse(f"{MESA}    enable: True\n    level: 256\n    ema_decay: 0.9\n"),
    "DropIT 0.9": mt.Policy.parse(f"{MATMULS}    drop: 0.9\n    store: exact\n"),
    "WTA-CRS 0.3": mt.Policy.parse(f"{MATMULS}    rows: 0.3\n    store: exact\n"),
    GREEDY: None,
    GREEDY_AT: None,
    SEARCHED_AT: None,
    AS_FAST: None,
}
"""Rivals by label, and the search within the bytes, or also the time, of one.

Greedy: bits by layer as GACT chooses them.
"""


def policy_of(profile: mt.Profile, label: str) -> tuple[str | None, mt.Policy | None]:
    """Return the budget and the policy; the budget of the fastest is the first of SHARES within reach."""
    if label == PLAIN:
        return None, None
    if label == FASTEST:
        plans = ((f"{share}%", fastest(profile, share)) for share in SHARES)
        return next((budget, policy) for budget, policy in plans if policy is not None)
    if label in (GREEDY, GREEDY_AT):
        of = smallest(profile) if label == GREEDY else UNIFORM
        size = partial(saved_bytes, profile)
        policy = greedy(profile, size, size(of), law=False)
        assert policy is not None, "1 bit everywhere saves more"
        return None, policy
    if label in (SEARCHED_AT, AS_FAST):
        return None, least_error(profile, UNIFORM, as_fast=label == AS_FAST)
    if label in RIVALS:
        return None, RIVALS[label]
    return None, smallest(profile, float(label.partition(RATIO)[2] or MAX_NOISE_RATIO))


def smallest(profile: mt.Profile, ratio: float = MAX_NOISE_RATIO) -> mt.Policy:
    return mt.search_policy(profile, trials=0, objective="memory", max_noise_ratio=ratio).policy


def saved_bytes(profile: mt.Profile, policy: mt.Policy) -> int:
    return profile.predict(policy).saved_bytes


def least_error(profile: mt.Profile, rival: mt.Policy, *, as_fast: bool) -> mt.Policy:
    """Return the policy of least error within the predicted saved bytes and peak of `rival`.

    `as_fast`: also within its predicted time of a step.
    """
    predicted = profile.predict(rival)
    slowest = slowdown(profile, predicted) if as_fast else None
    limits: dict[str, Any] = {"max_saved": predicted.saved_bytes, "max_slowdown": slowest}
    return mt.search_policy(profile, predicted.peak_bytes, **limits, trials=0, objective="error").policy


def slowdown(profile: mt.Profile, predicted: Prediction) -> float | None:
    """Return the predicted time of a step over that of a plain one; None if unknown."""
    return predicted.step_ms and predicted.step_ms / profile.plain_ms(profile.batch_size)


def fastest(profile: mt.Profile, share: int) -> mt.Policy | None:
    """Return the fastest policy within `share` percent of the plain peak; None if there is none."""
    try:
        return mt.search_policy(profile, f"{share}%", trials=0, objective="time").policy
    except mt.BudgetError as error:
        print(error, flush=True)
        return None
