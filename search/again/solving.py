"""Solve the request of a plan again, by other prices: those of the same model later in its training."""

from __future__ import annotations

import math
from typing import Any

from mesa_tune.policy.settings import LayerSettings
from mesa_tune.profiles.profile import Profile
from mesa_tune.search.api import search_policy
from mesa_tune.search.frontier import lowest
from mesa_tune.search.objectives import noise_limits
from mesa_tune.search.plan import Plan
from mesa_tune.search.problem import Limits
from mesa_tune.search.restrictions import Pins, Restrictions
from mesa_tune.search.steps import steps


def solved_again(profile: Profile, plan: Plan) -> Plan:
    """Return the plan for the request of `plan` by the prices of `profile`, without a study.

    Its budget is in bytes: those of the plan where no budget was given. Raise BudgetError if no policy meets
    the limits.
    """
    ratio = plan.request["max_noise_ratio"]
    asked: dict[str, Any] = {**plan.request, "pins": _pins(plan), "max_noise_ratio": ratio or math.inf}
    return search_policy(profile, trials=0, **asked)


def least_budget(profile: Profile, plan: Plan, noise_ratio: float) -> int | None:
    """Return the lowest peak within a noise ratio and that of the request, to 1 %; None if none was found.

    The other limits of the request hold, but that on the peak.
    """
    asked, size = plan.request, plan.batch_size
    ms = None if asked["max_slowdown"] is None else asked["max_slowdown"] * profile.plain_ms(size)
    ratio = min(noise_ratio, asked["max_noise_ratio"] or noise_ratio)
    limits = noise_limits(profile, Limits(saved=asked["max_saved"], ms=ms), ratio)
    if isinstance(limits, str):
        return None
    restrictions = Restrictions.of(asked["forbid"], asked["only"])
    solutions = [lowest(step, limits) for step in steps(profile, size, _pins(plan), restrictions)]
    return min((int(solution.cost) for solution in solutions if solution is not None), default=None)


def _pins(plan: Plan) -> Pins:
    return {glob: LayerSettings.from_dict(values) for glob, values in plan.request["pins"].items()}
