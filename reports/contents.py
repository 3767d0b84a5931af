"""What a report is made of: the frames and figures that the results at hand allow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mesa_tune.profiler.profile import Prediction, Profile
from mesa_tune.reports import figures, frames

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from mesa_tune.policy.settings import LayerSettings
    from mesa_tune.profiler.verification import Verification
    from mesa_tune.search.plan import Plan

CAPTIONS = {
    "memory_through_step": "Bytes alive at every moment of one training step. The highest point is the peak, "
    "which is what has to fit. Computed from the profile.",
    "memory_by_layer": "Tensors kept from the forward until the backward, by the layer that owns them; "
    "in the order in which layers run, with the numbers of the layer table.",
    "bits_along_depth": "How each layer stores what it keeps; exact ones keep PyTorch's own tensor. Numbers "
    "are those of the layer table.",
    "pareto": "Each point is a policy: what it costs in gradient error against the peak that it needs. "
    "Solved points are the best for their budget; uniform ones store every layer alike. All are predicted "
    "from the profile, except a point that says measured.",
    "predicted_beside_measured": "What the profile predicted for the chosen policy beside real steps.",
}

# Of the error, on a logarithmic axis: far less than the width of a line.
FRONT_GAP = 0.01


@dataclass(frozen=True)
class Results:
    """What the commands left in a run: a profile, and, once made, a plan and a verification."""

    profile: Profile
    plan: Plan | None = None
    verification: Verification | None = None

    @property
    def batch_size(self) -> int:
        """The batch size that the report speaks of: the plan's, else the profile's."""
        return self.plan.batch_size if self.plan else self.profile.batch_size

    @property
    def budget(self) -> int | None:
        """The plan's budget in bytes."""
        return self.plan.budget_bytes if self.plan else None

    @cached_property
    def assignment(self) -> dict[str, LayerSettings] | None:
        """Settings by layer name, as the plan's policy gives them."""
        return self.profile.assignment(self.plan.policy) if self.plan else None

    @cached_property
    def plain(self) -> Prediction:
        """The plain step at the report's batch size."""
        return self.profile.predict_assignment({}, batch_size=self.batch_size)

    @property
    def missing(self) -> list[str]:
        """What the report lacks, and the command that makes it."""
        lacks = []
        if self.profile.partial:
            lacks.append("The profile is partial: the same `mesa-tune profile` again completes it.")
        if self.plan is None:
            lacks.append("No policy yet: `mesa-tune search --budget 40%` finds one.")
        elif self.verification is None:
            lacks.append("Nothing measured under the policy yet: `mesa-tune verify` runs real steps.")
        return lacks


def make_frames(results: Results) -> dict[str, pd.DataFrame]:
    """The report's tables by name, in its order; those of parts that are missing are left out."""
    profile, chosen, batch_size = results.profile, results.assignment, results.batch_size
    made = {
        "memory_through_step": frames.timeline_frame(profile, chosen, batch_size),
        "memory_by_layer": frames.layers_frame(profile, chosen, batch_size),
    }
    if chosen is not None:
        made["bits_along_depth"] = frames.bits_frame(profile, chosen)
    if _errors_known(profile):
        made["pareto"] = _pareto(results)
    if results.plan is not None and results.verification is not None:
        made["predicted_beside_measured"] = frames.comparison_frame(
            _on_one_clock(results.plan.predicted, results), results.verification
        )
    return made


def make_figures(results: Results, tables: dict[str, pd.DataFrame]) -> dict[str, Figure]:
    """A figure for each of `tables`, by the same name."""
    chosen = results.assignment or {}
    draw: dict[str, Callable[[pd.DataFrame], Figure]] = {
        "memory_through_step": lambda frame: figures.memory_through_step(frame, results.budget),
        "memory_by_layer": figures.memory_by_layer,
        "bits_along_depth": lambda frame: figures.bits_along_depth(
            frame, frames.mean_bits(results.profile, chosen)
        ),
        "pareto": lambda frame: figures.pareto_front(frame, results.plain.peak_bytes, results.budget),
        "predicted_beside_measured": figures.predicted_beside_measured,
    }
    return {name: draw[name](frame) for name, frame in tables.items()}


def _on_one_clock(predicted: Prediction, results: Results) -> dict[str, Any]:
    """The prediction as `verify` prints it: its time is a ratio to the plain step measured beside."""
    assert results.verification is not None
    found = replace(results.verification, predicted=predicted)
    beside = found.predicted_beside(results.profile.plain_ms(results.batch_size))
    return beside.to_dict() if beside else {}


def _errors_known(profile: Profile) -> bool:
    """Whether there are gradient errors to draw: not in a profile of bytes only, nor in half a profile."""
    if profile.partial:
        return False
    return any(option.gradient_error for layer in profile.layers for option in layer.options)


def _pareto(results: Results) -> pd.DataFrame:
    from mesa_tune.search.solver import GAP, Program
    from mesa_tune.search.space import Limits, make_space

    profile, size = results.profile, results.batch_size
    program = Program(make_space(profile, size))

    def solve(budget: int) -> Prediction | None:
        found = program.solve(Limits(peak=budget), gap=GAP if budget == results.budget else FRONT_GAP)
        if found is None:
            return None
        return profile.predict_assignment(program.space.assignment(found.chosen), batch_size=size)

    smallest = program.smallest_peak(Limits())
    least = int(smallest.cost) if smallest else results.plain.peak_bytes
    budgets = frames.budgets_between(least, results.plain.peak_bytes)
    chosen = results.budget
    if chosen is not None and least <= chosen < results.plain.peak_bytes:
        # So that the chosen policy has the front beside it, not a line between other budgets' points.
        nearest = min(budgets[1:], key=lambda budget: abs(budget - chosen))
        budgets[budgets.index(nearest)] = chosen
    return frames.pareto_frame(solve, budgets, frames.uniform_predictions(profile, size), _marked(results))


def _marked(results: Results) -> dict[str, Prediction]:
    marked = {}
    if results.plan is not None:
        marked["chosen"] = results.plan.predicted
    if results.verification is not None and results.verification.policy.peak_bytes is not None:
        found = results.verification
        marked["measured"] = Prediction(
            found.policy.saved_bytes or 0,
            found.policy.peak_bytes or 0,
            found.gradient_error,
            found.policy.step_ms,
        )
    return marked
