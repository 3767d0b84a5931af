"""`Profile`: what a training step saves, what each option to store it costs, and what a policy would do.

What is hard: the prediction runs no model. Bytes are exact arithmetic over the timeline. The noise ratios of
layers add up batch by batch (gradient errors do within a few per cent down to 3 bits); tied layers multiply
their sum by a measured ratio, and layers at 1 and 2 bits add what `interaction_of` says. Where layers derive,
the ratio counts for what is stored, with everything that derives from it. Settings that were not measured
take the nearest option's, scaled with 1 / (level − 1)². The gradient error is in proportion to the ratio.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mesa_tune.errors import RunError
from mesa_tune.files import read_document, schema, typed, write_document
from mesa_tune.policy import Policy
from mesa_tune.policy.matching import TaggedLayers
from mesa_tune.policy.settings import EXACT, LayerSettings
from mesa_tune.profiles import own_noise as noise
from mesa_tune.profiles.entries import Derivation, ExactEntry, LayerEntry, Option, TensorEntry, Tie
from mesa_tune.profiles.intervals import error_at, expected, scaled
from mesa_tune.profiles.other_entries import ModuleEntry, OtherStep
from mesa_tune.profiles.own_noise import NO_NOISE, AtCheckpoint, OwnNoise, ParameterNoise
from mesa_tune.profiles.prediction import Prediction
from mesa_tune.profiles.price_table import ActiveDerivations, Cost, DerivationTable, Floats, PriceTable
from mesa_tune.profiles.tiled_step import TiledStep, other_slices, without_slices
from mesa_tune.profiles.timeline.distinct import Assignment
from mesa_tune.profiles.timeline.memory_model import Timeline

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Derivation", "LayerEntry", "ModuleEntry", "Option", "Prediction", "Profile", "Tie"]

_REMEDY = "make it again with `mesa-tune profile model.py --force`"


@dataclass(frozen=True)
class Profile:
    """A profiled training step: where its bytes are, and what each option to store them costs.

    `model`: path of the model file, None for a workload made in Python; `fingerprint`: SHA-256
    of it and its local modules; `layers_fingerprint`: of module names and classes. `partial`: interrupted;
    layers without options are not measured yet, `resume` identifies the request, and the next batches infer
    from `amplifications`. `derivations`: prices of what is stored while other layers derive from it
    (`store: derive`). `modules`: prices of modules that can run again in backward. `exact`: what every policy
    leaves exact, and why; a layer that saves nothing else has index -1, and no policy names it. For the plain
    step at `batch_size`: `peak_bytes`, `saved_bytes` (alive when the forward ends), `static_bytes` (alive
    before the step). `tiled`: the step in which losses have slices; None if none can, or none was traced.
    `gradient_noise`: of all `parameters` together, see `Noise`; None: not measured. `checkpoints`: noise, and
    the error of uniform 4 bits, with the weights of each. `error_floor`: the noise ratio if all formulas run
    and nothing is compressed; no prediction above zero goes below. `interaction`: see `interaction_of`.
    `step_ms`: time of the plain step, on the CPU the processor time of its thread; None where no step has run
    (bytes only), and then no layer has options. `routing_ms`: time that converting the model adds to it, with
    every layer exact; None: unknown. `overlap_ms`: see `PriceTable`. `time_spread`: see `spread_of`.
    `random_state`: see `Workload`. `others`: steps with layers that the traced one skips. `script`: the
    command of whose step the bytes are, for no policy.
    """

    model: str | None
    fingerprint: str | None
    layers_fingerprint: str
    device: str
    autocast: str | None
    batch_size: int
    seed: int
    torch: str
    partial: bool
    static_bytes: int
    saved_bytes: int
    peak_bytes: int
    step_ms: float | None
    tensors: tuple[TensorEntry, ...]
    layers: tuple[LayerEntry, ...]
    timeline: Timeline
    ties: tuple[Tie, ...] = ()
    notes: tuple[str, ...] = ()
    resume: str = ""
    derivations: tuple[Derivation, ...] = ()
    exact: tuple[ExactEntry, ...] = ()
    gradient_noise: float | None = None
    routing_ms: float | None = None
    script: str | None = None
    error_floor: float = 0.0
    interaction: tuple[tuple[int, float], ...] = ()
    checkpoints: tuple[AtCheckpoint, ...] = ()
    parameters: tuple[ParameterNoise, ...] = ()
    amplifications: noise.Rows = ()
    modules: tuple[ModuleEntry, ...] = ()
    tiled: TiledStep | None = None
    overlap_ms: float = 0.0
    time_spread: float = 0.0
    random_state: int = 0
    others: tuple[OtherStep, ...] = ()

    def predict(self, policy: Policy, *, batch_size: int | None = None) -> Prediction:
        """Return saved and peak bytes, gradient error and step time under `policy`; no model runs.

        At a batch size that was not profiled, bytes follow the timeline, times are proportional, and the
        gradient error and its ratio to the noise are those of the profiled batch. Both are for the model as
        given, not for a checkpoint. Raise BudgetError if the timeline has no such batch size, RunError where
        the profile has no data: for other slices of losses than those of `tiled`, for modules that run again
        and are not in `timeline.modules`; of a script, for any that compresses.
        """
        assignment = self.assignment(policy)
        why = self.unpredictable(policy, assignment)
        if why is not None:
            raise RunError(f"{why}\nmeasure it with `mesa-tune verify` or mt.verify")
        return self.predict_assignment(assignment, batch_size=batch_size)

    def unpredictable(self, policy: Policy, assignment: Assignment | None = None) -> str | None:
        """Return for which setting of `policy` the profile has no data; None if it can predict it."""
        assignment = self.assignment(policy) if assignment is None else assignment
        known = self.in_slices if any(one.tile > 1 for one in assignment.values()) else self
        traced = (layer.name for layer in self.layers if layer.name not in self.skipped)
        again = set(policy.reruns(traced)).difference(known.timeline.modules)
        if again:
            names = ", ".join(map(repr, sorted(again)))
            return f"{names}: the profile does not tell what these modules save if they run again in backward"
        return other_slices(self.tiled, assignment)

    @cached_property
    def skipped(self) -> frozenset[str]:
        """The layers that the traced step skips and `others` run."""
        return frozenset(name for step in self.others for name in step.layers)

    @property
    def parts(self) -> Mapping[str, int]:
        """The modules that can run in slices, and in how many."""
        return {} if self.tiled is None else self.tiled.parts

    @cached_property
    def in_slices(self) -> Profile:
        """The same profile of the step with slices of losses and modules; without such a step, this one."""
        tiled = self.tiled
        if tiled is None:
            return self
        routing, layers = tiled.routing_ms(self.routing_ms), tiled.layers(self.layers)
        sliced = replace(self, timeline=tiled.timeline, layers=layers, routing_ms=routing, tiled=None)
        return replace(sliced, modules=tiled.modules) if tiled.parts else sliced

    def predict_assignment(self, assignment: Assignment, *, batch_size: int | None = None) -> Prediction:
        """Return what `predict` does, for settings by layer name; a layer without settings stores exactly."""
        distinct = {id(settings): settings for settings in assignment.values()}.values()
        if self.tiled is not None and any(settings.tile > 1 for settings in distinct):
            return self.in_slices.predict_assignment(without_slices(assignment), batch_size=batch_size)
        if any(not settings.exact for settings in distinct):
            self.require_prices()
        if self.device == "cpu" and any(settings.store == "offload" for settings in distinct):
            there = {name for name, settings in assignment.items() if settings.store == "offload"}
            assignment = {**assignment, **dict.fromkeys(there, EXACT)}  # it has nowhere to offload to
        sized = self.timeline.at(batch_size or self.batch_size)
        runs_again = any(settings.store == "recompute" for settings in distinct)
        step = (sized if runs_again else sized.without_reruns).under(assignment)
        active = self._derivations.active(step) if sized is self.timeline.at() else self.active(assignment)
        cost = self.cost_of(None, assignment, active)
        for name in step.reruns:
            cost = cost.plus(self.rerun_cost(name, assignment[name]))
        ratio, ends = self._expected(cost)
        known = self.own_noise is not None and self.own_noise.is_known
        worst = None
        if self.own_noise is not None and known:
            worst = self.own_noise.largest(self._own_ratios(assignment, active, step.reruns))
        return Prediction(
            step.saved_bytes,
            step.peak_bytes,
            error_at(ratio, cost.error, cost.ratio),
            self._scaled_ms(cost.ms, sized.batch_size),
            ratio if known else None,
            step.peak,
            scaled(ends, cost.error, cost.ratio),
            self.timeline.libraries if self.device == "cpu" else None,
            ends if known else None,
            *(worst or (None, None)),
        )

    def require_prices(self) -> None:
        """Raise RunError if only the plain step of a script was observed."""
        if self.script is not None:
            raise RunError(
                f"the profile of `{self.script}` has the bytes of the plain step, and no prices of policies\n"
                "put its step into a model.py (`mesa-tune init`), and profile that"
            )

    def assignment(self, policy: Policy) -> dict[str, LayerSettings]:
        """Return the settings that `policy` gives each layer, and each module that runs again, by name."""
        chosen = policy.assignment(self._tagged)
        for name in (*self.timeline.modules, *self.parts) if policy.module_rules() else ():
            settings = policy.recomputed(name)
            if settings is not None:
                chosen[name] = settings
        return chosen

    def noise_ratio(self, assignment: Assignment) -> float | None:
        """Return the noise ratio under `assignment`, also beside ‖g‖² where all batches are equal.

        None if that of one layer is unknown.
        """
        return self._expected(self.cost_of(None, assignment, self.active(assignment)))[0]

    def cost_of(
        self, layers: Iterable[LayerEntry] | None, assignment: Assignment, active: ActiveDerivations
    ) -> Cost:
        """Return what `layers` (None: all) cost under `assignment`; `active`: derivations under it."""
        return self._prices.cost(layers, assignment, active)

    def rerun_cost(self, module: str, settings: LayerSettings) -> Cost:
        """Return what a module costs that runs again: the rounding of its inputs, and its second run."""
        costs = (entry.cost(settings) for entry in self.modules if entry.name == module)
        return next(costs, Cost(None, None, 0.0, None))

    def _expected(self, cost: Cost) -> tuple[float | None, tuple[float, float] | None]:
        """Return the noise ratio and its interval, None where unknown."""
        if cost.ratios is None:
            return None, None
        return expected(cost.ratios, cost.interaction, self.error_floor)

    def own_ratios(self, policy: Policy) -> Floats:
        """Return the own noise ratio of each of `parameters` under `policy`, by sums of single layers."""
        assignment = self.assignment(policy)
        known = self.in_slices if any(one.tile > 1 for one in assignment.values()) else self
        step = known.timeline.at().under(plain := without_slices(assignment))
        return known._own_ratios(plain, known._derivations.active(step), step.reruns)

    def _own_ratios(self, assignment: Assignment, active: ActiveDerivations, reruns: set[str]) -> Floats:
        ratios = self._prices.by_layer(assignment, active).tolist()
        rows = [(layer.shares, ratio) for layer, ratio in zip(self.layers, ratios, strict=True)]
        again = (entry for entry in self.modules if entry.name in reruns)
        rows += [(entry.shares, entry.cost(assignment[entry.name]).ratio or 0.0) for entry in again]
        return noise.summed(rows, len(self.parameters))

    def _scaled_ms(self, added_ms: float | None, batch_size: int) -> float | None:
        if added_ms is None or self.exact_ms is None:
            return None
        ms = (self.exact_ms + added_ms) * batch_size / self.batch_size
        return ms if ms > 0 else None  # beside other work, differences of times may exceed steps

    def active(self, assignment: Assignment) -> ActiveDerivations:
        """Return the derivations that happen under `assignment`."""
        return self._derivations.active(self.timeline.at().under(assignment))

    def layer_error(self, layer: LayerEntry, settings: LayerSettings) -> float | None:
        """Return the gradient error of one layer alone; None if no option of this kind was measured."""
        return 0.0 if settings.exact else self._prices.error(layer.name, settings)

    def mean_ratio(self, settings: LayerSettings) -> float:
        """Return the mean noise ratio of all layers that err, if all have `settings`; 0 if none does."""
        return self._prices.mean_ratio(settings)

    @property
    def exact_ms(self) -> float | None:
        """Time of a step of the converted model with every layer exact; None if unknown."""
        if self.routing_ms is None or self.step_ms is None:
            return None
        return self.step_ms + self.routing_ms

    def plain_ms(self, batch_size: int) -> float:
        """Return the time of a plain step at `batch_size`, in proportion to the profiled one.

        Raise RunError if no step has run (bytes only).
        """
        if self.step_ms is None:
            raise RunError(
                "the profile has bytes only and no prices: run `mesa-tune profile` without --bytes-only"
            )
        return self.step_ms * batch_size / self.batch_size

    def layer(self, name: str) -> LayerEntry:
        """Return the layer of this name. Raise KeyError if there is none."""
        return self._by_name[name]

    def frame(self) -> pd.DataFrame:
        """Return a table with one row for each layer and option."""
        import pandas as pd

        return pd.DataFrame([row for layer in self.layers for row in layer.rows()])

    def _repr_html_(self) -> str:
        from mesa_tune.profiles.shown import profile_html

        return profile_html(vars(self))

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document `mesa-tune.profile/3`."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            "schema": schema("profile"),
            **values,
            "tensors": [dict(vars(tensor)) for tensor in self.tensors],
            "layers": [layer.to_dict() for layer in self.layers],
            "timeline": self.timeline.to_dict(),
            "ties": [dict(vars(tie)) for tie in self.ties],
            "derivations": [derivation.to_dict() for derivation in self.derivations],
            "modules": [module.to_dict() for module in self.modules],
            "tiled": None if self.tiled is None else self.tiled.to_dict(),
            "exact": [dict(vars(entry)) for entry in self.exact],
            "checkpoints": [asdict(entry) for entry in self.checkpoints],
            "parameters": [dict(vars(entry)) for entry in self.parameters],
            "others": [asdict(step) for step in self.others],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Profile:
        """Return the profile with this `to_dict`.

        Raise KeyError, TypeError, ValueError, IndexError or an arithmetic error for other values.
        """
        plain = {key: value for key, value in values.items() if key != "schema"}
        parts = {
            "tensors": tuple(TensorEntry.from_dict(tensor) for tensor in values["tensors"]),
            "layers": tuple(LayerEntry.from_dict(layer) for layer in values["layers"]),
            "timeline": Timeline.from_dict(values["timeline"]),
            "ties": tuple(Tie.from_dict(tie) for tie in values["ties"]),
            "notes": tuple(values["notes"]),
            "derivations": tuple(Derivation.from_dict(entry) for entry in values.get("derivations", ())),
            "modules": tuple(ModuleEntry.from_dict(entry) for entry in values.get("modules", ())),
            "tiled": TiledStep.from_dict(values["tiled"]) if values.get("tiled") else None,
            "exact": tuple(ExactEntry.from_dict(entry) for entry in values.get("exact", ())),
            "interaction": tuple((int(bits), float(part)) for bits, part in values.get("interaction", ())),
            "parameters": tuple(ParameterNoise.from_dict(entry) for entry in values["parameters"]),
            "amplifications": noise.rows_from(values.get("amplifications", ())),
            "checkpoints": tuple(typed(AtCheckpoint, entry) for entry in values.get("checkpoints", ())),
            "others": tuple(OtherStep.from_dict(step) for step in values.get("others", ())),
        }
        profile = typed(cls, {**plain, **parts})
        if profile.batch_size < 1 or (profile.step_ms is not None and profile.step_ms <= 0):
            raise ValueError(
                f"batch_size is {profile.batch_size}, step_ms is {profile.step_ms}: must be above zero"
            )
        # Parts that contradict each other raise here, where the error names the file, and not in a search.
        profile.predict_assignment(
            {layer.name: layer.options[0].settings for layer in profile.layers if layer.options}
        )
        return profile

    def save(self, path: str | Path) -> None:
        """Write the document to `path`, whole or not at all. Raise RunError if it cannot be written."""
        write_document(path, self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Return the profile saved at `path`. Raise RunError for a missing, damaged or other file."""
        return read_document(path, "profile", cls.from_dict, _REMEDY)

    @cached_property
    def groups(self) -> list[tuple[str, ...]]:
        """The layers in groups that get the same settings: ties, and layers alone."""
        tied = {name: tie.layers for tie in self.ties for name in tie.layers}
        return list(dict.fromkeys(tied.get(layer.name, (layer.name,)) for layer in self.layers))

    @cached_property
    def own_noise(self) -> OwnNoise | None:
        """The parameters' own noise at the profiled batch size; None where it was not measured."""
        if self.gradient_noise is None:
            return None
        return OwnNoise(self.parameters, is_known=self.gradient_noise >= NO_NOISE)

    @cached_property
    def _tagged(self) -> TaggedLayers:
        return TaggedLayers.of([(layer.tag, layer.index, layer.name) for layer in self.layers])

    @cached_property
    def _by_name(self) -> dict[str, LayerEntry]:
        return {layer.name: layer for layer in self.layers}

    @cached_property
    def _prices(self) -> PriceTable:
        # In a profile with errors, a layer without another option can only be stored exactly.
        options = ((layer.name, layer.options) for layer in self.layers)
        only_exact = (name for name, own in options if own and all(one.settings.exact for one in own))
        return PriceTable(
            self.layers,
            self.ties,
            self.derivations,
            hooked=self._with_skipped(self.timeline.hooked),
            samplers=self._with_skipped(self.timeline.samplers),
            valued=self._with_skipped(self.timeline.valued),
            skipped=self.skipped,
            exact=frozenset(only_exact if self._has_errors else ()),
            interaction=dict(self.interaction),
            overlap_ms=self.overlap_ms,
        )

    def _with_skipped(self, names: Collection[str]) -> set[str]:
        """Return `names`, of traced layers, with the skipped ones that are stored like one of them."""
        return {*names, *(layer.name for layer in self.layers if layer.stored_like in names)}

    @cached_property
    def _derivations(self) -> DerivationTable:
        return DerivationTable(self.derivations, self.timeline.at().names)

    @cached_property
    def _has_errors(self) -> bool:
        options = (option for layer in self.layers for option in layer.options)
        return any(not option.settings.exact and bool(option.ratios) for option in options)
