"""Contents of a report: the frames and figures that a run's results allow.

What is hard: a run may have only a profile, or a partial one, and everything must then still be drawn that
can be. The chosen policy must lie on the front of solved policies, so its own budget is one of those solved.
"""

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
    "memory_by_layer": "Tensors saved from the forward until the backward, by the layer that owns them, "
    "in the order in which layers run; numbers as in the layer table.",
    "bits_along_depth": "How each layer stores what it saves; exact layers save PyTorch's own tensor. "
    "Numbers as in the layer table.",
    "pareto": "Each point is a policy: step time and gradient error against the peak of its training step. "
    "The lines join the policies of least time within the noise ratio and of least error, budget by budget. "
    "Uniform policies store every layer alike. All points are predicted from the profile, except the one "
    "labelled measured.",
    "predicted_beside_measured": "What the profile predicted for the chosen policy beside real steps.",
}

BUDGETS = 10
"""How many budgets are solved for each objective."""


@dataclass(frozen=True)
class RunResults:
    """Results of a run: a profile, and a plan and a verification if they exist."""

    profile: Profile
    plan: Plan | None = None
    verification: Verification | None = None

    @property
    def batch_size(self) -> int:
        """Batch size of the report: the plan's, else the profile's."""
        return self.plan.batch_size if self.plan else self.profile.batch_size

    @property
    def budget(self) -> int | None:
        """The plan's budget in bytes."""
        return self.plan.budget_bytes if self.plan else None

    @property
    def objective(self) -> str:
        """What the plan is best in: `time`, `error` or `memory`."""
        return self.plan.objective if self.plan else "error"

    @cached_property
    def assignment(self) -> dict[str, LayerSettings] | None:
        """Settings by layer name under the plan's policy."""
        return self.profile.assignment(self.plan.policy) if self.plan else None

    @cached_property
    def plain(self) -> Prediction:
        """Prediction of the plain step at the report's batch size."""
        return self.profile.predict_assignment({}, batch_size=self.batch_size)

    @property
    def plain_ms(self) -> float | None:
        """The profile's time of a plain step at the report's batch size; None if unknown."""
        return None if self.profile.step_ms is None else self.profile.plain_ms(self.batch_size)

    @property
    def missing(self) -> list[str]:
        """Sentences on what the report lacks, with the command that creates it."""
        sentences = []
        if self.profile.partial:
            sentences.append("The profile is partial: the same `mesa-tune profile` again completes it.")
        if self.plan is None:
            sentences.append("No policy yet: `mesa-tune search --budget 40%` finds one.")
        elif self.verification is None:
            sentences.append("Nothing measured under the policy yet: `mesa-tune verify` runs real steps.")
        return sentences


def make_frames(results: RunResults) -> dict[str, pd.DataFrame]:
    """Return the report's tables by name, in the order of the page; tables without data are left out."""
    profile, chosen, batch_size = results.profile, results.assignment, results.batch_size
    tables = {
        "memory_through_step": frames.timeline_frame(profile, chosen, batch_size),
        "memory_by_layer": frames.layers_frame(profile, chosen, batch_size),
    }
    if chosen is not None:
        tables["bits_along_depth"] = frames.bits_frame(profile, chosen)
    if _has_errors(profile):
        tables["pareto"] = _pareto(results)
    if results.plan is not None and results.verification is not None:
        tables["predicted_beside_measured"] = frames.comparison_frame(
            _on_measured_clock(results.plan.predicted, results), results.verification
        )
    return tables


def make_figures(results: RunResults, tables: dict[str, pd.DataFrame]) -> dict[str, Figure]:
    """Draw one figure per table, with the same name."""
    chosen = results.assignment or {}
    draw: dict[str, Callable[[pd.DataFrame], Figure]] = {
        "memory_through_step": lambda frame: figures.memory_through_step(frame, results.budget),
        "memory_by_layer": figures.memory_by_layer,
        "bits_along_depth": lambda frame: figures.bits_along_depth(
            frame, frames.mean_bits(results.profile, chosen)
        ),
        "pareto": lambda frame: figures.pareto_front(frame, results.budget, results.objective),
        "predicted_beside_measured": figures.predicted_beside_measured,
    }
    return {name: draw[name](frame) for name, frame in tables.items()}


def _on_measured_clock(predicted: Prediction, results: RunResults) -> dict[str, Any]:
    """Return the prediction as `verify` prints it: its time is scaled by the measured plain step."""
    assert results.verification is not None
    verification = replace(results.verification, predicted=predicted)
    scaled = verification.predicted_beside(results.plain_ms)
    return scaled.to_dict() if scaled else {}


def _has_errors(profile: Profile) -> bool:
    """Return whether there are gradient errors to draw: not in a partial profile, nor in bytes only."""
    if profile.partial:
        return False
    return any(option.gradient_error for layer in profile.layers for option in layer.options)


def _pareto(results: RunResults) -> pd.DataFrame:
    from mesa_tune.search.frontier import pareto
    from mesa_tune.search.objectives import MAX_NOISE_RATIO

    asked = results.plan.max_noise_ratio if results.plan else None
    return pareto(
        results.profile,
        batch_size=results.batch_size,
        budgets=BUDGETS,
        through=results.budget,
        max_noise_ratio=MAX_NOISE_RATIO if asked is None else asked,
        marked=_marked(results),
    )


def _marked(results: RunResults) -> dict[str, Prediction]:
    marked = {}
    if results.plan is not None:
        marked["chosen"] = results.plan.predicted
    if results.verification is not None and results.verification.policy.peak_bytes is not None:
        verification, ms = results.verification, results.plain_ms
        ratio = verification.step_ratio
        marked["measured"] = Prediction(
            verification.policy.saved_bytes or 0,
            verification.policy.peak_bytes or 0,
            verification.gradient_error,
            None if ms is None or ratio is None else ms * ratio.median,
        )
    return marked
