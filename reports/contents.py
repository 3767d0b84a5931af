"""Contents of a report: the frames and figures that a run's results allow.

What is hard: a run may have only a profile, or a partial one, and everything must then still be drawn that
can be. The chosen policy must lie on the front of solved policies, so its own budget is one of those solved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mesa_tune.profiles.profile import Prediction, Profile
from mesa_tune.reports import figures, frames, tree

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from mesa_tune.policy.settings import LayerSettings
    from mesa_tune.profiles.verification import Verification
    from mesa_tune.runs.provenance import Made
    from mesa_tune.search.plan import Plan

CAPTIONS = {
    "memory_through_step": "Bytes alive at every moment of one training step. The highest point is the peak, "
    "which is what has to fit. Computed from the profile.",
    "memory_by_layer": "Tensors saved from the forward until the backward, by the layer that owns them, "
    "in the order in which layers run; numbers as in the layer table.",
    "memory_by_tag": "The same bytes by kind of layer.",
    "memory_by_module": "The same bytes by module: each box lies below that of the module around it. Modules "
    "that follow each other and save alike are one box.",
    "storage_along_depth": "How each layer stores what it saves. exact: PyTorch’s own tensor. "
    "derive: nothing; "
    "backward computes it from what another layer saves. recompute: nothing; its module runs again in "
    "backward. tile: a loss that goes backward in slices. offload: in host memory. Numbers as in the table "
    "of layers.",
    "pareto": "Each point is a policy: step time and gradient error against the peak of its training step. "
    "The lines join the policies of least time within the noise ratio and of least error, budget by budget. "
    "Uniform policies store every layer alike. All points are predicted from the profile, except the one "
    "labelled measured.",
    "study_progress": "After the exact solution, a study measured similar plans with all layers compressed "
    "together. A trial above a limit, or clearly worse than the best, ends early.",
    "predicted_beside_measured": "What the profile predicted for the chosen policy beside real steps. Lines "
    "are intervals: of the predicted error, 92 %; of the measured error, two standard errors from batch to "
    "batch; of the measured time, the middle half of the pairs of steps.",
}

BUDGETS = 10
"""How many budgets are solved for each objective."""


@dataclass(frozen=True)
class RunResults:
    """Results of a run: a profile, and a plan and a verification if they exist.

    `made`: how the files of the run were made, by their names.
    """

    profile: Profile
    plan: Plan | None = None
    verification: Verification | None = None
    made: Mapping[str, Made] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Name of the model file, or the command of the script."""
        path = self.profile.model or ""
        return self.profile.script or path.replace("\\", "/").rsplit("/", 1)[-1] or "Model"

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
            sentences.append(f"No policy yet: {self._search}.")
        elif self.verification is None:
            how = "" if self.profile.model is None else ": `mesa-tune verify` runs real steps"
            sentences.append(f"Nothing measured under the policy yet{how}.")
        return sentences

    @property
    def _search(self) -> str:
        """What leads to a policy, and with which command."""
        if self.profile.script is not None:
            return "a search needs a model file, and `mesa-tune init --from` records one of the script’s step"
        if self.profile.step_ms is None:
            return "a search needs errors, which `mesa-tune profile` without --bytes-only measures"
        return "`mesa-tune search --budget 40%` finds one"


def make_frames(results: RunResults) -> dict[str, pd.DataFrame]:
    """Return the report's tables by name, in the order of the page; tables without data are left out.

    `alive` and `layers` are tables of the page; every other one is the data of the figure of its name.
    """
    profile, chosen, batch_size = results.profile, results.assignment, results.batch_size
    layers = frames.layers_frame(profile, chosen, batch_size)
    drawn = [name for name in ("name", "tag", "before", "after") if name in layers]
    predicted = results.plan.predicted if results.plan else None
    tables = {
        "memory_through_step": frames.timeline_frame(profile, chosen, batch_size),
        "alive": frames.alive_frame(results.plain, predicted),
        "memory_by_layer": layers[drawn],
        "memory_by_tag": frames.tags_frame(layers),
        "memory_by_module": tree.boxes(tree.module_tree(layers, results.title)),
    }
    if chosen is not None:
        tables["storage_along_depth"] = frames.storage_frame(layers)
    if _has_errors(profile):
        tables["pareto"] = _pareto(results)
    if results.plan is not None and results.plan.history:
        tables["study_progress"] = frames.study_frame(results.plan)
    if results.plan is not None and results.verification is not None:
        tables["predicted_beside_measured"] = frames.comparison_frame(
            _on_measured_clock(results.plan.predicted, results), results.verification
        )
    return {**tables, "layers": layers}


def make_figures(results: RunResults, tables: Mapping[str, pd.DataFrame]) -> dict[str, Figure]:
    """Draw the figures of `tables`, each with the name of its data."""
    chosen, plan = results.assignment or {}, results.plan
    draw: dict[str, Callable[[pd.DataFrame], Figure]] = {
        "memory_through_step": lambda frame: figures.memory_through_step(frame, results.budget),
        "memory_by_layer": figures.memory_by_layer,
        "memory_by_tag": figures.memory_by_tag,
        "memory_by_module": figures.memory_by_module,
        "storage_along_depth": lambda frame: figures.storage_along_depth(
            frame, frames.mean_bits(results.profile, chosen)
        ),
        "pareto": lambda frame: figures.pareto_front(frame, results.budget, results.objective),
        "study_progress": lambda frame: figures.study_progress(
            frame, results.objective, won=plan is not None and plan.is_from_study
        ),
        "predicted_beside_measured": figures.predicted_beside_measured,
    }
    return {name: draw[name](frame) for name, frame in tables.items() if name in draw}


def _on_measured_clock(predicted: Prediction, results: RunResults) -> Prediction | None:
    """Return the prediction as `verify` prints it: its time is scaled by the measured plain step."""
    assert results.verification is not None
    verification = replace(results.verification, predicted=predicted)
    return verification.predicted_beside(results.plain_ms)


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
        **_frontier(results.plan),
    )


def _frontier(plan: Plan | None) -> dict[str, Any]:
    """Return the plan's own frontier as arguments of `pareto`; nothing where it has none."""
    if plan is None or not plan.frontier:
        return {}
    return {"objectives": [plan.frontier_objective], "known": plan.frontier}


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
