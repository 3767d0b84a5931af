"""`Replan`: solve the plan of a run again, by its prices, corrected with what was read in training."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mesa_tune.errors import RunError
from mesa_tune.measure.errors.sampled import Sample
from mesa_tune.policy import Policy
from mesa_tune.profiles.profile import Profile
from mesa_tune.runs.folder import Run
from mesa_tune.search.again.correction import corrected, read_over_predicted
from mesa_tune.search.again.solving import least_budget, solved_again
from mesa_tune.search.plan import Plan
from mesa_tune.units import format_bytes, format_error

_LESS = 0.9
"""A plan helps if its noise ratio is at most this part of that of the policy that was read."""


class Replanned(NamedTuple):
    """What solving again found: a `policy` of less noise, None if there is none, and that in words."""

    policy: Policy | None
    text: str


class Replan:
    """The profile and the plan in the folder `run`, and `factors`, by which own ratios were corrected so far.

    `factors`: by the name of the parameter, or part of one.
    """

    def __init__(self, run: str | Path) -> None:
        self.run = Run(Path(run))
        self.factors: dict[str, float] = {}

    @cached_property
    def profile(self) -> Profile:
        """The profile. Raise RunError if there is none."""
        return Profile.load(self.run.require(self.run.profile, "mesa-tune profile"))

    @cached_property
    def plan(self) -> Plan:
        """The plan. Raise RunError if there is none, or if it cannot be solved again."""
        plan = Plan.load(self.run.require(self.run.plan, "mesa-tune search"))
        if not plan.request:
            raise RunError(
                f"{self.run.plan}: does not tell what was asked\nmake it again: `mesa-tune search --force`"
            )
        return plan

    def room(self, samples: int) -> int:
        """Return the bytes that gradients may take in a plain step of `samples` below the plan's peak."""
        predicted = self.plan.predicted
        step = self.profile.timeline.at(samples).under({})
        return predicted.peak_bytes - step.without_gradients

    def solve(self, policy: Policy, sample: Sample, limit: float) -> Replanned:
        """Correct the prices by what was read under `policy`, and solve again within the same limits.

        `limit`: the noise ratio above which the text also names the budget that would help. Raise RunError
        for a model that is not the profiled one, BudgetError if no policy meets the limits.
        """
        self._correct(policy, sample)
        prices = corrected(self.profile, self.factors)
        plan = solved_again(prices, self.plan)
        before, after = [
            predicted.gradient_noise_ratio or 0.0 for predicted in (prices.predict(policy), plan.predicted)
        ]
        budget = format_bytes(plan.budget_bytes or 0)
        helps = after < _LESS * before
        if helps:
            text = f"solved again within {budget}: noise ratio {format_error(after)}"
        else:
            text = f"no plan within {budget} has much less noise"
        text = text if after <= limit else f"{text}; {self._larger_budget(prices, limit)}"
        return Replanned(plan.policy if helps else None, text)

    def _correct(self, policy: Policy, sample: Sample) -> None:
        prices, own = corrected(self.profile, self.factors), sample.own
        noise, read = prices.own_noise, sample.noise_ratio()
        ratio = prices.predict(policy).gradient_noise_ratio
        summed = prices.own_ratios(policy)
        if noise is None or own is None or read is None or not ratio or not noise.shares @ summed > 0:
            raise RunError("the profile predicts no noise of this policy\nprofile the model that is trained")
        predicted = ratio / (noise.shares @ summed) * summed
        named = dict(zip([one.name for one in own.parameters], own.own(sample.errors.mean(0)), strict=True))
        others = predicted * read.value / ratio  # of parameters that are not those of the profile
        measured = [named.get(one.name, other) for one, other in zip(noise.parameters, others, strict=True)]
        factors = read_over_predicted(noise, predicted, np.array(measured)).tolist()
        for one, factor in zip(noise.parameters, factors, strict=True):
            self.factors[one.name] = factor * self.factors.get(one.name, 1.0)

    def _larger_budget(self, prices: Profile, limit: float) -> str:
        """Return which budget would do, in words."""
        needed = least_budget(prices, self.plan, limit)
        if needed is None:
            return "no budget would do within the other limits"
        return f"a budget of {format_bytes(needed)} would do"
