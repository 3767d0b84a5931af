"""Entries of a profile besides layers: modules that run again, and steps that run other layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mesa_tune.files import typed
from mesa_tune.policy.settings import LayerSettings
from mesa_tune.profiles.entries import HasOptions, Option
from mesa_tune.profiles.own_noise import Shares, shares_from
from mesa_tune.profiles.price_table import Cost

REFERENCE = LayerSettings(level=256, store="recompute")
"""Settings of the inputs of modules in the traced steps."""


@dataclass(frozen=True)
class ModuleEntry(HasOptions):
    """A module that can run again in backward from its inputs, and options to pack these.

    `input_bytes`: of the inputs as they are, from which the gradient is exact. `rerun_ms`: milliseconds that
    running again adds to a step besides packing the inputs. Options have `store` "recompute"; their bytes are
    those of the packed inputs, and their error is that of the gradient if this module alone runs again. The
    first batch that prices measured it for one option or two; the other errors are inferred.
    """

    name: str
    input_bytes: int
    rerun_ms: float
    options: tuple[Option, ...]
    shares: Shares = ()

    def cost(self, settings: LayerSettings) -> Cost:
        """Return what it costs to run again from inputs in these settings."""
        position = self.nearest(settings)
        ms = None if position is None else self.rerun_ms + self.options[position].ms
        option = self.like(settings)
        if option is None:
            return Cost(None, None, 0.0, ms)
        return Cost(option.price_ratios, option.gradient_error, 0.0, ms)

    def near(self, bits: int) -> Option:
        """Return the option whose bits are nearest."""
        return min(self.options, key=lambda option: abs(option.settings.bits - bits))

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> ModuleEntry:
        options = tuple(Option.from_dict(option) for option in values["options"])
        shares = shares_from(values.get("shares", ()))
        return typed(ModuleEntry, {**values, "options": options, "shares": shares})


def with_rerun_times(
    modules: Sequence[ModuleEntry], added_ms: float | None, bits: int
) -> tuple[ModuleEntry, ...]:
    """Return the modules with times whose sum was measured: `added_ms`, if all run again. None: it was not.

    Running twice adds more than the time of a plain forward: both runs are routed, the first is watched, and
    what either saves goes through hooks. So all times grow in the same proportion. `bits`: of the inputs in
    the steps that were timed.
    """
    runs = sum(module.rerun_ms for module in modules)
    if added_ms is None or not runs:
        return tuple(modules)
    factor = max(0.0, added_ms - sum(module.near(bits).ms for module in modules)) / runs
    return tuple(replace(module, rerun_ms=factor * module.rerun_ms) for module in modules)


@dataclass(frozen=True)
class OtherStep:
    """A step, by random state and draw, with the names of the layers that no step before it has.

    `share`: of the steps that were looked at, those which run such layers.
    """

    random_state: int
    draw: int
    share: float
    layers: tuple[str, ...]

    @property
    def note(self) -> str:
        """What to know of these layers, in words."""
        if not self.layers:
            return f"{self.share:.0%} of steps run other modules, which stay exact: no layer is like theirs"
        count = f"{len(self.layers)} layers that the traced step skips, as {self.layers[0]!r}"
        return f"{self.share:.0%} of steps run {count}: they are stored as the most alike"

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> OtherStep:
        return typed(OtherStep, {**values, "layers": tuple(map(str, values["layers"]))})
