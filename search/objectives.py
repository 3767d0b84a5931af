"""Objectives of a search: what is the least, and within what.

`time`: the least time to the same result, within the noise ratio. `error`: the least noise ratio. `memory`:
the lowest peak within the noise ratio, and the least time within it. `auto`: `time` where that is possible,
else `error`.

A gradient whose variance grows by r asks for up to r more samples (McCandlish et al., 2018), so a policy
costs about step × (1 + r). The ratio grows in training: its mean was 5 to 6 times its first value on a small
Llama. So it counts `WEIGHT` times. That also takes what is nearly free: on a digits ViT at 40 % of its peak,
errors fall to a sixth for 0.4 % of the step's time.

The hard part: the noise ratio can be unknown, in a profile without noise. Unknown is not zero (Rule 12): then
`auto` minimises the error, and `time` and `memory` are refused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from mesa_tune.errors import BudgetError, RunError, options
from mesa_tune.policy.rules import suggestion
from mesa_tune.profiles.profile import Profile
from mesa_tune.search.linear.highs import Deadline, TimeUpError
from mesa_tune.search.problem import Limits, Space
from mesa_tune.search.solver import UNFELT, Program, Solution

OBJECTIVES = ("auto", "time", "error", "memory")
MAX_NOISE_RATIO = 0.005
"""Largest gradient noise ratio at the time of the profile.

It grows in training: a smallest plan of a small Llama within 0.03 grew to 0.5 and learned 2.7 % worse, one
within 0.005 to 0.2 and 0.8 % worse (docs/learning.md).
"""
MAX_BIAS = 1 / 3
"""Largest part of the limit on the noise ratio that may be bias, which no number of samples averages out."""
WORST = 1.0
"""Largest own noise ratio of a parameter, or part of one."""
WEIGHT = 8
"""A step's time counts 1 + `WEIGHT` × its noise ratio."""
MEMORY_SLOWDOWN = 1.5
"""Largest step time over the plain one, if the objective is memory and the user set no other."""
_AS_FAST = 0.02
"""Share of a step's time up to which the least time within the lowest peak is found."""
_TO_LOWEST = 0.75
"""Share of the time that finding the lowest peak may take; the rest is for the fastest step within it."""


@dataclass(frozen=True)
class Solved:
    """A solution, and the objective that it is for. `limits`: within which it was solved.

    `cost`: of the objective; for `time`, step × (1 + `WEIGHT` × ratio) in milliseconds. `bound`: a proven
    lower bound on the cost of any plan, by summed prices.
    """

    objective: str
    solution: Solution
    limits: Limits
    cost: float
    bound: float
    why: str = ""

    @property
    def gap(self) -> float:
        """Largest fraction of the cost that a better solution could save."""
        return max(0.0, self.cost - self.bound) / self.cost if self.cost > 0 else 0.0


def to_same_result(ms: float, ratio: float) -> float:
    """Return the time to the same result, of a step of `ms` with this noise ratio."""
    return ms * (1 + WEIGHT * ratio)


def noise_price(space: Space, ms: float) -> float:
    """Return what a noise ratio of 1 costs beside a step of `ms`; nothing where the ratio is unknown."""
    return WEIGHT * max(0.0, ms) if space.knows_noise else 0.0


def check_objective(objective: str, budget: object) -> None:
    """Raise BudgetError for an unknown objective, and for a missing budget where one is needed."""
    if objective not in OBJECTIVES:
        raise BudgetError(
            f"objective {objective!r}: unknown\n{suggestion(objective, OBJECTIVES, 'objectives are')}"
        )
    if budget is None and objective != "memory":
        smallest = options(objective="memory")
        raise BudgetError(
            f"budget: missing\ngive one such as 6GB or 40%; {smallest} finds the lowest peak without one"
        )


def noise_limits(profile: Profile, limits: Limits, ratio: float) -> Limits | str:
    """Return `limits` with those on noise ratio and bias, at any batch size; in words, why it is unknown."""
    if math.isinf(ratio):
        return limits
    own = profile.own_noise
    if own is None or not own.is_known:
        return "the profile has no gradient noise to compare errors with"
    return replace(limits, noise=ratio, bias=MAX_BIAS * ratio, worst=WORST)


def solve(
    profile: Profile, program: Program, limits: Limits, objective: str, ratio: float, deadline: Deadline
) -> Solved | None:
    """Return the best solution; None if no policy meets `limits`, which are without noise ratio and bias.

    Of the lowest peak, `fastest_of_lowest` makes it the fastest.
    Raise RunError if the ratio is unknown and the objective needs it, BudgetError if only the ratio `ratio`
    is out of reach.
    """
    if objective == "error":
        return _least_error(program, limits, deadline)
    quiet = noise_limits(profile, limits, ratio)
    if isinstance(quiet, str):
        if objective != "auto":
            raise RunError(
                f"objective {objective}: {quiet}\n{options(objective='error')}, or without a limit: "
                f"{options(max_noise_ratio=math.inf)}"
            )
        return _least_error(program, limits, deadline, quiet)
    within = _lowest_peak if objective == "memory" else _fastest
    found = within(program, quiet, deadline)
    if found is not None or quiet.noise is None:
        return found
    least = _least_error(program, limits, deadline, f"no plan was found within the noise ratio {ratio:g}")
    if objective == "auto" or least is None:
        return least
    reached = program.space.noise(least.solution.chosen)
    raise BudgetError(
        f"noise ratio {ratio:g}: no plan within the other limits reaches it\n"
        f"the plan of least error has {reached:.2g}: raise {options('max_noise_ratio')}, the budget or "
        f"{options('max_slowdown')}, or {options(objective='error')}"
    )


def _fastest(program: Program, limits: Limits, deadline: Deadline, share: float = UNFELT) -> Solved | None:
    """Return the solution of least time to the same result, up to a `share` of the step's time.

    No plan is faster than the fastest step. So step + `WEIGHT` × fastest step × ratio, which is linear, is
    below step × (1 + `WEIGHT` × ratio), and hardly so for the best plans.
    """
    base = program.space.base_ms
    fastest = program.least(limits, program.times, deadline)
    if fastest is None:
        return None
    price = noise_price(program.space, base + fastest)
    found = program.solve(limits, program.times, price=price, tolerance=share * base, deadline=deadline)
    if found is None:
        return None
    ratio = program.space.noise(found.chosen) if price else 0.0
    cost = to_same_result(program.space.ms(found.chosen), ratio)
    return Solved("time", found, limits, cost, min(cost, base + found.bound))


def _least_error(program: Program, limits: Limits, deadline: Deadline, why: str = "") -> Solved | None:
    found = program.solve(limits, deadline=deadline)
    return None if found is None else Solved("error", found, limits, found.cost, found.bound, why=why)


def _lowest_peak(program: Program, limits: Limits, deadline: Deadline) -> Solved | None:
    lowest = program.smallest_peak(limits, deadline=deadline.part(_TO_LOWEST))
    if lowest is None or (limits.peak is not None and lowest.cost > limits.peak):
        return None
    inside = replace(limits, peak=int(lowest.cost))
    return Solved("memory", lowest, inside, lowest.cost, lowest.bound)


def fastest_of_lowest(program: Program, lowest: Solved, deadline: Deadline) -> Solved:
    """Return `lowest`, of the objective `memory`, with the fastest solution of its peak."""
    try:
        fastest = _fastest(program, lowest.limits, deadline, _AS_FAST)
    except TimeUpError:
        return lowest
    return lowest if fastest is None else replace(lowest, solution=fastest.solution)
