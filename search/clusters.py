"""Units that derive from one another (`store: derive`): all of a cluster do, or none.

What is derived costs no bytes, and its producers err more: their price in a cluster that derives counts every
backward that their rounding gets into. A cluster in which only some derive would need further prices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from mesa_tune.policy.settings import LayerSettings
from mesa_tune.profiler.profile import ActiveDerivations, Profile
from mesa_tune.profiler.timeline import SizedTimeline


@dataclass(frozen=True)
class Cluster:
    """Units by number, with settings of all their layers under which everything is derived that can be.

    `takers`: the units that derive. `active` and `linked`: what then takes place, and the layers with
    temporaries for it.
    """

    units: tuple[int, ...]
    takers: frozenset[int]
    assignment: Mapping[str, LayerSettings]
    active: ActiveDerivations
    linked: frozenset[str]

    @staticmethod
    def own(settings: LayerSettings) -> LayerSettings | None:
        """`settings` as units have them while the cluster derives; None where they cannot derive so.

        Those that others derive from have `store: derive`, too: an activation keeps its input for others.
        """
        return replace(settings, store="derive") if settings.store in ("quantize", "derive") else None


def clusters(profile: Profile, sized: SizedTimeline, groups: Sequence[Sequence[str]]) -> Iterator[Cluster]:
    """The clusters of units (layers of each: `groups`) in which everything can be derived at this size."""
    unit_of = {name: number for number, names in enumerate(groups) for name in names}
    joined: list[tuple[set[str], set[str]]] = []
    for one in profile.derivations:
        names, takers = {*one.layers, *one.takers, *one.sources}, set(one.takers)
        names = {name for known in names if known in unit_of for name in groups[unit_of[known]]} | names
        apart = []
        for other in joined:
            if names.isdisjoint(other[0]):
                apart.append(other)
            else:
                names, takers = names | other[0], takers | other[1]
        joined = [*apart, (names, takers)]
    for names, takers in joined:
        if names <= unit_of.keys() and not names & sized.small:
            yield _cluster(profile, sized, groups, sorted({unit_of[name] for name in names}), takers)


def _cluster(
    profile: Profile,
    sized: SizedTimeline,
    groups: Sequence[Sequence[str]],
    units: Sequence[int],
    takers: set[str],
) -> Cluster:
    taking = frozenset(unit for unit in units if not takers.isdisjoint(groups[unit]))
    assignment = {name: LayerSettings(store="derive") for unit in units for name in groups[unit]}
    linked = frozenset(sized.links(sized.compressed(assignment)))
    return Cluster(tuple(units), taking, assignment, profile.active(assignment), linked)
