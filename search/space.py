"""The search space: units of layers that get one setting, and the cost of each choice.

The hard part: the bytes of a step are not a sum over layers. Layers that save the same tensor form one unit,
so that its packed copy is counted once. A storage that a ReLU shares with a neighbouring layer is saved while
either is exact, although the two have separate settings: a link between units. All other costs add up.
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
from mesa_tune.profiler.memory.sized_timeline import SizedSpan, SizedTimeline
from mesa_tune.profiler.price_table import NO_DERIVATIONS
from mesa_tune.profiler.profile import Profile
from mesa_tune.search.clusters import Cluster, clusters

Floats = NDArray[np.float64]

Pins = Mapping[str, LayerSettings]
"""Layer name or glob -> the settings that it must have; later pins win."""


@dataclass(frozen=True)
class Choice:
    """Settings for all layers of a unit, and their cost.

    `live`: bytes added to each slot of the timeline. `saved`: bytes added to the saved bytes. `derived`: all
    possible tensors of the unit's cluster are derived.
    """

    settings: LayerSettings
    error: float
    ms: float
    live: NDArray[np.int64]
    saved: int
    derived: bool = False


@dataclass(frozen=True)
class Unit:
    """Layers that get the same settings, and the choices of them."""

    layers: tuple[str, ...]
    tag: str
    choices: tuple[Choice, ...]

    @property
    def exact(self) -> int | None:
        """Position of the exact choice; None without one."""
        return next((index for index, choice in enumerate(self.choices) if choice.settings.exact), None)


@dataclass(frozen=True)
class Link:
    """A storage that is saved while one of `units` is exact, or, without `exact`, while one is not.

    `live`, `saved`: bytes as in `Choice`.
    """

    units: tuple[int, ...]
    live: NDArray[np.int64]
    saved: int
    exact: bool = True


@dataclass(frozen=True)
class Space:
    """All units of a profile at one batch size.

    `base`: bytes of each slot, and `base_saved`: saved bytes, under every choice. `clusters`: numbers of the
    units whose choices are all `derived`, or none. An argument `chosen` is one position per unit.
    """

    units: tuple[Unit, ...]
    links: tuple[Link, ...]
    base: NDArray[np.int64]
    base_saved: int
    base_ms: float
    batch_size: int
    clusters: tuple[tuple[int, ...], ...] = ()

    def is_consistent(self, chosen: Sequence[int]) -> bool:
        """Return True if in each cluster all choices are derived, or none."""
        derived = [choice.derived for choice in self.picked(chosen)]
        return all(len({derived[unit] for unit in units}) == 1 for units in self.clusters)

    def assignment(self, chosen: Sequence[int]) -> dict[str, LayerSettings]:
        """Return the settings of each layer name."""
        pairs = zip(self.units, chosen, strict=True)
        return {name: unit.choices[position].settings for unit, position in pairs for name in unit.layers}

    def live(self, chosen: Sequence[int]) -> NDArray[np.int64]:
        """Return the bytes alive in each slot."""
        total = self.base + sum(choice.live for choice in self.picked(chosen))
        return np.asarray(total + sum(link.live for link in self.saved_links(chosen)), dtype=np.int64)

    def saved(self, chosen: Sequence[int]) -> int:
        """Return the saved bytes."""
        picked = sum(choice.saved for choice in self.picked(chosen))
        return self.base_saved + picked + sum(link.saved for link in self.saved_links(chosen))

    def error(self, chosen: Sequence[int]) -> float:
        """Return the sum of the units' gradient errors."""
        return float(sum(choice.error for choice in self.picked(chosen)))

    def ms(self, chosen: Sequence[int]) -> float:
        """Return the milliseconds of a step."""
        return self.base_ms + float(sum(choice.ms for choice in self.picked(chosen)))

    def picked(self, chosen: Sequence[int]) -> list[Choice]:
        """Return the chosen choices."""
        return [unit.choices[position] for unit, position in zip(self.units, chosen, strict=True)]

    def saved_links(self, chosen: Sequence[int]) -> list[Link]:
        """Return the links whose storage is saved."""
        exact = [choice.settings.exact for choice in self.picked(chosen)]
        return [link for link in self.links if any(exact[unit] == link.exact for unit in link.units)]


def make_space(
    profile: Profile, batch_size: int | None = None, pins: Pins | None = None, *, derive: bool = True
) -> Space:
    """Return the space of `profile` at `batch_size`, without choices that another one dominates.

    `derive=False` leaves out derived tensors, except those of pins. Raise RunError for a profile without
    gradient errors, PolicyError for a pin that matches no layer, BudgetError for a batch size that the
    profile cannot predict.
    """
    _require_errors(profile)
    sized = profile.timeline.at(batch_size or profile.batch_size).with_workspaces
    groups = _groups(profile)
    unit_of = {name: number for number, names in enumerate(groups) for name in names}
    builder = _Builder(profile, sized, unit_of)
    pinned = _pinned(profile, pins or {})
    units = [builder.unit(number, names, pinned) for number, names in enumerate(groups)]
    candidates = clusters(profile, sized, groups) if derive else ()
    derived = tuple(cluster.units for cluster in candidates if builder.extend(units, cluster, pinned))
    if profile.exact_ms is None:
        raise RunError(f"the profile has no times of converted steps\n{_REMEDY}")
    return Space(
        tuple(units),
        tuple(builder.links),
        builder.base,
        builder.base_saved,
        profile.exact_ms * builder.scale,
        sized.batch_size,
        derived,
    )


class _Builder:
    """Builder of units and links. It assigns each slot and each saved storage to the unit that decides it."""

    def __init__(self, profile: Profile, sized: SizedTimeline, unit_of: Mapping[str, int]) -> None:
        self.profile = profile
        self.sized = sized
        self.scale = sized.batch_size / profile.batch_size
        self.links: list[Link] = []
        self.linked: dict[int, set[bool]] = {}
        self.owned: dict[int, list[int]] = {}
        self.slots: dict[int, list[int]] = {}
        self.all_names = tuple(sized.names)
        self.span_bytes: dict[tuple[LayerSettings, tuple[str, ...]], NDArray[np.int64]] = {}
        self.base = np.full(len(profile.timeline.slots), sized.static, dtype=np.int64)
        self.base_saved = 0
        for index, slot in enumerate(profile.timeline.slots):
            if slot.layer is not None and slot.layer in unit_of:
                self.slots.setdefault(unit_of[slot.layer], []).append(index)
            else:
                self.base[index] += sized.exact[index]
        for number, item in enumerate(sized.spans):
            self._assign(number, item, unit_of)

    def _assign(self, number: int, item: SizedSpan, unit_of: Mapping[str, int]) -> None:
        units = tuple(sorted({unit_of[name] for name in item.layers if name in unit_of}))
        saved = int(self.sized.saved[number])
        fixed = (name not in unit_of or name in self.sized.small for name in item.layers)
        always = item.kind == "plain" and any(fixed)
        if len(units) == 1 and not always:
            self.owned.setdefault(units[0], []).append(number)
        elif item.kind in ("plain", "side") and units and not always:
            exact = item.kind == "plain"
            self.links.append(Link(units, self._live(item), item.size * saved, exact))
            for unit in units:
                self.linked.setdefault(unit, set()).add(exact)
        elif always or item.kind == "always":
            self.base += self._live(item)
            self.base_saved += item.size * saved

    def _live(self, item: SizedSpan) -> NDArray[np.int64]:
        live = np.zeros_like(self.base)
        live[item.first : item.last + 1] = item.size
        return live

    def unit(self, number: int, names: tuple[str, ...], pinned: Mapping[str, LayerSettings]) -> Unit:
        layers = [self.profile.layer(name) for name in names]
        pins = [pinned[name] for name in names if name in pinned]
        settings = pins[-1:] or self._settings(layers)
        choices = [self._choice(number, layers, option) for option in settings]
        return Unit(names, layers[0].tag, tuple(_undominated(choices, self.linked.get(number, ()))))

    def extend(self, units: list[Unit], cluster: Cluster, pinned: Mapping[str, LayerSettings]) -> bool:
        """Add the derived choices of `cluster` to its `units`; return False if one of them has none."""
        derived = {
            number: self._derived(number, units[number].layers, cluster, pinned) for number in cluster.units
        }
        if not all(derived.values()):
            return False
        for number, choices in derived.items():
            unit = units[number]
            plain = () if unit.choices[0].settings.store == "derive" else unit.choices
            units[number] = replace(unit, choices=(*plain, *_undominated(choices, ())))
        return True

    def _derived(
        self, number: int, names: Sequence[str], cluster: Cluster, pinned: Mapping[str, LayerSettings]
    ) -> list[Choice]:
        """Return the choices of the unit while the cluster derives."""
        layers = [self.profile.layer(name) for name in names]
        pins = [pinned[name] for name in names if name in pinned]
        if number in cluster.takers and pins and pins[-1].store != "derive":
            return []
        own = (cluster.own(option) for option in pins[-1:] or self._settings(layers))
        options = [option for option in own if option is not None and not option.exact]
        return [self._choice(number, layers, option, cluster) for option in options]

    def _settings(self, layers: Sequence[LayerEntry]) -> list[LayerSettings]:
        """Return exact, then the settings for which every layer of the unit has an error, finest first.

        Of these only options that one of the layers was priced with on all its batches. They include 5 and 7
        bits between measured neighbours: above 4 bits errors are almost proportional to 1 / (level − 1)².
        """
        known = [{option.settings for option in layer.options if option.errors} for layer in layers]
        priced = set().union(*({option.settings for option in layer.priced} for layer in layers))
        common = (settings for settings in priced.intersection(*known) if not settings.exact)
        name = layers[0].name
        shared = {self.sized.compressed({name: settings}).get(name) or settings for settings in common}
        return [EXACT, *sorted(shared | _between(shared), key=_order)]

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
        owned, live = self.owned.get(number, []), np.zeros_like(self.base)
        # The bytes of a span depend on its own unit and on what derives: one prediction serves many units.
        names = tuple(assignment) if cluster or settings.store == "derive" else self.all_names
        counts = self._span_bytes(names, settings)[owned].tolist()
        for span, count in zip(owned, counts, strict=True):
            item = self.sized.spans[span]
            live[item.first : item.last + 1] += count
        saved = sum(count for span, count in zip(owned, counts, strict=True) if self.sized.saved[span])
        for slot in self.slots.get(number, []):
            live[slot] += self._temporary_bytes(slot, settings, linked)
        cost = self.profile.cost_of(layers, assignment, active)
        if cost.error is None or cost.ms is None:
            raise RunError(f"{layers[0].name}: the profile has no price of {settings.label}\n{_REMEDY}")
        return Choice(settings, cost.error, cost.ms * self.scale, live, saved, cluster is not None)

    def _span_bytes(self, names: tuple[str, ...], settings: LayerSettings) -> NDArray[np.int64]:
        """Return the bytes of each span if the layers `names` have `settings`."""
        if (settings, names) not in self.span_bytes:
            self.span_bytes[settings, names] = self.sized.under(dict.fromkeys(names, settings)).spans
        return self.span_bytes[settings, names]

    def _temporary_bytes(self, slot: int, settings: LayerSettings, linked: Collection[str]) -> int:
        if settings.exact:
            return int(self.sized.exact[slot])
        derives = self.profile.timeline.slots[slot].layer in linked
        return int((self.sized.derived if derives else self.sized.packed)[slot])


def _order(settings: LayerSettings) -> tuple[int, int, int, str]:
    return -settings.level, settings.group_size or 0, settings.quant_groups or 0, settings.label


_REMEDY = "profile it with `mesa-tune profile`, which measures all options"


def _between(settings: Collection[LayerSettings]) -> set[LayerSettings]:
    """Return settings of 5 or 7 bits for which both one bit more and one bit less are in `settings`."""
    return {
        replace(lower, level=2 * lower.level)
        for lower in settings
        if lower.level in (16, 64) and replace(lower, level=4 * lower.level) in settings
    }


def _undominated(choices: Sequence[Choice], linked: Collection[bool]) -> list[Choice]:
    """Return the choices that no other dominates in error, time and bytes; of equal ones the first.

    `linked`: whether exact choices also cost the bytes of links (True), and whether others do (False).
    """
    selected: list[Choice] = []
    for index, choice in enumerate(choices):
        rivals = [(rival, True) for rival in selected] + [(rival, False) for rival in choices[index + 1 :]]
        if not any(
            _dominates(rival, choice, or_equal=earlier)
            for rival, earlier in rivals
            if rival.settings.exact == choice.settings.exact or rival.settings.exact not in linked
        ):
            selected.append(choice)
    return selected


def _dominates(rival: Choice, choice: Choice, *, or_equal: bool) -> bool:
    """Return True if `rival` costs nowhere more than `choice` and somewhere less (`or_equal`: or equal).

    A time below zero is noise: it decides nothing, or a search would not give the same policy again.
    """
    costs = (choice.error, max(0.0, choice.ms), choice.saved)
    rival_costs = (rival.error, max(0.0, rival.ms), rival.saved)
    if (
        any(high > low for high, low in zip(rival_costs, costs, strict=True))
        or (rival.live > choice.live).any()
    ):
        return False
    return or_equal or rival_costs != costs or bool((rival.live < choice.live).any())


def _groups(profile: Profile) -> list[tuple[str, ...]]:
    """Group the layers that must have the same settings, in the order of the profile."""
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
    pinned: dict[str, LayerSettings] = {}
    for glob, settings in pins.items():
        matches = [name for name in names if fnmatchcase(name, glob)]
        if not matches:
            raise PolicyError(f"pin {glob!r}: no layer has this name{_near(glob, names)}")
        pinned.update(dict.fromkeys(matches, settings))
    return pinned


def _near(word: str, names: Iterable[str]) -> str:
    near = get_close_matches(word, list(names), 1)
    return f"\nthe nearest is {near[0]!r}" if near else "\n`mesa-tune profile --json` lists the layers"


def _require_errors(profile: Profile) -> None:
    if profile.partial:
        raise RunError(
            "the profile is partial: not all layers were measured\nrun `mesa-tune profile` again: it resumes"
        )
    options = [option for layer in profile.layers for option in layer.options if not option.settings.exact]
    if all(not option.errors for option in options):
        raise RunError(f"the profile has only bytes, no gradient errors\n{_REMEDY}")


@dataclass(frozen=True)
class Limits:
    """Limits of a step: `peak` and `saved` bytes, milliseconds. None: no limit."""

    peak: int | None = None
    saved: int | None = None
    ms: float | None = None

    def allow(self, space: Space, chosen: Sequence[int]) -> bool:
        """Return True if the chosen step is within all limits."""
        return (
            (self.peak is None or int(space.live(chosen).max()) <= self.peak)
            and (self.saved is None or space.saved(chosen) <= self.saved)
            and (self.ms is None or space.ms(chosen) <= self.ms * (1 + 1e-9))
        )
