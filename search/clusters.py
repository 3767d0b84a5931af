"""Clusters of units that derive tensors from one another (`store: derive`).

The hard part is the price. A derived tensor costs no bytes, but the rounding of its producer then reaches
further backward formulas, and the error of the producer includes them. Prices for a cluster of which only
some units derive are not measured, so in a plan either all units of a cluster derive or none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from mesa_tune.policy.settings import LayerSettings
from mesa_tune.profiles.price_table import ActiveDerivations
from mesa_tune.profiles.profile import Profile
from mesa_tune.profiles.timeline.distinct import Assignment
from mesa_tune.profiles.timeline.memory_model import Timeline
from mesa_tune.profiles.timeline.sized_timeline import SizedTimeline


@dataclass(frozen=True)
class Cluster:
    """Units by number, with the settings of their layers under which all possible tensors are derived.

    `takers`: the units that derive. `active`: the derivations under these settings. `linked`: the layers
    that have temporaries for them.
    """

    units: tuple[int, ...]
    takers: frozenset[int]
    assignment: Mapping[str, LayerSettings]
    active: ActiveDerivations
    linked: frozenset[str]

    @staticmethod
    def own(settings: LayerSettings) -> LayerSettings | None:
        """Return the form of `settings` for a unit of a deriving cluster; None if there is none.

        Producers have `store: derive` too: an activation then saves its input for other layers.
        """
        possible = settings.store in ("quantize", "derive") and settings.rows == 1
        return replace(settings, store="derive") if possible else None


def clusters(profile: Profile, sized: SizedTimeline, groups: Sequence[Sequence[str]]) -> Iterator[Cluster]:
    """Yield the clusters whose tensors can all be derived at this size. `groups`: the layers of each unit."""
    unit_of = {name: number for number, names in enumerate(groups) for name in names}
    joined: list[tuple[set[str], set[str]]] = []
    for derivation in profile.derivations:
        names, takers = {*derivation.layers, *derivation.takers, *derivation.sources}, set(derivation.takers)
        names |= {name for layer in names if layer in unit_of for name in groups[unit_of[layer]]}
        disjoint = []
        for cluster in joined:
            if names.isdisjoint(cluster[0]):
                disjoint.append(cluster)
            else:
                names, takers = names | cluster[0], takers | cluster[1]
        joined = [*disjoint, (names, takers)]
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
    linked = sized.under(assignment).linked
    return Cluster(tuple(units), taking, assignment, profile.active(assignment), linked)


def producers(timeline: Timeline, assignment: Assignment) -> tuple[str, ...]:
    """Return the layers from whose outputs others derive what they need under `assignment`."""
    derivers = timeline.at().under(assignment).derivers
    spans = (span for span in timeline.kept if derivers.intersection(span.layers))
    return tuple(dict.fromkeys(source for span in spans for source in span.sources))
