"""The search space of a profile: units of layers that get one setting, and the cost of each choice.

The hard part: what a step saves must be given to the unit that decides it. Layers that save the same tensor
form one unit. A storage that a ReLU shares with a neighbouring layer is saved while either is exact, although
the two have separate settings: a link between units. What no unit decides is the same under every choice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from mesa_tune.errors import RunError
from mesa_tune.policy import Policy
from mesa_tune.policy.policy import Header
from mesa_tune.policy.settings import EXACT, LayerSettings
from mesa_tune.profiles.entries import LayerEntry
from mesa_tune.profiles.own_noise import FEW_ELEMENTS, Shares
from mesa_tune.profiles.price_table import NO_DERIVATIONS
from mesa_tune.profiles.profile import Profile
from mesa_tune.profiles.timeline.packed_sizes import case_shares, mixed
from mesa_tune.profiles.timeline.sized_timeline import SizedSpan, SizedTimeline
from mesa_tune.search.clusters import Cluster, clusters, producers
from mesa_tune.search.problem import Choice, Floats, Limits, Link, Space, Unit
from mesa_tune.search.reruns import RerunModules
from mesa_tune.search.restrictions import NO_RESTRICTIONS, Pins, Restrictions, pinned_settings

__all__ = ["Choice", "Floats", "Limits", "Link", "Pins", "Space", "Unit", "make_space"]


def make_space(
    profile: Profile,
    batch_size: int | None = None,
    pins: Pins | None = None,
    restrictions: Restrictions = NO_RESTRICTIONS,
    *,
    sliced: bool = False,
) -> Space:
    """Return the space of `profile` at `batch_size`, without choices that another one dominates.

    `restrictions` do not bind pinned layers. `sliced`: of the step in which losses have slices. Raise
    RunError for a profile without gradient errors, PolicyError for a pin that matches no layer, BudgetError
    for a batch size that the profile cannot predict.
    """
    _require_errors(profile)
    slices = profile.tiled.settings if sliced and profile.tiled is not None else {}
    profile = profile.in_slices if sliced else profile
    sized = profile.timeline.at(batch_size or profile.batch_size)
    groups = _groups(profile)
    unit_of = {name: number for number, names in enumerate(groups) for name in names}
    builder = _Builder(profile, sized, unit_of, restrictions)
    pinned = pinned_settings(profile, pins or {})
    units = [builder.unit(number, names, pinned) for number, names in enumerate(groups)]
    possible = clusters(profile, sized, groups) if restrictions.derive else ()
    derived = tuple(cluster.units for cluster in possible if builder.extend(units, cluster, pinned))
    if profile.exact_ms is None:
        raise RunError(f"the profile has no times of converted steps\n{_REMEDY}")
    space = Space(
        tuple(units),
        tuple(builder.links),
        builder.base,
        builder.base_saved,
        profile.exact_ms * builder.scale,
        sized.batch_size,
        derived,
        tuple(RerunModules(profile, sized, units, builder.links, restrictions, pinned).modules()),
        floor=profile.error_floor,
        knows_noise=profile.own_noise is not None and profile.own_noise.is_known,
        slices=slices,
    )
    return space.from_fastest()


def policy_at(profile: Profile, space: Space, chosen: Sequence[int]) -> Policy:
    """Return the policy of the choices `chosen`, without a header."""
    assignment, again = space.assignment(chosen), dict(space.taken(chosen))
    rules = [(layer.tag, layer.index, layer.name, assignment[layer.name]) for layer in profile.layers]
    for module, settings in list(again.items()):
        again |= dict.fromkeys(_modules_like(profile, module), settings)
    return Policy.from_assignments(rules).rerunning(again)


def _modules_like(profile: Profile, module: str) -> Iterator[str]:
    """Yield the modules with layers that the traced step skips, stored like those of `module`."""
    for layer in profile.layers:
        like = layer.stored_like or ""
        rest = like.removeprefix(f"{module}.")
        if rest != like and layer.name.endswith(f".{rest}"):
            yield layer.name.removesuffix(f".{rest}")


def with_producers(profile: Profile, space: Space, chosen: Sequence[int]) -> Policy:
    """Return the policy of `policy_at`, with a header that names what layers derive from."""
    header = Header(producers=producers(profile.timeline, space.assignment(chosen)))
    return replace(policy_at(profile, space, chosen), header=header)


class _Builder:
    """Builder of units and links. It assigns each slot and each saved storage to the unit that decides it."""

    def __init__(
        self,
        profile: Profile,
        sized: SizedTimeline,
        unit_of: Mapping[str, int],
        restrictions: Restrictions,
    ) -> None:
        self.profile = profile
        self.restrictions = restrictions
        self.sized = sized
        self.scale = sized.batch_size / profile.batch_size
        self.links: list[Link] = []
        self.linked: dict[int, set[bool]] = {}
        self.owned: dict[int, list[int]] = {}
        self.slots: dict[int, list[int]] = {}
        self.all_names = tuple(sized.names)
        self.temporaries: dict[tuple[LayerSettings, bool], NDArray[np.int64]] = {}
        self.span_bytes: dict[tuple[LayerSettings, tuple[str, ...]], NDArray[np.int64]] = {}
        self.base = np.full(len(profile.timeline.slots), sized.static, dtype=np.int64)
        self.base_saved = 0
        for index, slot in enumerate(profile.timeline.slots):
            if slot.layer is not None and slot.layer in unit_of:
                self.slots.setdefault(unit_of[slot.layer], []).append(index)
            else:
                self.base[index] += sized.once.live[index, 0]
        for number, item in enumerate(sized.spans):
            if not item.again:
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
        undominated = tuple(_undominated(choices, self.linked.get(number, ())))
        return Unit(names, layers[0].tag, undominated, self._shares(layers))

    def _shares(self, layers: Sequence[LayerEntry]) -> Shares:
        """Return on which parameters the error of a unit falls: that of its layers in equal proportions."""
        total: dict[int, float] = {}
        for layer in layers:
            for part, share in layer.shares:
                if self.profile.parameters[part].elements >= FEW_ELEMENTS:
                    total[part] = total.get(part, 0.0) + share / len(layers)
        return tuple(total.items())

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
        known = [{option.settings for option in layer.options if option.ratios} for layer in layers]
        priced = set().union(*({option.settings for option in layer.priced} for layer in layers))
        common = (settings for settings in priced.intersection(*known) if not settings.exact)
        name = layers[0].name
        shared = {self.sized.compressed({name: settings}).get(name) or settings for settings in common}
        allowed = filter(self.restrictions.allows, shared | _between(shared))
        return [EXACT, *sorted(allowed, key=_order)]

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
            derives = self.profile.timeline.slots[slot].layer in linked
            live[slot] += self._temporary_bytes(settings, derives)[slot]
        cost = self.profile.cost_of(layers, assignment, active)
        if cost.ratio is None or cost.ms is None:
            raise RunError(f"{layers[0].name}: the profile has no price of {settings.label}\n{_REMEDY}")
        return Choice(
            settings,
            cost.ratio,
            cost.ms * self.scale,
            live,
            saved,
            derived=cluster is not None,
            root=cost.root,
            weight=cost.root**2 - cost.interaction,
            bias=_bias(layers, settings),
        )

    def _span_bytes(self, names: tuple[str, ...], settings: LayerSettings) -> NDArray[np.int64]:
        """Return the bytes of each span if the layers `names` have `settings`."""
        if (settings, names) not in self.span_bytes:
            self.span_bytes[settings, names] = self.sized.under(dict.fromkeys(names, settings)).spans
        return self.span_bytes[settings, names]

    def _temporary_bytes(self, settings: LayerSettings, derives: bool) -> NDArray[np.int64]:
        """Return the bytes of each slot, if its layer has `settings`, without static ones and spans."""
        if (settings, derives) not in self.temporaries:
            shares = case_shares(settings, derives=derives)
            self.temporaries[settings, derives] = mixed(self.sized.once.live, shares)
        return self.temporaries[settings, derives]


def _bias(layers: Sequence[LayerEntry], settings: LayerSettings) -> float:
    """Return the sum of the biases of `layers` that were measured with `settings`."""
    stored = replace(settings, store="quantize") if settings.store == "derive" else settings
    positions = ((layer, layer.positions.get(stored)) for layer in layers)
    known = (layer.options[position].bias for layer, position in positions if position is not None)
    return sum(bias for bias in known if bias is not None)


def _order(settings: LayerSettings) -> tuple[int, int, int, str]:
    return -settings.level, settings.group_size or 0, settings.quant_groups or 0, settings.label


_REMEDY = "profile it with `mesa-tune profile`, which measures all options"


def _between(settings: Collection[LayerSettings]) -> set[LayerSettings]:
    """Return settings of 5 or 7 bits for which both one bit more and one bit less are in `settings`."""
    return {
        replace(lower, level=2 * lower.level)
        for lower in settings
        if lower.level in (16, 64)
        and lower.store != "levels"
        and replace(lower, level=4 * lower.level) in settings
    }


def _undominated(choices: Sequence[Choice], linked: Collection[bool]) -> list[Choice]:
    """Return the choices that no other dominates in noise, time and bytes; of equal ones the first.

    Exact ones stay: what a module around the unit saves by running again is counted from them.
    `linked`: whether exact choices also cost the bytes of links (True), and whether others do (False).
    """
    selected: list[Choice] = []
    for index, choice in enumerate(choices):
        rivals = [(rival, True) for rival in selected] + [(rival, False) for rival in choices[index + 1 :]]
        if choice.settings.exact or not any(
            _dominates(rival, choice, or_equal=earlier)
            for rival, earlier in rivals
            if rival.settings.exact == choice.settings.exact or rival.settings.exact not in linked
        ):
            selected.append(choice)
    return selected


def _dominates(rival: Choice, choice: Choice, *, or_equal: bool) -> bool:
    """Return True if `rival` costs nowhere more than `choice` and somewhere less (`or_equal`: or equal)."""
    costs = (choice.noise, choice.ms, choice.saved)
    rival_costs = (rival.noise, rival.ms, rival.saved)
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
    together += [(layer.stored_like, layer.name) for layer in profile.layers if layer.stored_like is not None]
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


def _require_errors(profile: Profile) -> None:
    if profile.partial:
        raise RunError(
            "the profile is partial: not all layers were measured\nrun `mesa-tune profile` again: it resumes"
        )
    options = [option for layer in profile.layers for option in layer.options if not option.settings.exact]
    if all(not option.ratios for option in options):
        if {layer.dtype for layer in profile.layers if layer.own_bytes} == {"float64"}:
            raise RunError(
                "the profile has nothing to compress: all that its layers save is float64, which stays "
                "exact\nprofile the model in float32, or its parts that can be"
            )
        raise RunError(f"the profile has only bytes, no gradient errors\n{_REMEDY}")
