"""`Profile`: what a training step keeps, and what each way of storing it costs; and what a policy would do.

Predictions need no model. Bytes are exact arithmetic over the timeline. Gradient errors of layers add up
(measured: within a few per cent down to 3 bits), those of tied layers after a measured ratio, and where
layers derive, those of what is stored, with all that derives from it. Settings that were not tried take the
nearest option's error, scaled with 1 / (level − 1)².
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mesa_tune.errors import RunError
from mesa_tune.files import read_document, schema, typed, write_document
from mesa_tune.policy.settings import EXACT, LayerSettings
from mesa_tune.profiler.entries import Derivation, ExactEntry, LayerEntry, Option, TensorEntry, Tie
from mesa_tune.profiler.timeline import Assignment, Kept, Slot, Timeline, stored_as

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "Derivation",
    "ExactEntry",
    "Kept",
    "LayerEntry",
    "Option",
    "Prediction",
    "Profile",
    "Slot",
    "TensorEntry",
    "Tie",
    "Timeline",
]

_REMEDY = "make it again with `mesa-tune profile model.py --force`"


class SettingsSource(Protocol):
    """What gives each layer its settings: a Policy."""

    def settings(self, tag: str, index: int | None, name: str) -> LayerSettings:
        """The settings of one layer."""
        ...

    def reruns(self, layers: Iterable[str]) -> list[str]:
        """The modules around `layers` that keep their inputs alone and run again in backward."""
        ...


@dataclass(frozen=True)
class Prediction:
    """A training step under a policy, as predicted. None: not known."""

    saved_bytes: int
    peak_bytes: int
    gradient_error: float | None
    step_ms: float | None
    gradient_noise_ratio: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return dict(vars(self))

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Prediction:
        """The prediction that `to_dict` made `values` of."""
        return typed(Prediction, values)


@dataclass(frozen=True)
class Profile:
    """A profiled training step: where its bytes are, and what each way of storing them costs.

    `model` is the model file's path, None for a workload made in Python; `fingerprint` its content's
    SHA-256; `layers_fingerprint` that of module names and classes. `partial`: interrupted; layers without
    options were not measured yet, and `resume` says for what request. `derivations`: prices of what is stored
    while others make their own tensors again from it (`store: derive`). `exact`: what every policy leaves as
    PyTorch saves it, and why; layers of nothing else have the index -1 and stand in no policy. The budget's
    words: `peak_bytes` of the plain step at `batch_size`, `saved_bytes` alive when its forward ends,
    `static_bytes` there before it begins.
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
    step_ms: float
    tensors: tuple[TensorEntry, ...]
    layers: tuple[LayerEntry, ...]
    timeline: Timeline
    ties: tuple[Tie, ...] = ()
    notes: tuple[str, ...] = ()
    resume: str = ""
    derivations: tuple[Derivation, ...] = ()
    exact: tuple[ExactEntry, ...] = ()

    def predict(self, policy: SettingsSource, *, batch_size: int | None = None) -> Prediction:
        """Saved and peak bytes, gradient error and step time under `policy`, without running the model.

        At a batch size that was not profiled bytes follow the timeline, times grow in proportion, and the
        gradient error is that of the profiled batch. BudgetError where that batch size cannot be planned for;
        RunError for a policy with modules that run again in backward, whose inputs no profile knows.
        """
        again = policy.reruns(layer.name for layer in self.layers)
        if again:
            raise RunError(
                f"`store: recompute` of {', '.join(map(repr, again))}: no profile tells what modules keep "
                "that run again in backward\nmeasure it with `mesa-tune verify` or mt.verify"
            )
        return self.predict_assignment(self.assignment(policy), batch_size=batch_size)

    def predict_assignment(self, assignment: Assignment, *, batch_size: int | None = None) -> Prediction:
        """As `predict`, for settings by layer name; layers that are not named store exactly."""
        assignment = {name: self._possible(settings) for name, settings in assignment.items()}
        sized = self.timeline.at(batch_size or self.batch_size)
        return Prediction(
            sized.saved_bytes(assignment),
            sized.peak_bytes(assignment),
            self.gradient_error(assignment),
            self.predicted_ms(assignment) * sized.batch_size / self.batch_size,
        )

    def _possible(self, settings: LayerSettings) -> LayerSettings:
        """Settings as the profiled device has them: on a CPU there is nowhere to offload to."""
        return EXACT if self.device == "cpu" and settings.store == "offload" else settings

    def assignment(self, policy: SettingsSource) -> dict[str, LayerSettings]:
        """The settings that `policy` gives each layer, by name."""
        return {layer.name: policy.settings(layer.tag, layer.index, layer.name) for layer in self.layers}

    def gradient_error(self, assignment: Assignment) -> float | None:
        """Sum of the layers' gradient errors; None if one of them is not known."""
        return self.error_of(self.layers, assignment, self.active(assignment))

    def error_of(self, layers: Iterable[LayerEntry], assignment: Assignment, active: Active) -> float | None:
        """The part of `layers` in the gradient error; `active` is what `assignment` makes so."""
        total = 0.0
        for layer in layers:
            settings = assignment.get(layer.name)
            if settings is None or settings.exact or layer.name in active.free:
                continue
            derivation = active.by_layer.get(layer.name)
            if derivation is not None:
                error = self._stored_error(derivation, settings)
            else:
                error = self.layer_error(layer, settings)
            if error is None:
                return None
            total += error if derivation is not None else error * self._ratio(layer, assignment)
        return total

    def active(self, assignment: Assignment) -> Active:
        """The derivations that take place under `assignment`."""
        if all(settings.store != "derive" for settings in assignment.values()):
            return NOTHING
        sized = self.timeline.at()
        used = sized.compressed(assignment)
        here = [one for one in self.derivations if _takes_place(one, used)]
        derivers = {name for item in sized.derivable for name in sized.derivers(item, used)}
        takers = {name for one in here for name in one.takers} & derivers
        stored = {name for one in self.derivations for name in one.layers}
        later = {name for one in here for name in one.layers[1:]}
        return Active({one.layers[0]: one for one in here}, frozenset(later | (takers - stored)))

    def _stored_error(self, derivation: Derivation, settings: LayerSettings) -> float | None:
        return 0.0 if settings.store == "offload" else derivation.error(stored_as(settings))

    def layer_error(self, layer: LayerEntry, settings: LayerSettings) -> float | None:
        """The gradient error of one layer alone, scaled from the nearest option where not tried."""
        used = stored_as(self._effective(layer, settings))
        if used.exact or used.store == "offload":
            return 0.0
        error = layer.error(used)
        return 0.0 if error is None and self._stays(layer) else error

    def predicted_ms(self, assignment: Assignment) -> float:
        """Time of a step at the profiled batch size: the plain one and what encoding and decoding add."""
        return self.step_ms + self.ms_of(self.layers, assignment, self.active(assignment))

    def ms_of(self, layers: Iterable[LayerEntry], assignment: Assignment, active: Active) -> float:
        """What encoding and decoding for `layers` adds to a step; `active` as `assignment` makes it."""
        return sum(self._layer_ms(layer, assignment, active) for layer in layers)

    def plain_ms(self, batch_size: int) -> float:
        """Time of a plain step at `batch_size`, in proportion to the profiled one."""
        return self.step_ms * batch_size / self.batch_size

    def layer(self, name: str) -> LayerEntry:
        """The layer of that name. KeyError if there is none."""
        return self._by_name[name]

    def frame(self) -> pd.DataFrame:
        """A table with one row for each layer and option."""
        import pandas as pd

        columns = ("name", "tag", "index", "module", "dtype", "own_bytes")
        rows = [
            {
                **{column: getattr(layer, column) for column in columns},
                "layer_bytes": layer.bytes,
                "settings": option.settings.label,
                "level": option.settings.level,
                "bits": option.settings.bits,
                "group_size": option.settings.group_size,
                "exact": option.settings.exact,
                **{key: value for key, value in vars(option).items() if key != "settings"},
            }
            for layer in self.layers
            for option in layer.options
        ]
        return pd.DataFrame(rows)

    def to_dict(self) -> dict[str, Any]:
        """The JSON document `mesa-tune.profile/1`."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            "schema": schema("profile"),
            **values,
            "tensors": [dict(vars(tensor)) for tensor in self.tensors],
            "layers": [layer.to_dict() for layer in self.layers],
            "timeline": self.timeline.to_dict(),
            "ties": [dict(vars(tie)) for tie in self.ties],
            "derivations": [one.to_dict() for one in self.derivations],
            "exact": [dict(vars(one)) for one in self.exact],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Profile:
        """The profile that `to_dict` made `values` of.

        For others KeyError, TypeError, ValueError, IndexError or an arithmetic error.
        """
        plain = {key: value for key, value in values.items() if key != "schema"}
        parts = {
            "tensors": tuple(TensorEntry.from_dict(tensor) for tensor in values["tensors"]),
            "layers": tuple(LayerEntry.from_dict(layer) for layer in values["layers"]),
            "timeline": Timeline.from_dict(values["timeline"]),
            "ties": tuple(Tie.from_dict(tie) for tie in values["ties"]),
            "notes": tuple(values["notes"]),
            "derivations": tuple(Derivation.from_dict(one) for one in values.get("derivations", ())),
            "exact": tuple(ExactEntry.from_dict(one) for one in values.get("exact", ())),
        }
        made = typed(cls, {**plain, **parts})
        if made.batch_size < 1 or made.step_ms <= 0:
            raise ValueError(
                f"batch_size is {made.batch_size}, step_ms is {made.step_ms}: must be above zero"
            )
        # What does not fit together raises here, where the file is known, and not in a search.
        made.predict_assignment(
            {layer.name: layer.options[0].settings for layer in made.layers if layer.options}
        )
        return made

    def save(self, path: str | Path) -> None:
        """Write the document to `path`, whole or not at all. RunError where it cannot be written."""
        write_document(path, self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """The profile saved at `path`. RunError for a file that is missing, damaged or something else."""
        return read_document(path, "profile", cls.from_dict, _REMEDY)

    @cached_property
    def _by_name(self) -> dict[str, LayerEntry]:
        return {layer.name: layer for layer in self.layers}

    @cached_property
    def _tie_of(self) -> dict[str, Tie]:
        return {name: tie for tie in self.ties for name in tie.layers}

    def _stays(self, layer: LayerEntry) -> bool:
        """Whether a layer of a profile with errors has no other way than to store exactly."""
        only_exact = bool(layer.options) and all(option.settings.exact for option in layer.options)
        return only_exact and self._has_errors

    @cached_property
    def _has_errors(self) -> bool:
        options = (option for layer in self.layers for option in layer.options)
        return any(not option.settings.exact and option.gradient_error is not None for option in options)

    def _ratio(self, layer: LayerEntry, assignment: Assignment) -> float:
        """The tie's ratio where its layers have equal settings; with unequal ones each has its own noise."""
        tie = self._tie_of.get(layer.name)
        if tie is None or len({assignment.get(name) for name in tie.layers}) > 1:
            return 1.0
        return tie.ratio(layer.nearest(stored_as(self._effective(layer, assignment[layer.name]))))

    def _effective(self, layer: LayerEntry, settings: LayerSettings) -> LayerSettings:
        """Settings as they take effect: a layer stored by hooks has 256 levels at least."""
        return settings.hooked if layer.name in self.timeline.hooked else settings

    def _layer_ms(self, layer: LayerEntry, assignment: Assignment, active: Active) -> float:
        settings = assignment.get(layer.name)
        if settings is None or settings.exact or layer.name in active.free:
            return 0.0
        used = stored_as(self._effective(layer, settings))
        return active.by_layer.get(layer.name, layer).ms(used)


@dataclass(frozen=True)
class Active:
    """Derivations that take place, by the first of their layers; `free`: layers that add nothing to them."""

    by_layer: Mapping[str, Derivation]
    free: frozenset[str]


NOTHING = Active({}, frozenset())


def _takes_place(derivation: Derivation, used: Mapping[str, LayerSettings]) -> bool:
    return all(name in used for name in derivation.sources) and all(
        name in used and used[name].store == "derive" for name in derivation.takers
    )
