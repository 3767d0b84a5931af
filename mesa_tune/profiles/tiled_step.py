"""The step in which losses on large logits, and parts of blocks, may run in slices (`tile`).

What is hard: such a loss saves no probabilities and makes no whole gradient of the logits, so the peak is
elsewhere. So there is a second timeline, of traced steps in which these losses are tiled, and what a policy
with `tile` does follows from it as everything else follows from the first. Its modules that can run again are
MLPs and attention, in slices, where the model has any; else blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mesa_tune.policy import Policy
from mesa_tune.policy.settings import EXACT, LayerSettings
from mesa_tune.profiles.entries import LayerEntry
from mesa_tune.profiles.other_entries import ModuleEntry
from mesa_tune.profiles.timeline.distinct import Assignment
from mesa_tune.profiles.timeline.memory_model import Timeline

SLICES = 8
"""Slices of the traced step. What is whole in none of them is then an eighth of it."""


@dataclass(frozen=True)
class TiledStep:
    """The step in which each of `losses` has `slices`, and each of `parts`, modules, may run in so many.

    `heads`: the layers that made the logits. `timeline`: of that step. `added_ms`: what slices of losses add
    to the time of a converted step; None: unknown. `modules`: prices of the parts, or of blocks.
    """

    losses: tuple[str, ...]
    heads: tuple[str, ...]
    slices: int
    timeline: Timeline
    added_ms: float | None = None
    parts: Mapping[str, int] = field(default_factory=dict)
    modules: tuple[ModuleEntry, ...] = ()

    @property
    def settings(self) -> dict[str, LayerSettings]:
        """The settings of the losses."""
        return dict.fromkeys(self.losses, _sliced(self.slices))

    def routing_ms(self, untiled: float | None) -> float | None:
        """Return what converting adds to the time of the step; `untiled`: without slices. None: unknown."""
        return None if untiled is None or self.added_ms is None else untiled + self.added_ms

    def layers(self, layers: Sequence[LayerEntry]) -> tuple[LayerEntry, ...]:
        """Return the layers of the step. Losses and heads need nothing that could be compressed."""
        return tuple(
            replace(layer, options=tuple(option for option in layer.options if option.settings.exact))
            if layer.name in (*self.losses, *self.heads)
            else layer
            for layer in layers
        )

    def policy(self, policy: Policy) -> Policy:
        """Return `policy` with the slices."""
        return tiling(policy, self.losses, self.slices)

    def to_dict(self) -> dict[str, Any]:
        modules = [module.to_dict() for module in self.modules]
        return {**vars(self), "timeline": self.timeline.to_dict(), "modules": modules}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> TiledStep:
        added = values["added_ms"]
        return TiledStep(
            tuple(map(str, values["losses"])),
            tuple(map(str, values["heads"])),
            int(values["slices"]),
            Timeline.from_dict(values["timeline"]),
            None if added is None else float(added),
            {str(name): int(count) for name, count in values["parts"].items()},
            tuple(map(ModuleEntry.from_dict, values["modules"])),
        )


def tiling(policy: Policy, losses: Sequence[str], slices: int) -> Policy:
    """Return `policy` under which `losses` also go backward in slices."""
    return policy.with_settings("loss", losses, _sliced(slices))


def _sliced(slices: int) -> LayerSettings:
    return LayerSettings(store="exact", tile=slices)


def other_slices(tiled: TiledStep | None, assignment: Assignment) -> str | None:
    """Return, in words, which slices of `assignment` are not those of `tiled`; None if all are."""
    slices = {name: settings.tile for name, settings in assignment.items() if settings.tile > 1}
    if not slices:
        return None
    if tiled is not None:
        packed = {name for name in tiled.parts if name in slices and assignment[name].store == "recompute"}
        if slices == dict.fromkeys(tiled.losses, tiled.slices) | {name: tiled.parts[name] for name in packed}:
            return None
    what = ", ".join(f"`tile: {count}` of {name!r}" for name, count in slices.items())
    if tiled is None:
        return f"{what}: the profile has traced no step with slices"
    kinds = {(tiled.slices, ""): list(tiled.losses)}
    for name, count in tiled.parts.items():
        kinds.setdefault((count, " (`store: recompute`)"), []).append(name)
    traced = (
        f"`tile: {count}` of {', '.join(map(repr, names))}{how}"
        for (count, how), names in kinds.items()
        if names
    )
    return f"{what}: the profile has traced {' and '.join(traced)}"


def without_slices(assignment: Assignment) -> dict[str, LayerSettings]:
    """Return `assignment` in which tiled losses are exact: nothing that they save is lossy."""
    return {
        name: EXACT if settings.tile > 1 and settings.store != "recompute" else settings
        for name, settings in assignment.items()
    }
