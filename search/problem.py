"""The problem of a search as values: what can be chosen, what each choice costs, and the limits.

The hard part: the bytes of a step are not a sum over layers. Layers that save the same tensor form one unit,
so that its packed copy is counted once. A storage that units share, each with settings of its own, is a link:
it is saved while one of them needs it. A module that runs again in backward decides for all units inside, and
these then cost nothing of their own. All other costs add up, except what joint rounding at few bits adds to
the noise ratio (`interaction_of`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from mesa_tune.policy.settings import EXACT, LayerSettings
from mesa_tune.profiles.own_noise import Shares

Floats = NDArray[np.float64]

Chosen = tuple[int, ...]
"""One position per unit, then one per module."""
NONE = -1
"""Position of a module that is not chosen, and of a unit inside a chosen one."""

# Sums of floats in another order differ by less than this fraction.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Choice:
    """Settings for all layers of a unit or module, and their cost.

    `live`: bytes added to each slot of the timeline. `saved`: bytes added to the saved bytes. `derived`: all
    possible tensors of the unit's cluster are derived. `noise`: the gradient noise ratio. `root`, `weight`:
    sums of √w and of w over the weights w of `interaction_of`. `bias`: the ratio of the mean change, a part
    of `noise`; 0 where it was not measured. `links`: of a module, the numbers of the links that it needs,
    such as that of its exact input. `inside`: of a module, the settings of the layers inside.
    """

    settings: LayerSettings
    noise: float
    ms: float
    live: NDArray[np.int64]
    saved: int
    derived: bool = False
    root: float = 0.0
    weight: float = 0.0
    bias: float = 0.0
    links: tuple[int, ...] = ()
    inside: LayerSettings = EXACT


@dataclass(frozen=True)
class Unit:
    """Layers that get the same settings, and the choices of them. `shares`: see `LayerEntry`."""

    layers: tuple[str, ...]
    tag: str
    choices: tuple[Choice, ...]
    shares: Shares = ()

    @property
    def exact(self) -> int | None:
        """Position of the exact choice; None without one."""
        return next((index for index, choice in enumerate(self.choices) if choice.settings.exact), None)


@dataclass(frozen=True)
class Module:
    """A module that can run again in backward, with choices of its own for the units inside, by number.

    If one of its choices is taken, the units inside take none, and no module around or inside it does.
    """

    name: str
    units: tuple[int, ...]
    choices: tuple[Choice, ...]
    tag: str = "module"
    shares: Shares = ()


Decision = TypeVar("Decision", Unit, Module)


@dataclass(frozen=True)
class Link:
    """A storage that is saved while one of `units` is exact, or, without `exact`, while one is not.

    A unit inside a chosen module is neither. `live`, `saved`: bytes as in `Choice`.
    """

    units: tuple[int, ...]
    live: NDArray[np.int64]
    saved: int
    exact: bool = True


@dataclass(frozen=True)
class Space:
    """All units of a profile at one batch size.

    `base`: bytes of each slot, and `base_saved`: saved bytes, under every choice. `clusters`: numbers of the
    units whose choices are all `derived`, or none. `floor`: see `Profile.error_floor`. `knows_noise`: whether
    `noise` is beside the noise of batches; otherwise these were equal. `slices`: settings of
    the losses that go backward in slices, in every plan; their units choose exact storage. An argument
    `chosen` is one position per unit, then one per module; `NONE` where nothing is chosen.
    """

    units: tuple[Unit, ...]
    links: tuple[Link, ...]
    base: NDArray[np.int64]
    base_saved: int
    base_ms: float
    batch_size: int
    clusters: tuple[tuple[int, ...], ...] = ()
    modules: tuple[Module, ...] = ()
    floor: float = 0.0
    knows_noise: bool = True
    slices: Mapping[str, LayerSettings] = field(default_factory=dict)

    @cached_property
    def decisions(self) -> tuple[Unit | Module, ...]:
        """All units, then all modules."""
        return (*self.units, *self.modules)

    @cached_property
    def around(self) -> list[list[int]]:
        """The numbers of the modules around each unit."""
        around: list[list[int]] = [[] for _ in self.units]
        for number, module in enumerate(self.modules):
            for unit in module.units:
                around[unit].append(number)
        return around

    def from_fastest(self) -> Space:
        """Return this space with times counted from the fastest choices, so that none is below 0.

        A layer that compresses can be faster than an exact one: its backward reads less memory. But solvers
        want costs of at least 0.
        """
        least = [min(choice.ms for choice in unit.choices) for unit in self.units]
        for module in self.modules:
            fastest = min(choice.ms for choice in module.choices)
            least[module.units[0]] -= max(0.0, sum(least[unit] for unit in module.units) - fastest)
        inside = [sum(least[unit] for unit in module.units) for module in self.modules]
        return replace(
            self,
            units=tuple(_later(unit, -ms) for unit, ms in zip(self.units, least, strict=True)),
            modules=tuple(_later(module, -ms) for module, ms in zip(self.modules, inside, strict=True)),
            base_ms=self.base_ms + sum(least),
        )

    def is_consistent(self, chosen: Sequence[int]) -> bool:
        """Return True if of each unit and the modules around it one is chosen, and clusters derive or not."""
        taken = chosen[len(self.units) :]
        for unit, modules in enumerate(self.around):
            if (chosen[unit] != NONE) + sum(taken[module] != NONE for module in modules) != 1:
                return False
        derived = [
            position != NONE and unit.choices[position].derived for unit, position in self._pairs(chosen)
        ]
        return all(len({derived[unit] for unit in units}) == 1 for units in self.clusters)

    def assignment(self, chosen: Sequence[int]) -> dict[str, LayerSettings]:
        """Return the settings of each layer name, and of each chosen module by its name."""
        settings = {
            name: unit.choices[position].settings
            for unit, position in self._pairs(chosen)
            if position != NONE
            for name in unit.layers
        }
        for module, position in self._taken(chosen):
            names = (name for unit in module.units for name in self.units[unit].layers)
            settings.update(dict.fromkeys(names, module.choices[position].inside))
        return settings | self.taken(chosen) | dict(self.slices)

    def taken(self, chosen: Sequence[int]) -> dict[str, LayerSettings]:
        """Return the settings of each chosen module, by its name."""
        return {module.name: module.choices[position].settings for module, position in self._taken(chosen)}

    def live(self, chosen: Sequence[int]) -> NDArray[np.int64]:
        """Return the bytes alive in each slot."""
        total = self.base.copy()
        for choice in self.picked(chosen):
            total += choice.live
        for link in self.saved_links(chosen):
            total += link.live
        return total

    def saved(self, chosen: Sequence[int]) -> int:
        """Return the saved bytes."""
        picked = sum(choice.saved for choice in self.picked(chosen))
        return self.base_saved + picked + sum(link.saved for link in self.saved_links(chosen))

    def bias(self, chosen: Sequence[int]) -> float:
        """Return the sum of the biases that are known."""
        return float(sum(choice.bias for choice in self.picked(chosen)))

    def noise(self, chosen: Sequence[int]) -> float:
        """Return the gradient noise ratio, with interaction and floor, as `Profile` predicts it."""
        ratio = sum(choice.noise for choice in self.picked(chosen))
        return max(ratio + self.interaction(chosen), self.floor) if ratio > 0 else 0.0

    def interaction(self, chosen: Sequence[int]) -> float:
        """Return what joint rounding at few bits adds to the noise ratio."""
        picked = self.picked(chosen)
        return sum(choice.root for choice in picked) ** 2 - sum(choice.weight for choice in picked)

    def worst(self, chosen: Sequence[int]) -> float:
        """Return the largest own noise ratio of a parameter, or part of one."""
        own: dict[int, float] = {}
        for decision, position in zip(self.decisions, chosen, strict=True):
            if position != NONE:
                for part, share in decision.shares:
                    own[part] = own.get(part, 0.0) + share * decision.choices[position].noise
        return max(own.values(), default=0.0)

    def ms(self, chosen: Sequence[int]) -> float:
        """Return the milliseconds of a step."""
        return self.base_ms + float(sum(choice.ms for choice in self.picked(chosen)))

    def picked(self, chosen: Sequence[int]) -> list[Choice]:
        """Return the chosen choices of units, then of modules."""
        pairs = zip(self.decisions, chosen, strict=True)
        return [decision.choices[position] for decision, position in pairs if position != NONE]

    def saved_links(self, chosen: Sequence[int]) -> list[Link]:
        """Return the links whose storage is saved."""
        exact = [
            None if position == NONE else unit.choices[position].settings.exact
            for unit, position in self._pairs(chosen)
        ]
        needed = {link for module, position in self._taken(chosen) for link in module.choices[position].links}
        return [
            link
            for number, link in enumerate(self.links)
            if number in needed or any(exact[unit] is link.exact for unit in link.units)
        ]

    def _pairs(self, chosen: Sequence[int]) -> list[tuple[Unit, int]]:
        return list(zip(self.units, chosen, strict=False))

    def _taken(self, chosen: Sequence[int]) -> list[tuple[Module, int]]:
        pairs = zip(self.modules, chosen[len(self.units) :], strict=True)
        return [(module, position) for module, position in pairs if position != NONE]


def _later(decision: Decision, ms: float) -> Decision:
    """Return the decision with `ms` more milliseconds in every choice."""
    choices = (replace(choice, ms=choice.ms + ms) for choice in decision.choices)
    return replace(decision, choices=tuple(choices))


@dataclass(frozen=True)
class Limits:
    """Limits of a step: `peak` and `saved` bytes, milliseconds, noise ratio. None: no limit.

    `bias`: the part of the noise ratio that is one; `worst`: the largest own ratio of a parameter.
    """

    peak: int | None = None
    saved: int | None = None
    ms: float | None = None
    noise: float | None = None
    bias: float | None = None
    worst: float | None = None

    def allow(self, space: Space, chosen: Sequence[int]) -> bool:
        """Return True if the chosen step is within all limits."""
        return (
            (self.peak is None or int(space.live(chosen).max()) <= self.peak)
            and (self.saved is None or space.saved(chosen) <= self.saved)
            and _within(self.ms, space.ms(chosen))
            and _within(self.bias, space.bias(chosen))
            and _within(self.noise, space.noise(chosen))
            and (self.worst is None or _within(self.worst, space.worst(chosen)))
        )

    def tighter(self, fraction: float) -> Limits:
        """Return limits that are lower by `fraction`."""
        part = 1 - fraction
        return Limits(
            None if self.peak is None else int(self.peak * part),
            None if self.saved is None else int(self.saved * part),
            None if self.ms is None else self.ms * part,
            None if self.noise is None else self.noise * part,
            None if self.bias is None else self.bias * part,
            None if self.worst is None else self.worst * part,
        )


def _within(limit: float | None, value: float) -> bool:
    return limit is None or value <= limit * (1 + _ROUNDING)
