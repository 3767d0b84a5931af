"""Choices of modules that run again in backward: how their inputs are stored, and the layers inside.

What is hard: a module decides for all units inside. So its bytes are the difference that it makes to a step
in which everything else is exact, and the units and links inside cost nothing of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from mesa_tune.policy.settings import EXACT, LayerSettings
from mesa_tune.profiles.other_entries import ModuleEntry
from mesa_tune.profiles.price_table import NO_DERIVATIONS, Cost
from mesa_tune.profiles.profile import Profile
from mesa_tune.profiles.timeline.sized_timeline import SizedTimeline, StepBytes
from mesa_tune.search.problem import Choice, Link, Module, Unit
from mesa_tune.search.restrictions import Restrictions

INSIDE: Final = (EXACT, LayerSettings(level=16), LayerSettings(level=4))
"""Settings of the layers inside a module while it runs again."""


@dataclass(frozen=True)
class RerunModules:
    """The modules of a profile that can run again, with their choices.

    `units`, `links`: those of the space. `pinned`: names of layers whose settings are fixed: the modules
    around them do not run again.
    """

    profile: Profile
    sized: SizedTimeline
    units: Sequence[Unit]
    links: Sequence[Link]
    restrictions: Restrictions
    pinned: Mapping[str, LayerSettings]

    def modules(self) -> Iterator[Module]:
        """Yield the modules that have a choice."""
        plain = self.sized.under({})
        for entry in self.profile.modules:
            inside = self._inside(entry.name)
            if entry.name in self.sized.modules and inside:
                choices = tuple(self._choices(entry, inside, plain))
                if choices:
                    yield Module(entry.name, inside, choices)

    def _inside(self, name: str) -> tuple[int, ...]:
        """Return the units inside a module; none if one is partly outside, or cannot be exact."""
        prefix, inside = f"{name}.", []
        for number, unit in enumerate(self.units):
            layers = [layer.startswith(prefix) for layer in unit.layers]
            if any(layers):
                if not all(layers) or unit.exact is None or not self.pinned.keys().isdisjoint(unit.layers):
                    return ()
                inside.append(number)
        return tuple(inside)

    def _choices(self, entry: ModuleEntry, inside: tuple[int, ...], plain: StepBytes) -> Iterator[Choice]:
        layers = [layer for unit in inside for layer in self.units[unit].layers]
        known = [option.settings for option in entry.options if option.ratios]
        for settings in filter(self.restrictions.allows, known):
            # In slices, what layers inside save is gone with each.
            for stored in filter(self.restrictions.allows, INSIDE if settings.tile == 1 else INSIDE[:1]):
                assignment = {entry.name: settings}
                assignment |= {} if stored.exact else dict.fromkeys(layers, stored)
                own = self.profile.cost_of(map(self.profile.layer, layers), assignment, NO_DERIVATIONS)
                again = self.profile.rerun_cost(entry.name, settings)
                step = self.sized.under(assignment)
                if own.ratio is not None and own.ms is not None and again.ms is not None:
                    yield self._choice(settings, stored, (own, again), step, inside, plain)

    def _choice(
        self,
        settings: LayerSettings,
        stored: LayerSettings,
        costs: tuple[Cost, Cost],
        step: StepBytes,
        inside: tuple[int, ...],
        plain: StepBytes,
    ) -> Choice:
        own, again = costs
        cost = own.plus(again)
        assert cost.ratio is not None
        assert cost.ms is not None
        live, saved = step.live - plain.live, int((step.spans - plain.spans)[self.sized.saved].sum())
        for item in self._exact_parts(inside):
            live, saved = live + item.live, saved + item.saved
        return Choice(
            settings,
            cost.ratio,
            cost.ms * self.sized.batch_size / self.profile.batch_size,
            np.asarray(live, dtype=np.int64),
            saved,
            root=cost.root,
            weight=cost.root**2 - cost.interaction,
            inside=stored,
        )

    def _exact_parts(self, inside: tuple[int, ...]) -> Iterator[Choice | Link]:
        """Yield what the units inside add to the plain step: their exact choices, and links of no others."""
        for number in inside:
            unit = self.units[number]
            assert unit.exact is not None
            yield unit.choices[unit.exact]
        yield from (link for link in self.links if link.exact and set(link.units) <= set(inside))
