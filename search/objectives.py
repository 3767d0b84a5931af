"""Objectives of a search: what is the least, and within what.

`time`: the fastest step whose error is invisible beside the minibatch's own noise. `error`: the least
gradient error. `memory`: the lowest peak whose error is invisible, too. `auto`: `time` where that is
possible, else `error`.

Near the fastest step, errors fall steeply: on a digits ViT at 40 % of its peak to a sixth for 0.4 % of the
step's time, at 60 % to an eighteenth for 0.2 %. No profile knows a time that well. So error costs time, too:
see `Program.quiet_times`.

The hard part: the noise ratio can be unknown, in a profile without noise. Unknown is not zero (Rule 12): then
`auto` minimises the error, and `time` and `memory` are refused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from mesa_tune.errors import BudgetError, RunError, options
from mesa_tune.policy.rules import suggestion
from mesa_tune.profiler.profile import Profile
from mesa_tune.search.linear.highs import Deadline, TimeUpError
from mesa_tune.search.problem import Limits
from mesa_tune.search.solver import AS_FAST, UNFELT, Program, Solution

OBJECTIVES = ("auto", "time", "error", "memory")
MAX_NOISE_RATIO = 0.03
"""Largest gradient noise ratio. At 0.1 a small GPT learned 0.3 % worse (docs/learning.md)."""
MAX_BIAS = 0.01
"""Largest squared bias over the squared norm of the mean gradient."""
MEMORY_SLOWDOWN = 1.5
"""Largest step time over the plain one, if the objective is memory and the user set no other."""
_TO_LOWEST = 0.75
"""Share of the time that finding the lowest peak may take; the rest is for the fastest step within it."""


@dataclass(frozen=True)
class Solved:
    """A solution, and the objective that it is for. `limits`: within which it was solved.

    `cost`: what was minimised. For `time` it is the step's milliseconds and the price of error, of which no
    plan can do without `floor`. `least`: a proven lower bound on the cost of any plan.
    """

    objective: str
    solution: Solution
    limits: Limits
    cost: float
    least: float
    floor: float = 0.0
    allowance: float = 0.0
    why: str = ""

    @property
    def bound(self) -> float:
        """A lower bound on the objective: what error costs the fastest plan is not its time. See `Plan`."""
        return max(self.floor, self.least - self.allowance)

    @property
    def gap(self) -> float:
        """Largest fraction of the cost above `floor` that a better solution could save."""
        return max(0.0, self.cost - self.least) / max(self.cost - self.floor, 1e-12)


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
    noise = profile.noise
    if noise is None or noise.ratio([0.0] * max(1, len(noise.norms))) is None:
        return "the profile has no gradient noise to compare errors with"
    # ‖ḡ‖² over the mean ‖g_b‖². With noise alone, it is not known.
    mean = 1 - noise.relative
    return replace(limits, noise=ratio, bias=MAX_BIAS * mean if mean > 0 else None)


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
    """Return the fastest solution, up to a `share` of the step's time."""
    times = program.quiet_times(limits)
    base, allowance = program.space.base_ms, 0.0 if limits.noise is None else program.allowance_ms
    found = program.solve(limits, times, tolerance=share * base, further=program.errors, deadline=deadline)
    if found is None:
        return None
    return Solved("time", found, limits, base + found.cost, base + found.bound, base, allowance)


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
        fastest = _fastest(program, lowest.limits, deadline, AS_FAST)
    except TimeUpError:
        return lowest
    return lowest if fastest is None else replace(lowest, solution=fastest.solution)
