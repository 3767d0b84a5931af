"""The decisions of a plan: units of layers that get one setting, and what each choice costs.

What is hard: bytes are not simply a sum over layers. Layers that keep the same tensor are tied into one
unit, so that its packed copy is counted once. A storage that a ReLU keeps together with its neighbour stays
whole while either is exact, although the two decide for themselves: a link between units. Everything else
adds up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase

import numpy as np
from numpy.typing import NDArray

from mesa_tune.errors import PolicyError, RunError
from mesa_tune.policy.settings import EXACT, LayerSettings
from mesa_tune.profiler.entries import LayerEntry
from mesa_tune.profiler.profile import NO_DERIVATIONS, Profile
from mesa_tune.profiler.timeline import SavedSpan, SizedTimeline
from mesa_tune.search.clusters import Cluster, clusters

Floats = NDArray[np.float64]

Pins = Mapping[str, LayerSettings]
"""Layer name or glob -> the settings that it must have; later pins win."""


@dataclass(frozen=True)
class Choice:
    """One setting for all layers of a unit. `live`: bytes it adds to each slot; `saved`: to saved bytes.

    `derived`: everything in the unit's cluster is derived that can be.
    """

    settings: LayerSettings
    error: float
    ms: float
    live: NDArray[np.int64]
    saved: int
    derived: bool = False


@dataclass(frozen=True)
class Unit:
    """Layers that get one setting, and the choices for it."""

    layers: tuple[str, ...]
    tag: str
    choices: tuple[Choice, ...]

    @property
    def exact(self) -> int | None:
        """Position of the exact choice; None where there is none."""
        return next((place for place, choice in enumerate(self.choices) if choice.settings.exact), None)


@dataclass(frozen=True)
class Link:
    """A storage that stays whole while one of `units` is exact; `live` and `saved` are what it adds."""

    units: tuple[int, ...]
    live: NDArray[np.int64]
    saved: int


@dataclass(frozen=True)
class Space:
    """All units of a profile at one batch size; `base` bytes a slot and `base_saved` whatever is chosen.

    Of each of `clusters` (units by number) all choices are `derived`, or none is.
    """

    units: tuple[Unit, ...]
    links: tuple[Link, ...]
    base: NDArray[np.int64]
    base_saved: int
    base_ms: float
    batch_size: int
    clusters: tuple[tuple[int, ...], ...] = ()

    def is_consistent(self, chosen: Sequence[int]) -> bool:
        """Whether each cluster derives as a whole or not at all."""
        derived = [choice.derived for choice in self.picked(chosen)]
        return all(len({derived[unit] for unit in units}) == 1 for units in self.clusters)

    def assignment(self, chosen: Sequence[int]) -> dict[str, LayerSettings]:
        """Settings by layer name, for one position a unit."""
        pairs = zip(self.units, chosen, strict=True)
        return {name: unit.choices[place].settings for unit, place in pairs for name in unit.layers}

    def live(self, chosen: Sequence[int]) -> NDArray[np.int64]:
        """Bytes alive in each slot."""
        total = self.base + sum(choice.live for choice in self.picked(chosen))
        return np.asarray(total + sum(link.live for link in self.held(chosen)), dtype=np.int64)

    def saved(self, chosen: Sequence[int]) -> int:
        """Bytes kept between forward and backward."""
        picked = sum(choice.saved for choice in self.picked(chosen))
        return self.base_saved + picked + sum(link.saved for link in self.held(chosen))

    def error(self, chosen: Sequence[int]) -> float:
        """Sum of the units' gradient errors."""
        return float(sum(choice.error for choice in self.picked(chosen)))

    def ms(self, chosen: Sequence[int]) -> float:
        """Milliseconds a step."""
        return self.base_ms + float(sum(choice.ms for choice in self.picked(chosen)))

    def picked(self, chosen: Sequence[int]) -> list[Choice]:
        """The chosen choices."""
        return [unit.choices[place] for unit, place in zip(self.units, chosen, strict=True)]

    def held(self, chosen: Sequence[int]) -> list[Link]:
        """The links whose storage stays whole."""
        exact = [choice.settings.exact for choice in self.picked(chosen)]
        return [link for link in self.links if any(exact[unit] for unit in link.units)]


def make_space(
    profile: Profile, batch_size: int | None = None, pins: Pins | None = None, *, derive: bool = True
) -> Space:
    """The decisions that `profile` leaves at `batch_size`, less choices that another one beats in everything.

    `derive` False leaves out what is derived, except where pins say so.
    RunError for a profile without gradient errors; PolicyError for a pin that no layer has; BudgetError for a
    batch size that cannot be planned for.
    """
    _require_errors(profile)
    sized = profile.timeline.at(batch_size or profile.batch_size)
    groups = _groups(profile)
    unit_of = {name: number for number, names in enumerate(groups) for name in names}
    parts = _Parts(profile, sized, unit_of)
    pinned = _pinned(profile, pins or {})
    units = [parts.unit(number, names, pinned) for number, names in enumerate(groups)]
    found = clusters(profile, sized, groups) if derive else ()
    joined = tuple(cluster.units for cluster in found if parts.extend(units, cluster, pinned))
    return Space(
        tuple(units),
        tuple(parts.links),
        parts.base,
        parts.base_saved,
        profile.step_ms * parts.scale,
        sized.batch_size,
        joined,
    )


class _Parts:
    """Slots and kept things, dealt out to the units that decide over them."""

    def __init__(self, profile: Profile, sized: SizedTimeline, unit_of: Mapping[str, int]) -> None:
        self.profile = profile
        self.sized = sized
        self.scale = sized.batch_size / profile.batch_size
        self.links: list[Link] = []
        self.linked: set[int] = set()
        self.owned: dict[int, list[tuple[SavedSpan, int]]] = {}
        self.slots: dict[int, list[int]] = {}
        self.base = np.full(len(profile.timeline.slots), sized.static, dtype=np.int64)
        self.base_saved = 0
        for place, slot in enumerate(profile.timeline.slots):
            if slot.layer is not None and slot.layer in unit_of:
                self.slots.setdefault(unit_of[slot.layer], []).append(place)
            else:
                self.base[place] += sized.exact[place]
        for item, size in zip(sized.spans, sized.sizes, strict=True):
            self._deal(item, size, unit_of)

    def _deal(self, item: SavedSpan, size: int, unit_of: Mapping[str, int]) -> None:
        units = tuple(sorted({unit_of[name] for name in item.layers if name in unit_of}))
        fixed = (name not in unit_of or name in self.sized.small for name in item.layers)
        always = item.kind == "plain" and any(fixed)
        if len(units) == 1 and not always:
            self.owned.setdefault(units[0], []).append((item, size))
        elif item.kind == "plain" and units and not always:
            live = self._over(item, size)
            self.links.append(Link(units, live, size if self.sized.is_saved(item) else 0))
            self.linked.update(units)
        elif always or item.kind == "always":
            self.base += self._over(item, size)
            self.base_saved += size if self.sized.is_saved(item) else 0

    def _over(self, item: SavedSpan, size: int) -> NDArray[np.int64]:
        live = np.zeros_like(self.base)
        live[item.first : item.last + 1] = size
        return live

    def unit(self, number: int, names: tuple[str, ...], pinned: Mapping[str, LayerSettings]) -> Unit:
        layers = [self.profile.layer(name) for name in names]
        pins = [pinned[name] for name in names if name in pinned]
        settings = pins[-1:] or self._settings(layers)
        choices = [self._choice(number, layers, one) for one in settings]
        return Unit(names, layers[0].tag, tuple(_undominated(choices, number in self.linked)))

    def extend(self, units: list[Unit], cluster: Cluster, pinned: Mapping[str, LayerSettings]) -> bool:
        """Adds the choices of a cluster that derives to its `units`; False where one of them has none."""
        found = {
            number: self._derived(number, units[number].layers, cluster, pinned) for number in cluster.units
        }
        if not all(found.values()):
            return False
        for number, choices in found.items():
            unit = units[number]
            plain = () if unit.choices[0].settings.store == "derive" else unit.choices
            units[number] = replace(unit, choices=(*plain, *_undominated(choices, False)))
        return True

    def _derived(
        self, number: int, names: Sequence[str], cluster: Cluster, pinned: Mapping[str, LayerSettings]
    ) -> list[Choice]:
        """The unit's choices while the cluster derives."""
        layers = [self.profile.layer(name) for name in names]
        pins = [pinned[name] for name in names if name in pinned]
        if number in cluster.takers and pins and pins[-1].store != "derive":
            return []
        own = [cluster.own(one) for one in pins[-1:] or self._settings(layers)]
        return [
            self._choice(number, layers, one, cluster) for one in own if one is not None and not one.exact
        ]

    def _settings(self, layers: Sequence[LayerEntry]) -> list[LayerSettings]:
        """Exact, then the settings that every layer of the unit has a known error for, finest first.

        And 5 and 7 bits between measured neighbours: above 4 bits errors follow 1 / (level − 1)² closely.
        """
        found = [
            {option.settings for option in layer.options if option.gradient_error is not None}
            for layer in layers
        ]
        shared = {self._effective(one, layers) for one in set.intersection(*found) if not one.exact}
        shared |= _between(shared)
        return [
            EXACT,
            *sorted(shared, key=_order),
        ]

    def _effective(self, settings: LayerSettings, layers: Sequence[LayerEntry]) -> LayerSettings:
        return self.sized.compressed({layers[0].name: settings}).get(layers[0].name, settings)

    def _choice(
        self,
        number: int,
        layers: Sequence[LayerEntry],
        settings: LayerSettings,
        cluster: Cluster | None = None,
    ) -> Choice:
        assignment = dict(cluster.assignment) if cluster else {}
        assignment |= {layer.name: settings for layer in layers}
        active, linked = (cluster.active, cluster.linked) if cluster else (NO_DERIVATIONS, frozenset[str]())
        used = self.sized.compressed(assignment)
        live = np.zeros_like(self.base)
        saved = 0
        for item, size in self.owned.get(number, []):
            count = self.sized.span_bytes(item, size, used)
            live[item.first : item.last + 1] += count
            saved += count if self.sized.is_saved(item) else 0
        for place in self.slots.get(number, []):
            live[place] += self._work(place, settings, linked)
        error = self.profile.error_of(layers, assignment, active)
        if error is None:
            raise RunError(f"{layers[0].name}: no gradient error is known for {settings.label}\n{_AGAIN}")
        ms = self.profile.ms_of(layers, assignment, active) * self.scale
        return Choice(settings, error, ms, live, saved, cluster is not None)

    def _work(self, place: int, settings: LayerSettings, linked: Collection[str]) -> int:
        if settings.exact:
            return int(self.sized.exact[place])
        derives = self.profile.timeline.slots[place].layer in linked
        return int((self.sized.derived if derives else self.sized.packed)[place])


def _order(settings: LayerSettings) -> tuple[int, int, int, str]:
    return -settings.level, settings.group_size or 0, settings.quant_groups or 0, settings.label


_AGAIN = "profile it with `mesa-tune profile`, which measures all options"


def _between(settings: Collection[LayerSettings]) -> set[LayerSettings]:
    """Settings of 5 or 7 bits whose neighbours, a bit more and a bit less, are among `settings`."""
    return {
        replace(one, level=2 * one.level)
        for one in settings
        if one.level in (16, 64) and replace(one, level=4 * one.level) in settings
    }


def _undominated(choices: Sequence[Choice], linked: bool) -> list[Choice]:
    """Choices that no other beats or equals in error, time and bytes everywhere; of equal ones the first."""
    kept: list[Choice] = []
    for place, choice in enumerate(choices):
        others = [*kept, *choices[place + 1 :]]
        # An exact choice that holds a link costs more than its own bytes say, so it beats nothing there.
        rivals = (other for other in others if not (linked and other.settings.exact))
        if not any(_beats(rival, choice, earlier=any(rival is one for one in kept)) for rival in rivals):
            kept.append(choice)
    return kept


def _beats(rival: Choice, choice: Choice, earlier: bool) -> bool:
    mine = (choice.error, choice.ms, choice.saved)
    its = (rival.error, rival.ms, rival.saved)
    if any(one > other for one, other in zip(its, mine, strict=True)) or (rival.live > choice.live).any():
        return False
    return earlier or its != mine or bool((rival.live < choice.live).any())


def _groups(profile: Profile) -> list[tuple[str, ...]]:
    """The layers in the order of the profile, those that must have one setting together."""
    together = [tie.layers for tie in profile.ties]
    together += [item.layers for item in profile.timeline.kept if item.kind == "coded"]
    root = {layer.name: layer.name for layer in profile.layers}
    for names in together:
        _join(root, [name for name in names if name in root])
    groups: dict[str, list[str]] = {}
    for layer in profile.layers:
        groups.setdefault(_root(root, layer.name), []).append(layer.name)
    return [tuple(names) for names in groups.values()]


def _join(root: dict[str, str], names: Sequence[str]) -> None:
    for name in names[1:]:
        root[_root(root, name)] = _root(root, names[0])


def _root(root: Mapping[str, str], name: str) -> str:
    while root[name] != name:
        name = root[name]
    return name


def _pinned(profile: Profile, pins: Pins) -> dict[str, LayerSettings]:
    names = [layer.name for layer in profile.layers]
    found: dict[str, LayerSettings] = {}
    for glob, settings in pins.items():
        matched = [name for name in names if fnmatchcase(name, glob)]
        if not matched:
            raise PolicyError(f"pin {glob!r}: no layer has this name{_near(glob, names)}")
        found.update(dict.fromkeys(matched, settings))
    return found


def _near(word: str, names: Iterable[str]) -> str:
    near = get_close_matches(word, list(names), 1)
    return f"\nthe nearest is {near[0]!r}" if near else "\n`mesa-tune profile --json` lists the layers"


def _require_errors(profile: Profile) -> None:
    if profile.partial:
        raise RunError(
            "the profile is partial: not all layers were measured\nrun `mesa-tune profile` again: it resumes"
        )
    options = [option for layer in profile.layers for option in layer.options if not option.settings.exact]
    if all(option.gradient_error is None for option in options):
        raise RunError(f"the profile holds bytes only, no gradient errors\n{_AGAIN}")


@dataclass(frozen=True)
class Limits:
    """What a step may take: `peak` and `saved` bytes, milliseconds. None: no limit."""

    peak: int | None = None
    saved: int | None = None
    ms: float | None = None

    def kept(self, space: Space, chosen: Sequence[int]) -> bool:
        """Whether the chosen step stays within all limits."""
        return (
            (self.peak is None or int(space.live(chosen).max()) <= self.peak)
            and (self.saved is None or space.saved(chosen) <= self.saved)
            and (self.ms is None or space.ms(chosen) <= self.ms * (1 + 1e-9))
        )
