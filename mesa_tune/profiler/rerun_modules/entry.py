"""`ModuleEntry`: the price of running a module again in backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mesa_tune.files import typed
from mesa_tune.policy.settings import LayerSettings
from mesa_tune.profiler.entries import HasOptions, Option
from mesa_tune.profiler.price_table import Cost


@dataclass(frozen=True)
class ModuleEntry(HasOptions):
    """A module that can run again in backward from its inputs, and options to pack these.

    `input_bytes`: of the inputs as they are, from which the gradient is exact. `forward_ms`: milliseconds of
    its forward in a step, which the second run adds. Options have `store` "recompute"; their bytes are those
    of the packed inputs, and their error is that of the gradient if this module alone runs again. The first
    batches that price measured it for one option; the other errors are inferred.
    """

    name: str
    input_bytes: int
    forward_ms: float
    options: tuple[Option, ...]

    def cost(self, settings: LayerSettings) -> Cost:
        """Return what it costs to run again from inputs in these settings."""
        position = self.nearest(settings)
        ms = None if position is None else self.forward_ms + self.options[position].ms
        return Cost(self.errors(settings), 0.0, ms)

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> ModuleEntry:
        options = tuple(Option.from_dict(option) for option in values["options"])
        return typed(ModuleEntry, {**values, "options": options})
